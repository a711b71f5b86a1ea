"""Gradients that must travel from the last chunk to the first through keys and values, and only through them."""

import numpy as np
import pytest
from exactness import assert_exact, dense_step, quick_jit, random_batch, relative_errors, small_model, small_plan
from flax import nnx

from sppo_jax.attention.spreading import sequence
from sppo_jax.pipeline.api import value_and_grad

RARE = 7
PLANS = {
    "ulysses": dict(chunks=(16, 16, 16), mesh=(1, 2, 2)),
    "ring": dict(chunks=(16, 16, 16), mesh=(1, 2, 2), kind="ring"),
}


def far_batch(plan, vocab_size):
    """One document; its first chunk holds tokens found nowhere else, and only its last chunk has targets."""
    first, last = plan.chunk_lengths[0], plan.sequence_length - plan.chunk_lengths[-1]
    batch = random_batch(np.random.default_rng(0), 1, plan.sequence_length, vocab_size, documents=1)
    for key in ("tokens", "targets"):
        batch[key] = np.where(batch[key] == RARE, RARE + 1, batch[key])
    batch["tokens"][:, [0, 5, first - 1]] = RARE
    batch["targets"][:, :last] = -1
    return batch


@pytest.mark.parametrize("kind", ["ulysses", pytest.param("ring", marks=pytest.mark.slow)])
def test_the_last_chunk_reaches_the_embeddings_of_the_first(x64, monkeypatch, kind):
    plan, model = small_plan(**PLANS[kind]), small_model()
    params, batch = nnx.state(model, nnx.Param), far_batch(plan, model.config.vocab_size)
    want = dense_step(model)(params, batch)
    assert_exact(plan, model, batch, dense=lambda *_: want)
    assert np.abs(want[1]["embedding"][...][RARE]).max() > 1e-6

    true = sequence.take_gradient

    def cut(*args):
        dk, dv, sums = true(*args)
        return dk * 0, dv * 0, sums

    monkeypatch.setattr(sequence, "take_gradient", cut)
    _, grads = quick_jit(value_and_grad(plan, model))(params, batch)
    assert not np.asarray(grads["embedding"][...][RARE]).any()
    assert max(relative_errors(grads, want[1]).values()) > 0.1
