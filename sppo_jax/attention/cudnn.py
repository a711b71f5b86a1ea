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
from sppo_jax.dtypes import accumulator
from sppo_jax.plan.plan import cudnn_takes


def supports(dtype, head_dim: int) -> bool:
    """Returns whether cuDNN takes this dtype and head size on every GPU since Ampere."""
    return jnp.issubdtype(dtype, jnp.floating) and cudnn_takes(jnp.dtype(dtype).itemsize, head_dim)


class Operands(NamedTuple):
    """The first `num_queries` rows of the queries and the first `num_keys` keys and values, all of one dtype.

    The counts are int32 scalars, at least 1.
    """

    q_NTH: jax.Array
    k_KSH: jax.Array
    v_KSH: jax.Array
    num_queries: jax.Array
    num_keys: jax.Array


class Results(NamedTuple):
    """GLOBAL output and LSE of the queries, over all their keys, and the output's cotangent in the dtype of q.

    A query that sees nothing has an LSE of +inf here, and an output and a cotangent of zero. No LSE is -inf: a
    kernel may make NaN of it.
    """

    out_NTH: jax.Array
    lse_NT: jax.Array
    dout_NTH: jax.Array


def forward(operands: Operands, *, causal: bool) -> tuple[jax.Array, jax.Array]:
    """Attends from the queries to the keys.

    Args:
        operands: queries, keys and values.
        causal: whether query t sees only the keys up to t; else every query sees all keys.

    Returns:
        out_NTH in the dtype of q and lse_NT in at least float32; rows from `num_queries` on hold anything, also NaN.
    """
    return _where_supported(_fused_forward, _plain_forward, (operands,), causal)


def backward(operands: Operands, results: Results, *, causal: bool) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Differentiates `forward`.

    Args:
        operands, causal: as given to `forward`.
        results: of the forward over all keys.

    Returns:
        dq_NTH, dk_KSH, dv_KSH in the dtype of q; rows beyond `num_queries` and `num_keys` hold anything, also NaN.
    """
    return _where_supported(_fused_backward, _plain_backward, (operands, results), causal)


def _where_supported(fused, plain, arguments: tuple, causal: bool):
    """Calls cuDNN on NVIDIA GPUs if cuDNN takes the operands; else the plain function."""
    fused, plain = partial(fused, causal=causal), partial(plain, causal=causal)
    q_NTH = arguments[0].q_NTH
    if not supports(q_NTH.dtype, q_NTH.shape[-1]):
        return plain(*arguments)
    return lax.platform_dependent(*arguments, cuda=fused, default=plain)


def _fused_forward(operands: Operands, *, causal: bool):
    return compat.cudnn_forward(*operands, causal=causal, scale=operands.q_NTH.shape[-1] ** -0.5)


def _fused_backward(operands: Operands, results: Results, *, causal: bool):
    return compat.cudnn_backward(*operands, *results, causal=causal, scale=operands.q_NTH.shape[-1] ** -0.5)


def _scores(q_NTH, k_KSH, num_keys, causal):
    """Returns scaled scores [K, G, T, S] in at least float32, -inf where masked."""
    num_heads, num_queries, head_dim = q_NTH.shape
    q = q_NTH.reshape(k_KSH.shape[0], -1, num_queries, head_dim)
    acc = accumulator(q.dtype)
    s = jnp.einsum("kgth,ksh->kgts", q, k_KSH, preferred_element_type=acc) * head_dim**-0.5
    keys = jnp.arange(k_KSH.shape[1], dtype=jnp.int32)
    mask_TS = jnp.broadcast_to(keys < num_keys, s.shape[2:])
    if causal:
        mask_TS = mask_TS & (keys <= jnp.arange(num_queries, dtype=jnp.int32)[:, None])
    return jnp.where(mask_TS, s, -jnp.inf)


def _plain_forward(operands: Operands, *, causal: bool):
    q_NTH, k_KSH, v_KSH, _, num_keys = operands
    s = _scores(q_NTH, k_KSH, num_keys, causal)
    lse = jax.nn.logsumexp(s, axis=-1)
    p = jnp.exp(s - lse[..., None]).astype(v_KSH.dtype)
    out = jnp.einsum("kgts,ksh->kgth", p, v_KSH, preferred_element_type=s.dtype)
    return out.reshape(q_NTH.shape).astype(q_NTH.dtype), lse.reshape(q_NTH.shape[:2])


def _plain_backward(operands: Operands, results: Results, *, causal: bool):
    (q_NTH, k_KSH, v_KSH, num_queries, num_keys), (out_NTH, lse_NT, dout_NTH) = operands, results
    num_kv_heads, dtype, scale = k_KSH.shape[0], q_NTH.dtype, q_NTH.shape[-1] ** -0.5
    s = _scores(q_NTH, k_KSH, num_keys, causal)
    # The sums below run over all rows, so the rows from `num_queries` on must be zero; a fused kernel skips them.
    asked = (jnp.arange(q_NTH.shape[1], dtype=jnp.int32) < num_queries)[:, None]
    q, out, dout = (jnp.where(asked, x, 0).reshape(num_kv_heads, -1, *x.shape[1:]) for x in (q_NTH, out_NTH, dout_NTH))
    lse = jnp.where(asked[:, 0], lse_NT, jnp.inf).reshape(*s.shape[:3], 1)
    p = jnp.where(asked, jnp.exp(s - lse), 0)
    delta = jnp.sum(out.astype(s.dtype) * dout.astype(s.dtype), axis=-1, keepdims=True)
    dp = jnp.einsum("kgth,ksh->kgts", dout, v_KSH, preferred_element_type=s.dtype)
    ds = (p * (dp - delta) * scale).astype(dtype)
    dq = jnp.einsum("kgts,ksh->kgth", ds, k_KSH, preferred_element_type=s.dtype).reshape(q_NTH.shape)
    dk = jnp.einsum("kgts,kgth->ksh", ds, q, preferred_element_type=s.dtype)
    dv = jnp.einsum("kgts,kgth->ksh", p.astype(dtype), dout, preferred_element_type=s.dtype)
    return dq.astype(dtype), dk.astype(dtype), dv.astype(dtype)
