"""The short convolution: taps that would reach another document see zeros, and its tail is a state."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from delta_cases import draw_documents, place_of, worst

from sppo_jax.mixers.convolution import convolve


def draw(rng, length, heads=2, channels=3, taps=4):
    shapes = (length, heads, channels), (heads, taps - 1, channels), (heads, channels, taps)
    return [jnp.asarray(rng.normal(size=shape)) for shape in shapes]


def by_hand(x, tail, taps, before, documents):
    """Sums tap by tap and token by token."""
    wide, of = np.concatenate([np.moveaxis(tail, 1, 0), x]), np.concatenate([before, documents])
    out = np.zeros_like(x)
    for token in range(len(x)):
        for tap in range(taps.shape[-1]):
            if of[token + tap] == documents[token] >= 0:
                out[token] += wide[token + tap] * taps[..., tap]
    return out


@pytest.mark.parametrize("taps", [1, 2, 4])
@pytest.mark.parametrize("documents", [1, 9])
def test_a_token_sees_those_of_its_document(x64, taps, documents):
    rng = np.random.default_rng(documents)
    x, tail, weights = draw(rng, 23, taps=taps)
    ids = draw_documents(rng, 20, documents)
    place = place_of(ids, 0, 20, room=3)._replace(before_W=jnp.asarray([0, ids[0], ids[0]], jnp.int32))
    out, behind = convolve(x, tail, weights, place)
    want = by_hand(*map(np.asarray, (x, tail, weights)), np.asarray(place.before_W)[4 - taps :], place.documents_T)
    assert worst(out, want) < 1e-14
    last = np.concatenate([np.moveaxis(np.asarray(tail), 1, 0), x[:20]])[20:]
    np.testing.assert_array_equal(behind, np.moveaxis(last, 0, 1))


def test_runs_of_any_length_hand_on_their_tail(x64):
    """Also runs that are shorter than the tail, or empty."""
    rng = np.random.default_rng(3)
    x, _, weights = draw(rng, 20)
    nothing = jnp.zeros((2, 3, 3))
    ids = draw_documents(rng, 20, 5)
    whole, tail = convolve(x, nothing, weights, place_of(ids, 0, 20))
    parts, behind, start = [], nothing, 0
    for size in (1, 2, 0, 9, 1, 7):
        run = jnp.concatenate([x[start : start + size], jnp.full((4, 2, 3), 9.0)])
        out, behind = convolve(run, behind, weights, place_of(ids, start, start + size, room=4))
        assert not np.asarray(out[size:]).any()
        parts.append(out[:size])
        start += size
    assert worst(jnp.concatenate(parts), whole) < 1e-15
    np.testing.assert_array_equal(behind, tail)


def test_sums_of_bfloat16_are_float32():
    rng = np.random.default_rng(4)
    x, tail, taps = (value.astype(jnp.bfloat16) for value in draw(rng, 20))
    place = place_of(np.zeros(20, np.int32), 0, 20)
    out, behind = convolve(x, tail, taps, place)
    assert out.dtype == jnp.float32 and behind.dtype == jnp.bfloat16
    wide = convolve(*(value.astype(jnp.float32) for value in (x, tail, taps)), place)[0]
    assert worst(out, wide) == 0
    assert jax.vjp(lambda x: convolve(x, tail, taps, place)[0], x)[1](out)[0].dtype == jnp.bfloat16
