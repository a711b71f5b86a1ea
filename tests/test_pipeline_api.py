"""The public functions at their edges: other meshes in force, wrong arguments, and asked for twice."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exactness import quick_options, random_batch, small_model, small_plan
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from sppo_jax.pipeline import api
from sppo_jax.pipeline.api import evaluate, value_and_grad
from sppo_jax.pipeline.params.layout import make_mesh

pytestmark = pytest.mark.xdist_group("pipeline_api")
PLAN = small_plan((8, 8), mesh=(1, 2, 2))


@pytest.fixture(scope="module")
def model():
    return small_model(vocab_size=20, dtype="float32", num_layers=2)


@pytest.fixture(scope="module")
def case(model):
    batch = random_batch(np.random.default_rng(0), 1, 16, 20)
    params = nnx.state(model, nnx.Param)
    return params, batch, value_and_grad(PLAN, model)(params, batch)


def meshes():
    auto, explicit = AxisType.Auto, AxisType.Explicit
    own = jax.make_mesh((1, 2, 2), ("data", "pipe", "seq"), axis_types=(explicit,) * 3, devices=jax.devices()[:4])
    return {
        "own": make_mesh(PLAN),
        "own, explicit": own,
        "of eight": jax.make_mesh((8,), ("x",), axis_types=(auto,)),
        "of eight, explicit": jax.make_mesh((4, 2), ("x", "y"), axis_types=(explicit,) * 2),
        "of two": jax.make_mesh((2,), ("x",), axis_types=(auto,), devices=jax.devices()[:2]),
    }


@pytest.mark.parametrize("name", meshes())
def test_it_works_whatever_mesh_is_in_force(model, case, name):
    params, batch, (want, want_grads) = case
    with jax.set_mesh(meshes()[name]):
        loss, grads = value_and_grad(PLAN, model)(params, batch)
    assert float(loss) == float(want)
    chex.assert_trees_all_equal(grads, want_grads)


def spread_over(mesh, batch):
    sharding = NamedSharding(mesh, PartitionSpec(None, "seq"))
    return {key: jax.device_put(x, sharding) for key, x in batch.items()}


def test_it_works_within_a_jit_under_the_plans_mesh(model, case):
    params, batch, (want, _) = case
    f, mesh = value_and_grad(PLAN, model), make_mesh(PLAN)
    with jax.set_mesh(mesh):
        step = jax.jit(lambda p, b: f(p, b), compiler_options=quick_options())
        loss, _ = step(params, spread_over(mesh, batch))
    np.testing.assert_allclose(float(loss), float(want), rtol=1e-6)


def test_arrays_of_an_explicit_mesh_are_taken_outside_of_jit_and_refused_within(model, case):
    params, batch, (want, _) = case
    f, mesh = value_and_grad(PLAN, model), meshes()["own, explicit"]
    with jax.set_mesh(mesh):
        placed = spread_over(mesh, batch)
        assert float(f(params, placed)[0]) == float(want)
        with pytest.raises(ValueError, match="got a mesh of AxisType.Explicit; use a mesh of AxisType.Auto"):
            jax.jit(lambda p, b: f(p, b))(params, placed)


def test_a_mesh_that_cannot_work_is_named(model, case):
    params, batch, _ = case
    f = value_and_grad(PLAN, model)
    with jax.set_mesh(meshes()["of eight"]), pytest.raises(ValueError, match="the plan's 4 devices, got 8 .*outside"):
        jax.jit(lambda p, b: f(p, b))(params, batch)


def test_the_same_plan_and_model_compile_once(model, case, monkeypatch):
    params, batch, (want, _) = case
    runs = []
    original = api.Step._run
    monkeypatch.setattr(api.Step, "_run", lambda *args: runs.append(1) or original(*args))
    other = small_model(seed=1, vocab_size=20, dtype="float32", num_layers=2)
    for each in (model, nnx.merge(*nnx.split(model)), other):
        again = value_and_grad(dataclasses.replace(PLAN), each)
        assert float(again(params, batch)[0]) == float(want)
    assert runs == []
    assert float(value_and_grad(small_plan((16,), mesh=(1, 2, 2)), model)(params, batch)[0]) == pytest.approx(
        float(want)
    )
    assert runs == [1]


class Scaled(nnx.Module):
    """A block with a constant."""

    def __init__(self, config, *, rngs):
        size = config.hidden_size // config.num_heads
        self.weights = nnx.Param(jnp.ones((config.hidden_size, config.num_heads, size)))
        self.scale = nnx.Variable(jnp.full((), 0.5))

    def before_attention(self, x, positions):
        q = jnp.einsum("td,dnh->tnh", x, self.weights[...]) * self.scale[...]
        return q, q, q

    def after_attention(self, x, out):
        return x + out.reshape(x.shape) * self.scale[...]


def test_other_constants_are_another_program():
    plan = small_plan((8, 8))
    batch = random_batch(np.random.default_rng(0), 1, 16, 20)
    losses = []
    for value in (0.5, 0.5, 0.1):
        scaled = small_model(layer=Scaled, vocab_size=20, dtype="float32", num_layers=2)
        scaled.layers.scale[...] = jnp.full((2,), value)
        losses.append(float(value_and_grad(plan, scaled)(nnx.state(scaled, nnx.Param), batch)[0]))
    assert losses[0] == losses[1] != losses[2]


def wrong(model, params, batch):
    """Returns arguments that are wrong, and what is said of them."""
    floats = {**batch, "tokens": batch["tokens"].astype(np.float32)}
    lists = {key: x.tolist() for key, x in batch.items()}
    larger = nnx.state(small_model(vocab_size=21, dtype="float32", num_layers=2), nnx.Param)
    biased = nnx.state(small_model(vocab_size=20, dtype="float32", num_layers=2, qkv_bias=True), nnx.Param)
    twice = {key: np.repeat(x, 2, 0) for key, x in batch.items()}
    return {
        "the model": (
            (model, batch),
            r"must be an nnx.State, got the model itself; give nnx.state\(model, nnx.Param\)",
        ),
        "a dict": ((nnx.to_pure_dict(params), batch), "must be an nnx.State, got a dict; give nnx.state"),
        "other shapes": ((larger, batch), r"got \[21, 24\] for embedding, whose shape is \[20, 24\]"),
        "others": ((biased, batch), "must be those of the plan's model, got params with layers/key_bias"),
        "lists": ((params, lists), "'tokens' must be an array, got a list; use numpy.asarray"),
        "floats": ((params, floats), "'tokens' must be int32, got float32; cast the array"),
        "twice": ((params, twice), r"plan's shape \(1, 16\), got \(2, 16\)"),
        "no dict": ((params, list(batch.values())), "must be a dict of arrays, got a list"),
    }


WRONG = ["the model", "a dict", "other shapes", "others", "lists", "floats", "twice", "no dict"]


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("make", [value_and_grad, evaluate])
def test_wrong_arguments_are_told_in_a_line(model, case, name, make):
    params, batch, _ = case
    arguments, message = wrong(model, params, batch)[name]
    with pytest.raises(ValueError, match=message) as refused:
        make(PLAN, model)(*arguments)
    assert "\n" not in str(refused.value)


def test_wrong_traced_arguments_are_told_too(model, case):
    params, batch, _ = case
    f = value_and_grad(PLAN, model)
    with pytest.raises(ValueError, match="'tokens' must be int32, got float32"):
        jax.eval_shape(f, params, {**batch, "tokens": batch["tokens"].astype(np.float32)})


@pytest.mark.parametrize("make", [value_and_grad, evaluate])
def test_the_loaded_cudnn_is_judged_if_the_plan_runs_it(make, model, monkeypatch):
    def refuse(device):
        raise ValueError(f"not on the {device.platform}")

    monkeypatch.setattr(api, "check_cudnn", refuse)
    make(PLAN, model)
    with pytest.raises(ValueError, match="not on the cpu"):
        make(dataclasses.replace(PLAN, kernel="cudnn"), model)
