"""Programs whose stash lies on the host in several arrays have the dense gradients, and the bits of a whole stash."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from exactness import assert_exact, dense_step, small_model, small_plan
from flax import nnx
from programs import HOST, Case, batches, compiled_step

from sppo_jax.pipeline.api import check_whole, value_and_grad
from sppo_jax.pipeline.params.layout import make_mesh
from sppo_jax.pipeline.params.storage import stored_shapes
from sppo_jax.train.state import shardings_of, state_from, state_shapes
from sppo_jax.train.step import make_train_step

THREE = (300, 24, 700)
BREADTH_FIRST = dict(schedule="breadth-first", mesh=(1, 1, 1), interleave=2, weights="resident")
CASES = {
    # Rows of early chunks are short, and chunks wait on the host too.
    "late-attention": Case(
        BREADTH_FIRST
        | dict(chunks=(8, 8, 8, 16), places=HOST, alpha=1.0, attention_from=2, kv="rebuild", waiting="host"),
        dict(num_layers=4),
    ),
}
SLOW = {
    "keys-and-values": Case(
        BREADTH_FIRST | dict(chunks=(8, 8, 8, 16), places=HOST, alpha=1.0, kv="host"), dict(num_layers=4)
    ),
    "part-of-the-tokens": Case(
        dict(schedule="seq1f1b", chunks=(16, 12, 12), mesh=(1, 2, 1), sequences=2, places=HOST, alpha=(0.6, 0.3)),
        dict(num_layers=4),
    ),
    "the-rest-of-a-layer": Case(
        dict(schedule="sppo", chunks=(8, 8, 8, 8), mesh=(1, 1, 2), places=("host", "host", "host"), alpha=0.7),
        dict(num_layers=2),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CASES, *SLOW])
def test_a_stash_in_pieces_has_the_bits_of_the_whole_and_the_dense_gradients(name, x64):
    case = (CASES | SLOW)[name]
    plan, model = case.make_plan(), case.make_model()
    drawn = list(batches(np.random.default_rng(0), plan, model.config.vocab_size, 2))
    params, dense = nnx.state(model, nnx.Param), dense_step(model)
    whole = compiled_step(case, plan, model, drawn[0])
    for pieces in ((858, 166), THREE) if name in SLOW else (THREE,):
        cut = replace(plan, host_pieces=pieces)
        step = compiled_step(case, cut, model, drawn[0])
        for batch in drawn:
            assert_exact(cut, model, batch, step=step, dense=dense)
            jax.tree.map(np.testing.assert_array_equal, step(params, batch), whole(params, batch))


def test_a_training_step_keeps_its_pieces_from_step_to_step(x64):
    plan = small_plan((8, 8, 8), places=HOST, alpha=0.7)
    model = small_model(num_layers=2)
    mesh, optimizer = make_mesh(plan), optax.sgd(0.1)
    drawn = list(batches(np.random.default_rng(0), plan, model.config.vocab_size, 2))

    def train(plan):
        step = value_and_grad(plan, model, mesh)
        shapes = state_shapes(optimizer, stored_shapes(plan, nnx.state(model, nnx.Param), mesh), mesh)
        state = state_from(jax.tree.map(jnp.copy, nnx.state(model, nnx.Param)), optimizer, shapes)
        run = make_train_step(step, optimizer, shardings_of(shapes))
        for batch in drawn:
            state, metrics = run(state, {key: jnp.asarray(x) for key, x in batch.items()}, jnp.zeros(1, jnp.int32))
        return state, metrics, step

    *whole, _ = train(plan)
    *cut, step = train(replace(plan, host_pieces=THREE))
    jax.tree.map(np.testing.assert_array_equal, cut, whole)
    pieces = jax.tree.leaves(step.stash_shapes)
    assert len(pieces) == 3 * len(step.stash_shapes) >= 3
    assert [piece.sharding.memory_kind for piece in pieces] == ["pinned_host"] * len(pieces)


@pytest.mark.parametrize(("platform", "pieces", "refused"), [("gpu", 2, True), ("gpu", 0, False), ("cpu", 2, False)])
def test_a_call_without_the_pieces_is_refused_on_gpus(platform, pieces, refused):
    plan = replace(small_plan((8, 8, 8)), host_pieces=(858, 166))
    step = SimpleNamespace(plan=plan, platform=platform, stash_shapes={"a class": (None,) * pieces} if pieces else {})
    with pytest.raises(ValueError, match="858, 166.*make_train_step") if refused else nullcontext():
        check_whole(step)
