"""One step by itself: what is not finite is left out, counted, and told."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sppo_jax.train.state import first_state, shardings_of, state_from, state_shapes
from sppo_jax.train.step import make_train_step
from sppo_jax.train.watch.signals import GO, SAVE, STOP, Signals

MESH = Mesh(np.array(jax.devices()[:2]), ("data",))
OPTIMIZER = optax.adam(0.1)


def value_and_grad(params, batch):
    """The gradient is the batch's, the loss its mean: both as finite as it is."""
    return jnp.mean(batch["x"]), jax.tree.map(lambda leaf: leaf * 0 + batch["x"], params)


@pytest.fixture
def step_and_state():
    params = nnx.State({"w": nnx.Param(jnp.ones(3))})
    params = jax.device_put(params, NamedSharding(MESH, PartitionSpec()))
    shapes = state_shapes(OPTIMIZER, params, MESH)
    return make_train_step(value_and_grad, OPTIMIZER, shardings_of(shapes)), state_from(params, OPTIMIZER, shapes)


def batch(*values):
    return {"x": jnp.array(values, jnp.float32), "targets": jnp.zeros((1, 4), jnp.int32)}


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, -jnp.inf])
def test_a_step_that_is_not_finite_changes_nothing_but_counts(step_and_state, bad):
    step, state = step_and_state
    signals = Signals(MESH)
    state, _ = step(state, batch(1, 2, 3), signals.array())
    before = jax.tree.map(np.array, state)
    state, metrics = step(state, batch(1, bad, 3), signals.array())
    chex.assert_trees_all_equal(state.params, before.params)
    chex.assert_trees_all_equal(state.opt_state, before.opt_state)
    assert (int(state.step), int(state.num_skipped), int(state.num_skipped_in_row)) == (2, 1, 1)
    assert not np.isfinite(metrics["loss"]) and int(metrics["num_skipped"]) == 1
    state, _ = step(state, batch(bad, bad, bad), signals.array())
    assert int(state.num_skipped_in_row) == 2
    state, _ = step(state, batch(3, 2, 1), signals.array())
    assert (int(state.step), int(state.num_skipped), int(state.num_skipped_in_row)) == (4, 2, 0)
    assert not np.array_equal(state.params["w"].get_value(), before.params["w"].get_value())


def test_every_process_sees_the_largest_wish(step_and_state):
    step, state = step_and_state
    spread = NamedSharding(MESH, PartitionSpec("data"))
    for requests in ([GO, GO], [GO, SAVE], [STOP, SAVE], [GO, STOP]):
        signals = jax.device_put(jnp.array(requests, jnp.int32), spread)
        state, metrics = step(state, batch(1, 2, 3), signals)
        assert int(metrics["signal"]) == max(requests)


def test_the_first_state_counts_from_nothing():
    params = nnx.State({"w": nnx.Param(jnp.ones(3))})
    state = first_state(params, OPTIMIZER.init(params))
    assert [int(each) for each in state[:3]] == [0, 0, 0]


@pytest.mark.parametrize("targets, count", [([-1, -1], 0), ([-1, 5], 1), ([0, -1], 1), ([0, 7], 2)])
def test_a_step_says_how_many_targets_it_has(step_and_state, targets, count):
    step, state = step_and_state
    given = batch(1, 2, 3) | {"targets": jnp.array([targets], jnp.int32)}
    assert int(step(state, given, Signals(MESH).array())[1]["num_targets"]) == count
