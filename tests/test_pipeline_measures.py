"""What a step measures of its predictions, against an evaluation of the batch and against the dense model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exactness import quick_jit, quick_options, random_batch, small_model, small_plan
from flax import nnx
from test_pipeline_evaluate import CAPPED, VOCAB, batch_with_hits, dense_logits

from sppo_jax.config import OptimizerConfig
from sppo_jax.pipeline.api import evaluate, value_and_grad
from sppo_jax.pipeline.params import layout, storage
from sppo_jax.train.state import shardings_of, state_from, state_shapes
from sppo_jax.train.step import make_optimizer, make_schedule, make_train_step
from sppo_jax.train.watch.signals import Signals

CASES = {
    "pipe 2, data 2": (dict(chunks=(8, 12, 12), mesh=(2, 2, 1)), dict(num_layers=2, **CAPPED)),
    "breadth-first on a ring, weights gathered": (
        dict(chunks=(16, 16), mesh=(1, 2, 2), kind="ring", sequences=2, schedule="breadth-first", interleave=2)
        | dict(kv="rebuild", weights="gathered"),
        {},
    ),
}


@pytest.mark.parametrize(
    "name", [name if i == 0 else pytest.param(name, marks=pytest.mark.slow) for i, name in enumerate(CASES)]
)
def test_a_step_has_the_accuracy_and_entropy_of_the_weights_before_it(x64, name):
    """The accuracy is exactly that of an evaluation, in each of three steps that change the weights."""
    shape, changes = CASES[name]
    plan, model = small_plan(**shape), small_model(vocab_size=VOCAB, **changes)
    mesh, params = layout.make_mesh(plan), nnx.state(model, nnx.Param)
    config = OptimizerConfig(lr=0.1, warmup_steps=0)
    optimizer = make_optimizer(config, make_schedule(config, 3), params)
    f, scores = value_and_grad(plan, model, mesh), quick_jit(evaluate(plan, model, mesh))
    f.compiler_options = quick_options()
    shapes = state_shapes(optimizer, storage.stored_shapes(plan, params, mesh), mesh)
    step = make_train_step(f, optimizer, shardings_of(shapes))
    placed = storage.store(jax.tree.map(jnp.copy, params), shapes.params)
    state = state_from(jax.tree.map(jax.device_put, placed, shardings_of(shapes).params), optimizer, shapes)
    rng, found = np.random.default_rng(0), []
    for batch in (batch_with_hits(rng, model), random_batch(rng, 2, 32, VOCAB, padding=5), batch_with_hits(rng, model)):
        before = storage.store(jax.device_get(state.params), params)
        state, metrics = step(state, batch, Signals(mesh).array())
        found.append(int(metrics["num_hits"]))
        assert found[-1] == np.sum(scores(before, batch).hits_BS)
        nnx.update(model, jax.tree.map(jnp.asarray, before))
        logits, wanted = dense_logits(model, batch), batch["targets"] >= 0
        log_p = np.asarray(jax.nn.log_softmax(logits))[wanted]
        entropy = -(np.exp(log_p) * log_p).sum(-1).mean()
        np.testing.assert_allclose(metrics["entropy"], entropy, rtol=1e-9)
        assert found[-1] == np.sum((logits.argmax(-1) == batch["targets"]) & wanted)
        assert abs(entropy - float(metrics["loss"])) > 0.05
    assert found[0] > 10 and found[2] != found[0]
