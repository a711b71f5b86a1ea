"""The head of one stage: loss, hits and entropy of its tiles, against the whole logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exactness import quick_jit

from sppo_jax.arrays.dtypes import accumulator
from sppo_jax.pipeline import vocabulary

NUM_TOKENS, WIDTH, VOCAB, ROWS = 21, 12, 29, 32  # three tiles of 8, and rows of the head that are padding


def drawn(dtype, *, ties: bool):
    """Returns hidden states, rows of the head, and targets of which every third is missing."""
    rng = np.random.default_rng(0)
    x_TD, rows_VD = rng.normal(size=(NUM_TOKENS, WIDTH)), rng.normal(size=(ROWS, WIDTH))
    if ties:  # each token has three equal logits, of which the highest are equal too
        rows_VD = rows_VD[np.arange(ROWS) % 10]
    targets_T = (x_TD @ rows_VD[:VOCAB].T).argmax(-1)
    targets_T[1::3] = rng.integers(0, VOCAB, len(targets_T[1::3]))
    if ties:
        targets_T[::6] += 10
    targets_T[2::3] = -1
    return jnp.asarray(x_TD, dtype), jnp.asarray(rows_VD, dtype), jnp.asarray(targets_T, jnp.int32)


@pytest.mark.parametrize("cap", [0.0, 3.0])
@pytest.mark.parametrize("dtype, rtol", [("float64", 1e-12), ("float32", 1e-5), ("bfloat16", 2e-3)])
def test_loss_hits_and_entropy_are_those_of_the_whole_logits(x64, monkeypatch, dtype, rtol, cap):
    monkeypatch.setattr(vocabulary, "TILE_TOKENS", 8)
    x_TD, rows_VD, targets_T = drawn(dtype, ties=False)
    acc, scale = accumulator(jnp.dtype(dtype)), 0.25
    given = vocabulary.Head(lambda weights, x: x * weights, jnp.ones((), x_TD.dtype), rows_VD, VOCAB, 1, cap)
    zeros = jnp.zeros(rows_VD.shape, acc)
    got = quick_jit(lambda x: vocabulary.head(given, x, targets_T, jnp.asarray(scale, acc), zeros))(x_TD)

    logits = np.asarray(x_TD, np.float64) @ np.asarray(rows_VD, np.float64)[:VOCAB].T
    logits = cap * np.tanh(logits / cap) if cap else logits
    log_p, has_target = np.asarray(jax.nn.log_softmax(logits)), np.asarray(targets_T) >= 0
    loss = -log_p[np.arange(NUM_TOKENS), np.maximum(targets_T, 0)] * has_target
    entropy = -(np.exp(log_p) * log_p).sum(-1) * has_target
    np.testing.assert_allclose(got.loss_T, loss, rtol=rtol, atol=4 * rtol)
    found = got.loss_T.sum() - got.over_entropy_T.sum() / scale
    np.testing.assert_allclose(found, entropy.sum(), rtol=2 * rtol)
    hits = (logits.argmax(-1) == np.asarray(targets_T)) & has_target
    np.testing.assert_array_equal(got.hit_T, hits)
    assert hits.any() and (has_target & ~hits).any() and abs(loss.sum() - entropy.sum()) > 1


def test_of_equal_logits_the_first_is_the_most_likely(monkeypatch):
    monkeypatch.setattr(vocabulary, "TILE_TOKENS", 8)
    x_TD, rows_VD, targets_T = drawn("float32", ties=True)
    given = vocabulary.Head(lambda weights, x: x, (), rows_VD, VOCAB, 1, 0.0)
    zeros = jnp.zeros(rows_VD.shape)
    got = quick_jit(lambda x: vocabulary.head(given, x, targets_T, 1.0, zeros, gradients=False))(x_TD)
    logits = quick_jit(lambda x: jnp.einsum("td,vd->tv", x, rows_VD)[:, :VOCAB])(x_TD)
    assert (jnp.sum(logits == logits.max(-1, keepdims=True), -1) > 1).all()
    hits = np.asarray(logits).argmax(-1) == np.asarray(targets_T)
    np.testing.assert_array_equal(got.hit_T, hits)
    assert hits.any() and (~hits[::6]).all()
