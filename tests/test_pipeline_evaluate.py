"""Each token's loss and hit from the pipeline, against the dense model's logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exactness import quick_jit, random_batch, small_model, small_plan
from flax import nnx

from sppo_jax.pipeline.api import evaluate

VOCAB = 51  # divides by no number of stages: some rows of the sharded head are padding
CAPPED = dict(tied_embeddings=True, logit_cap=2.0, embedding_scale=3.3)
CASES = {
    "seq1f1b ulysses": (dict(chunks=(16, 8, 8), mesh=(1, 2, 2), schedule="seq1f1b", sequences=2), {}),
    "ring, two pipelines": (dict(chunks=(16, 16), mesh=(2, 2, 2), kind="ring"), CAPPED),
    "breadth-first": (
        dict(chunks=(12, 8, 12), mesh=(1, 2, 2), sequences=2, schedule="breadth-first", interleave=2)
        | dict(kv="rebuild", weights="gathered"),
        {},
    ),
    "waiting on the host": (
        dict(chunks=(12, 8, 4, 8), mesh=(1, 2, 1), sequences=2, schedule="breadth-first", interleave=2)
        | dict(kv="rebuild", waiting="host"),
        {},
    ),
    "one stage": (dict(chunks=(12, 20), sequences=2), {}),
}
SLOW = ("seq1f1b ulysses", "one stage")


def dense_logits(model, batch):
    arrays = {key: jnp.asarray(value) for key, value in batch.items()}
    return np.asarray(jax.jit(lambda b: model(b["tokens"], b["positions"], b["document_ids"]))(arrays))


def batch_with_hits(rng, model):
    """Draws documents whose targets are, one in two, what the dense model finds most likely."""
    batch = random_batch(rng, 2, 32, VOCAB, padding=3)
    best = dense_logits(model, batch).argmax(-1)
    asked = (batch["targets"] >= 0) & (rng.random(best.shape) < 0.5)
    return {**batch, "targets": np.where(asked, best, batch["targets"]).astype(np.int32)}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in CASES])
def test_losses_and_hits_are_those_of_the_dense_model(x64, name):
    shape, changes = CASES[name]
    plan, model = small_plan(**shape), small_model(vocab_size=VOCAB, **changes)
    batch = batch_with_hits(np.random.default_rng(0), model)
    got = quick_jit(evaluate(plan, model))(nnx.state(model, nnx.Param), batch)

    logits, targets = dense_logits(model, batch), batch["targets"]
    log_p = np.asarray(jax.nn.log_softmax(logits))
    want = -np.take_along_axis(log_p, np.maximum(targets, 0)[..., None], -1)[..., 0] * (targets >= 0)
    assert (targets >= 0).any() and (targets < 0).any()
    np.testing.assert_allclose(got.losses_BS, want, rtol=1e-10, atol=1e-12)

    hits = (logits.argmax(-1) == targets) & (targets >= 0)
    assert hits.any() and (~hits & (targets >= 0)).any()
    assert got.hits_BS.dtype == bool
    np.testing.assert_array_equal(got.hits_BS, hits)


def test_of_equally_likely_tokens_the_first_is_the_hit(x64):
    plan, model = small_plan((16, 16), mesh=(1, 2, 1), sequences=2), small_model(vocab_size=VOCAB)
    model.head[...] = jnp.zeros_like(model.head[...])
    batch = random_batch(np.random.default_rng(0), 2, 32, 3)  # targets 0, 1 and 2
    got = quick_jit(evaluate(plan, model))(nnx.state(model, nnx.Param), batch)
    np.testing.assert_array_equal(got.hits_BS, batch["targets"] == 0)
    assert got.hits_BS.any()
