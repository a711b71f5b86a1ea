"""cuDNN's fused attention on one rectangle of queries and keys, and the same in plain jnp for other devices.

The backward takes the GLOBAL output and LSE. The public function of jax takes neither, so this module binds the two
primitives below that function. `compat` handles the differences between versions of jax.

Letters: N query heads, K key/value heads, G = N // K, T queries, S keys, H head dim.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sppo_jax import compat
from sppo_jax.arrays.dtypes import accumulator
from sppo_jax.plan.parts import cudnn_takes


def supports(dtype, head_dim: int) -> bool:
    """Returns whether cuDNN takes this dtype and head size on any GPU."""
    return jnp.issubdtype(dtype, jnp.floating) and cudnn_takes(jnp.dtype(dtype).itemsize, head_dim)


class CudnnOperands(NamedTuple):
    """The first `num_queries` rows of the queries and the first `num_keys` keys and values, all of one dtype.

    The counts are int32 scalars, at least 1.
    """

    q_NTH: jax.Array
    k_KSH: jax.Array
    v_KSH: jax.Array
    num_queries: jax.Array
    num_keys: jax.Array


class CudnnResults(NamedTuple):
    """GLOBAL output and LSE of the queries, over all their keys, and the output's cotangent in the dtype of q.

    A query that sees nothing has an LSE of +inf here, and an output and a cotangent of zero. No LSE is -inf: a
    kernel may make NaN of it.
    """

    out_NTH: jax.Array
    lse_NT: jax.Array
    dout_NTH: jax.Array


def forward(operands: CudnnOperands, *, causal: bool, window: int = 0) -> tuple[jax.Array, jax.Array]:
    """Attends from the queries to the keys.

    Args:
        operands: queries, keys and values.
        causal: whether query t sees only the keys up to t; else every query sees all keys.
        window: how many of the keys up to t query t sees, the last ones; 0: all.

    Returns:
        out_NTH in the dtype of q and lse_NT in at least float32; rows from `num_queries` on hold anything, also NaN.
    """
    return _where_supported(_fused_forward, plain_forward, (operands,), causal, window)


def backward(
    operands: CudnnOperands, results: CudnnResults, *, causal: bool, window: int = 0
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Differentiates `forward`.

    Args:
        operands, causal, window: as given to `forward`.
        results: of the forward over all keys.

    Returns:
        dq_NTH, dk_KSH, dv_KSH in the dtype of q; rows beyond `num_queries` and `num_keys` hold anything, also NaN.
    """
    return _where_supported(_fused_backward, plain_backward, (operands, results), causal, window)


def _where_supported(fused, plain, arguments: tuple, causal: bool, window: int):
    """Calls cuDNN on NVIDIA GPUs if cuDNN takes the operands; else the plain function."""
    fused, plain = (partial(each, causal=causal, window=window) for each in (fused, plain))
    q_NTH = arguments[0].q_NTH
    if not supports(q_NTH.dtype, q_NTH.shape[-1]):
        return plain(*arguments)
    return lax.platform_dependent(*arguments, cuda=fused, default=plain)


def _fused_forward(operands: CudnnOperands, *, causal: bool, window: int):
    return compat.cudnn_forward(operands, causal=causal, window=window, scale=operands.q_NTH.shape[-1] ** -0.5)


def _fused_backward(operands: CudnnOperands, results: CudnnResults, *, causal: bool, window: int):
    scale = operands.q_NTH.shape[-1] ** -0.5
    return compat.cudnn_backward(operands, results, causal=causal, window=window, scale=scale)


def _scores(q_NTH, k_KSH, num_keys, causal, window=0):
    """Returns scaled scores [K, G, T, S] in at least float32, -inf where masked."""
    num_heads, num_queries, head_dim = q_NTH.shape
    q = q_NTH.reshape(k_KSH.shape[0], -1, num_queries, head_dim)
    acc = accumulator(q.dtype)
    s = jnp.einsum("kgth,ksh->kgts", q, k_KSH, preferred_element_type=acc) * head_dim**-0.5
    keys = jnp.arange(k_KSH.shape[1], dtype=jnp.int32)
    mask_TS = jnp.broadcast_to(keys < num_keys, s.shape[2:])
    if causal:
        mask_TS = mask_TS & (keys <= jnp.arange(num_queries, dtype=jnp.int32)[:, None])
    if window:
        mask_TS = mask_TS & (keys > jnp.arange(num_queries, dtype=jnp.int32)[:, None] - window)
    return jnp.where(mask_TS, s, -jnp.inf)


def plain_forward(operands: CudnnOperands, *, causal: bool, window: int = 0):
    """Computes what `forward` computes, in plain jnp."""
    q_NTH, k_KSH, v_KSH, _, num_keys = operands
    s = _scores(q_NTH, k_KSH, num_keys, causal, window)
    lse = jax.nn.logsumexp(s, axis=-1)
    p = jnp.exp(s - lse[..., None]).astype(v_KSH.dtype)
    out = jnp.einsum("kgts,ksh->kgth", p, v_KSH, preferred_element_type=s.dtype)
    return out.reshape(q_NTH.shape).astype(q_NTH.dtype), lse.reshape(q_NTH.shape[:2])


def plain_backward(operands: CudnnOperands, results: CudnnResults, *, causal: bool, window: int = 0):
    """Computes what `backward` computes, in plain jnp."""
    q_NTH, k_KSH, dtype = operands.q_NTH, operands.k_KSH, operands.q_NTH.dtype
    q, dout = asked_rows(operands, q_NTH), asked_rows(operands, results.dout_NTH)
    p, ds = (x.astype(dtype) for x in shares(operands, results, causal=causal, window=window))
    acc = accumulator(dtype)
    dq = jnp.einsum("kgts,ksh->kgth", ds, k_KSH, preferred_element_type=acc).reshape(q_NTH.shape)
    dk = jnp.einsum("kgts,kgth->ksh", ds, q, preferred_element_type=acc)
    dv = jnp.einsum("kgts,kgth->ksh", p, dout, preferred_element_type=acc)
    return dq.astype(dtype), dk.astype(dtype), dv.astype(dtype)


def shares(
    operands: CudnnOperands, results: CudnnResults, *, causal: bool, window: int = 0
) -> tuple[jax.Array, jax.Array]:
    """Returns each key's share in a query and the gradient of its scaled score, [K, G, T, S], at least float32.

    Rows from `num_queries` on are zero: sums over rows run over all, where a fused kernel skips these.
    """
    s = _scores(operands.q_NTH, operands.k_KSH, operands.num_keys, causal, window)
    asked = (jnp.arange(s.shape[2], dtype=jnp.int32) < operands.num_queries)[:, None]
    out, dout = asked_rows(operands, results.out_NTH), asked_rows(operands, results.dout_NTH)
    lse = jnp.where(asked[:, 0], results.lse_NT, jnp.inf).reshape(*s.shape[:3], 1)
    p = jnp.where(asked, jnp.exp(s - lse), 0)
    delta = jnp.sum(out.astype(s.dtype) * dout.astype(s.dtype), axis=-1, keepdims=True)
    dp = jnp.einsum("kgth,ksh->kgts", dout, operands.v_KSH, preferred_element_type=s.dtype)
    return p, p * (dp - delta) * operands.q_NTH.shape[-1] ** -0.5


def asked_rows(operands: CudnnOperands, x_NTH: jax.Array) -> jax.Array:
    """Returns [K, G, T, H] with zeros from row `num_queries` on."""
    asked = (jnp.arange(x_NTH.shape[1], dtype=jnp.int32) < operands.num_queries)[:, None]
    return jnp.where(asked, x_NTH, 0).reshape(operands.k_KSH.shape[0], -1, *x_NTH.shape[1:])
