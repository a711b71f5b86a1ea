"""The check of the fused kernel passes what is right, however it rounds, and finds what is wrong."""

import re

import jax
import jax.numpy as jnp
import pytest

from sppo_jax.attention import check, cudnn
from sppo_jax.attention.blockwise import merge
from sppo_jax.attention.check import PLAIN, CallHeads, CheckedKernel, find_difference

HEADS = CallHeads(4, 2, 16)


@pytest.fixture(autouse=True)
def few_rows(monkeypatch):
    monkeypatch.setattr(check, "NUM_QUERIES", 40)
    monkeypatch.setattr(check, "NUM_KEYS", 56)
    patterns = {
        "ragged lengths": check.Pattern((25, 39), (25, 24), 0.0),
        "low scores": check.Pattern((24, 40), (24, 24), check.LOW_SCORE),
        "one query": check.Pattern((1, 1), (1, 1), check.LOW_SCORE),
    }
    monkeypatch.setattr(check, "PATTERNS", patterns)


def by_heads(kernel):
    """Makes a kernel that takes one query head at a time, and rounds each head's part of dK and dV."""

    def one(x, head):
        return x[head : head + 1]

    def operands(given, head):
        own = head // (HEADS.num_heads // HEADS.num_kv_heads)
        return given._replace(q_NTH=one(given.q_NTH, head), k_KSH=one(given.k_KSH, own), v_KSH=one(given.v_KSH, own))

    def forward(given, *, causal):
        parts = [kernel.forward(operands(given, head), causal=causal) for head in range(len(given.q_NTH))]
        return tuple(jnp.concatenate(x) for x in zip(*parts, strict=True))

    def backward(given, results, *, causal):
        parts = [
            kernel.backward(operands(given, head), cudnn.CudnnResults(*(one(x, head) for x in results)), causal=causal)
            for head in range(len(given.q_NTH))
        ]
        dq, dk, dv = (jnp.concatenate(x) for x in zip(*parts, strict=True))
        return dq, *(x.reshape(HEADS.num_kv_heads, -1, *x.shape[1:]).sum(1) for x in (dk, dv))

    return CheckedKernel(forward, backward)


def in_tiles(given, *, causal):
    """Attends tile by tile, with partial outputs in the dtype of the queries; leaves NaN in rows behind."""
    half = given.k_KSH.shape[1] // 2
    if causal:
        out, lse = PLAIN.forward(given, causal=True)
    else:
        cut = [
            given._replace(k_KSH=given.k_KSH[:, rows], v_KSH=given.v_KSH[:, rows], num_keys=given.num_keys - begin)
            for rows, begin in ((slice(half), 0), (slice(half, None), half))
        ]
        wide = [PLAIN.forward(each, causal=False) for each in cut]
        wide = [(jnp.where(jnp.isnan(out), 0, out).astype(jnp.float32), lse) for out, lse in wide]
        out, lse = merge(*wide[0], *wide[1])
    behind = jnp.arange(given.q_NTH.shape[1], dtype=jnp.int32) >= given.num_queries
    return jnp.where(behind[:, None], jnp.nan, out).astype(given.q_NTH.dtype), jnp.where(behind, jnp.nan, lse)


@pytest.mark.parametrize(
    "kernel", [by_heads(PLAIN), CheckedKernel(in_tiles, PLAIN.backward)], ids=["head by head", "tile by tile"]
)
def test_a_right_kernel_passes_however_it_rounds(kernel):
    assert find_difference(HEADS, jnp.bfloat16, kernel=kernel) is None


def test_the_reference_has_the_rounded_output_that_a_call_gets():
    """XLA on GPUs drops a cast to bfloat16 and back, but no explicit rounding."""
    arrays = check._draw(HEADS, check.Extent(40, 56, {}, ()), jnp.bfloat16, check.LOW_SCORE)
    wide = (x.astype(jnp.float32) for x in arrays[:3])
    out, lse = PLAIN.forward(cudnn.CudnnOperands(*wide, jnp.int32(24), jnp.int32(40)), causal=False)

    def results(more_NTH, more_NT):
        return check._global_results(out, lse, more_NTH, more_NT, arrays[3], jnp.int32(24))

    assert "reduce_precision[exponent_bits=8 mantissa_bits=7]" in str(jax.make_jaxpr(results)(*arrays[4:]))
    exact = merge(out, lse, arrays[4], lse + arrays[5])[0].astype(jnp.bfloat16)
    assert (results(*arrays[4:]).out_NTH == exact)[:, :24].all()


def scaled(index, factor):
    """Makes a backward with one gradient multiplied."""

    def backward(given, results, *, causal):
        grads = list(PLAIN.backward(given, results, causal=causal))
        grads[index] = (grads[index].astype(jnp.float32) * factor).astype(grads[index].dtype)
        return tuple(grads)

    return backward


def one_row_off(given, results, *, causal):
    dq, dk, dv = PLAIN.backward(given, results, causal=causal)
    return dq, dk.at[0, 0].multiply(jnp.asarray(0.5, dk.dtype)), dv


def all_keys(function):
    """Makes a kernel that also sees the keys behind `num_keys`."""

    def call(given, *results, causal):
        return function(given._replace(num_keys=jnp.int32(given.k_KSH.shape[1])), *results, causal=causal)

    return call


def all_queries(given, results, *, causal):
    """Adds up over the queries behind `num_queries` too, among them padding."""
    return PLAIN.backward(given._replace(num_queries=jnp.int32(given.q_NTH.shape[1])), results, causal=causal)


def masked_by_a_product(given, results, *, causal):
    """Lets overflown shares of the queries behind `num_queries` through: zero times infinity is no number."""
    asked = jnp.arange(given.q_NTH.shape[1], dtype=jnp.int32) < given.num_queries
    everyone = given._replace(num_queries=jnp.int32(given.q_NTH.shape[1]))
    p, ds = cudnn.shares(everyone, results, causal=causal)
    p, ds = (x * asked[:, None].astype(x.dtype) for x in (p, ds))
    dk = jnp.einsum("kgts,kgth->ksh", ds, cudnn.asked_rows(given, given.q_NTH).astype(jnp.float32))
    dq, _, dv = PLAIN.backward(given, results, causal=causal)
    return dq, dk.astype(dq.dtype), dv


def with_its_own_lse(given, results, *, causal):
    return PLAIN.backward(given, results._replace(lse_NT=PLAIN.forward(given, causal=causal)[1]), causal=causal)


def with_its_own_output(given, results, *, causal):
    return PLAIN.backward(given, results._replace(out_NTH=PLAIN.forward(given, causal=causal)[0]), causal=causal)


def lse_off(by):
    def forward(given, *, causal):
        out, lse = PLAIN.forward(given, causal=causal)
        return out, lse + by

    return forward


def other_heads(given, *, causal):
    """Gives query head n the keys of head n mod K."""
    order = jnp.arange(HEADS.num_heads).reshape(HEADS.num_kv_heads, -1).T.reshape(-1)
    out, lse = PLAIN.forward(given._replace(q_NTH=given.q_NTH[jnp.argsort(order)]), causal=causal)
    return out[order], lse[order]


def underflowing(given, *, causal):
    """Takes exp without the maximum."""
    s = cudnn._scores(given.q_NTH, given.k_KSH, given.num_keys, causal)
    out, _ = PLAIN.forward(given, causal=causal)
    return out, jnp.log(jnp.sum(jnp.exp(s), -1)).reshape(out.shape[:2])


def without_a_mask(given, *, causal):
    return PLAIN.forward(given, causal=False)


def strict(given, *, causal):
    """Lets no query see the key of its own number, but for the first."""
    out, lse = PLAIN.forward(given, causal=causal)
    before = (jnp.concatenate([x[:, :1], x[:, :-1]], axis=1) for x in (out, lse))
    return tuple(before) if causal else (out, lse)


WRONG = {
    "dK a twentieth too large": (CheckedKernel(PLAIN.forward, scaled(1, 1.05)), "dK of the rectangle"),
    "dV without a value": (CheckedKernel(PLAIN.forward, scaled(2, jnp.nan)), "dV of the rectangle that is no number"),
    "dQ without a scale": (CheckedKernel(PLAIN.forward, scaled(0, 4.0)), "dQ of the rectangle"),
    "one row of dK": (CheckedKernel(PLAIN.forward, one_row_off), "dK of the rectangle"),
    "LSE off": (CheckedKernel(lse_off(0.01), PLAIN.backward), "LSE of the rectangle"),
    "LSE underflows": (CheckedKernel(underflowing, PLAIN.backward), "LSE of the rectangle .*low scores"),
    "keys behind": (CheckedKernel(all_keys(PLAIN.forward), PLAIN.backward), "out of the rectangle"),
    "keys behind, backward": (CheckedKernel(PLAIN.forward, all_keys(PLAIN.backward)), "dQ of the rectangle"),
    "queries behind": (CheckedKernel(PLAIN.forward, all_queries), "dK of the rectangle"),
    "queries behind leak": (CheckedKernel(PLAIN.forward, masked_by_a_product), "dK of the rectangle that is no number"),
    "an LSE of its own": (CheckedKernel(PLAIN.forward, with_its_own_lse), "dQ of the rectangle"),
    "an output of its own": (CheckedKernel(PLAIN.forward, with_its_own_output), "dQ of the rectangle"),
    "heads of others": (CheckedKernel(other_heads, PLAIN.backward), "out of the rectangle"),
    "no causal mask": (CheckedKernel(without_a_mask, PLAIN.backward), "out of the causal triangle"),
    "a diagonal left out": (CheckedKernel(strict, PLAIN.backward), "out of the causal triangle"),
}


def banded(change):
    """Makes a kernel whose window is longer by so many keys."""

    def shifted(plain):
        return lambda *given, causal, window: plain(*given, causal=causal, window=window + change)

    return CheckedKernel(shifted(PLAIN.forward), shifted(PLAIN.backward))


def test_a_window_is_checked_key_by_key(monkeypatch):
    monkeypatch.setattr(check, "WINDOWS", (7,))
    found = [find_difference(HEADS, jnp.bfloat16, has_window=True, kernel=banded(change)) for change in (-1, 0, 1)]
    assert found[1] is None and "out of the band of 7 keys" in found[0] and "out of the band of 7 keys" in found[2]


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_kernel_is_found(name):
    kernel, expected = WRONG[name]
    found = find_difference(HEADS, jnp.bfloat16, kernel=kernel)
    assert found is not None
    assert re.match(expected, found), found
