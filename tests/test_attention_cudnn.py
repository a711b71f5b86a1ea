"""The fused kernel's stand-in against autodiff, and what is lowered for a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sppo_jax import compat
from sppo_jax.attention import cudnn, flash


def operands(dtype, heads=4, kv_heads=2, queries=6, keys=8, head_dim=8):
    rng = np.random.default_rng(0)
    shapes = ((heads, queries, head_dim), (kv_heads, keys, head_dim), (kv_heads, keys, head_dim))
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


@pytest.mark.parametrize("how", [dict(causal=False), dict(causal=True), dict(causal=True, window=3)], ids=str)
def test_the_stand_in_is_the_gradient_of_itself(x64, how):
    q, k, v = operands(jnp.float64)
    lengths = jnp.int32(5), jnp.int32(7)
    dout = jnp.asarray(np.random.default_rng(1).normal(size=q.shape)).at[:, 5:].set(0)

    def f(q, k, v):
        return cudnn.forward(cudnn.CudnnOperands(q, k, v, *lengths), **how)[0]

    out, vjp = jax.vjp(f, q, k, v)
    lse = cudnn.forward(cudnn.CudnnOperands(q, k, v, *lengths), **how)[1]
    # Rows that are not asked for may hold anything.
    dirty = jnp.full_like(dout, jnp.nan).at[:, :5].set(dout[:, :5])
    got = cudnn.backward(cudnn.CudnnOperands(q, k, v, *lengths), cudnn.CudnnResults(out, lse, dirty), **how)
    want = vjp(dout)
    for a, b, count in zip(got, want, (5, 7, 7), strict=True):
        np.testing.assert_allclose(a[:, :count], b[:, :count], rtol=1e-10, atol=1e-12)


def test_a_gpu_gets_cudnn_with_both_lengths():
    q, k, v = operands(jnp.bfloat16)

    def f(*arguments):
        given = cudnn.CudnnOperands(*arguments)
        out, lse = cudnn.forward(given, causal=True)
        return cudnn.backward(given, cudnn.CudnnResults(out, lse, out), causal=False)

    lowered = jax.jit(f).trace(q, k, v, jnp.int32(3), jnp.int32(4)).lower(lowering_platforms=("cuda",)).as_text()
    assert lowered.count("__cudnn$fmhaSoftmax(") == 1 and lowered.count("__cudnn$fmhaSoftmaxBackward(") == 1
    assert "PADDING_CAUSAL" in lowered and "\\22mask_type\\22: \\22PADDING\\22" in lowered
    assert "stablehlo.dot_general" not in lowered


def test_a_gpu_gets_the_window_of_a_band():
    q, k, v = operands(jnp.bfloat16)

    def f(*arguments):
        given = cudnn.CudnnOperands(*arguments)
        out, lse = cudnn.forward(given, causal=True, window=3)
        return cudnn.backward(given, cudnn.CudnnResults(out, lse, out), causal=True, window=3)

    text = lowered_for_gpu(jax.jit(f), q, k, v, jnp.int32(3), jnp.int32(4))
    calls = [line for line in text.splitlines() if "__cudnn$fmhaSoftmax" in line]
    assert len(calls) == 2
    assert all("\\22sliding_window_length\\22: 3" in call and "PADDING_CAUSAL" in call for call in calls)


def lowered_for_gpu(f, *arguments):
    return f.trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


def test_every_backward_adds_in_a_fixed_order_if_asked():
    """All of them, because XLA keeps one compiled call for calls that are equal but for this."""
    q, k, v = operands(jnp.bfloat16)

    @jax.jit
    def f(q, k, v):
        given = cudnn.CudnnOperands(q, k, v, jnp.int32(3), jnp.int32(4))
        out, lse = cudnn.forward(given, causal=True)
        grads = [
            cudnn.backward(given, cudnn.CudnnResults(out, lse, out), causal=causal) for causal in (True, True, False)
        ]
        once_more = jax.lax.fori_loop(
            0, 3, lambda _, out: cudnn.backward(given, cudnn.CudnnResults(out, lse, out), causal=True)[0], out
        )
        return grads, once_more

    mark = "\\22force_deterministic\\22: true"
    assert mark not in lowered_for_gpu(f, q, k, v)
    with compat.deterministic_attention():
        text = lowered_for_gpu(f, q, k, v)  # a function that was traced before
    configs = [line for line in text.splitlines() if "__cudnn$fmhaSoftmax" in line]
    backward = [line for line in configs if "SoftmaxBackward" in line]
    assert len(backward) == 4 and len(configs) == 5
    assert all(mark in line for line in backward) and sum(mark in line for line in configs) == 4
    assert mark not in lowered_for_gpu(f, q, k, v)


@pytest.mark.parametrize(
    "dtype,head_dim,fits",
    [
        ("bfloat16", 128, True),
        ("bfloat16", 256, True),
        ("bfloat16", 264, False),
        ("float32", 64, False),
        ("bfloat16", 36, False),
    ],
)
def test_what_cudnn_takes(dtype, head_dim, fits):
    assert cudnn.supports(jnp.dtype(dtype), head_dim) == fits


def test_tiles_of_the_past_are_long_but_not_too_large():
    assert flash.past_tile(10**6, 2 * 128 * 2) == flash.MAX_TILE
    assert flash.past_tile(10**6, 32 * 128 * 2) == 8192
    assert flash.past_tile(100, 512) == 100
