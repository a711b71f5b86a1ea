"""Layers with experts train as the dense model does: balance, biases of the choice, and what a step reports."""

from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exactness import quick_options, random_batch, relative_errors, small_model, small_plan
from flax import nnx
from jax.sharding import Mesh

from sppo_jax.config import OptimizerConfig
from sppo_jax.models.dense import dense_losses, dense_value_and_grad
from sppo_jax.models.moe.balance import moved_bias
from sppo_jax.pipeline import api
from sppo_jax.pipeline.layers.token_sums import Totals
from sppo_jax.pipeline.measures import Measures
from sppo_jax.pipeline.params import layout, storage
from sppo_jax.train.state import shardings_of, state_from, state_shapes
from sppo_jax.train.step import make_optimizer, make_schedule, make_train_step
from sppo_jax.train.watch.signals import Signals

NUM_STEPS = 20
EXPERTS = dict(count=6, chosen=2, size=7, scores="sigmoid", scaling=2.5, choice_bias=True, bias_rate=0.02, balance=0.1)
REPORTED = ("loss", "grad_norm", "penalty", "expert_load", "expert_entropy", "dead_experts")


def make_model():
    return small_model(num_layers=2, experts=EXPERTS)


def batches():
    rng = np.random.default_rng(3)
    return [random_batch(rng, 2, 32, 53, padding=3) for _ in range(NUM_STEPS)]


def optimizer_of(model, place):
    config = OptimizerConfig(lr=0.02, warmup_steps=3, clip_norm=4.0, place=place)
    return make_optimizer(config, make_schedule(config, NUM_STEPS), nnx.state(model, nnx.Param))


def trained(value_and_grad, mesh, stored, model, place="device"):
    """Returns parameters in their own shapes, and what each step reports."""
    optimizer, params = optimizer_of(model, place), nnx.state(model, nnx.Param)
    shapes = state_shapes(optimizer, stored, mesh)
    value_and_grad.compiler_options = quick_options()
    step = make_train_step(value_and_grad, optimizer, shardings_of(shapes), model.config)
    placed = storage.store(jax.tree.map(jnp.copy, params), shapes.params)
    state = state_from(jax.tree.map(jax.device_put, placed, shardings_of(shapes).params), optimizer, shapes)
    outputs = []
    for batch in batches():
        state, metrics = step(state, batch, Signals(mesh).array())
        outputs.append([float(metrics[name]) for name in REPORTED])
    return jax.device_get(storage.store(jax.device_get(state.params), params)), np.array(outputs)


@lru_cache(maxsize=1)
def dense():
    model = make_model()

    def f(params, batch):
        return dense_value_and_grad(model)(params, batch)

    def with_measures(params, batch):
        graphdef, _, rest = nnx.split(model, nnx.Param, ...)
        tokens = batch["tokens"], batch["positions"], batch["document_ids"]
        _, sums_LB = nnx.merge(graphdef, params, rest).hidden_states_and_sums(*tokens)
        totals = Totals(dense_losses(model, params, batch)[1], jax.tree.map(lambda x: x.sum(1), sums_LB))
        return *f(params, batch), Measures(jnp.int32(0), jnp.zeros(()), totals)

    f.with_measures = with_measures
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    params = jax.device_put(nnx.state(model, nnx.Param), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
    return trained(f, mesh, params, model)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["host", "device"])
def test_twenty_steps_are_those_of_the_dense_model(place, x64):
    model, order = make_model(), dict(schedule="breadth-first", interleave=2, kv="rebuild", weights="gathered")
    places = dict(places=("host", "recompute", "recompute"), alpha=1.0)
    plan = small_plan((16, 16), mesh=(2, 1, 2), **order, **places, optimizer=place)
    mesh = layout.make_mesh(plan)
    stored = storage.stored_shapes(plan, nnx.state(model, nnx.Param), mesh)
    params, outputs = trained(api.value_and_grad(plan, model, mesh), mesh, stored, model, place)
    want, want_outputs = dense()
    np.testing.assert_allclose(outputs, want_outputs, rtol=1e-9)
    assert max(relative_errors(params, want).values()) < 1e-9
    moved = np.asarray(params["layers"]["experts"]["choice_bias"][...] - model.layers.experts.choice_bias[...])
    assert np.abs(moved).max() > 0.05 and np.allclose(moved / 0.02, np.round(moved / 0.02), atol=1e-6)


def test_a_bias_moves_towards_experts_with_less_than_the_mean_load():
    moved = moved_bias(jnp.zeros((1, 4)), jnp.asarray([[8.0, 4, 4, 0]]), 0.5)
    np.testing.assert_array_equal(moved, [[-0.5, 0, 0, 0.5]])
