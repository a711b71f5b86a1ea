"""cuDNN's fused attention on one rectangle of queries and keys; elsewhere than on NVIDIA GPUs, the same in plain jnp.

The backward takes the GLOBAL output and LSE, which is why the public function of jax does not do: the two primitives
beneath it are bound directly. What differs between versions of jax is in `compat`.

Letters: N query heads, K key/value heads, G = N // K, T queries, S keys, H head dim.
"""

import jax
import jax.numpy as jnp
from jax import lax

from sppo_jax import compat
from sppo_jax.dtypes import accumulator
from sppo_jax.plan.plan import cudnn_takes


def supports(dtype, head_dim: int) -> bool:
    """Return whether cuDNN takes this dtype and head size on every GPU since Ampere."""
    return jnp.issubdtype(dtype, jnp.floating) and cudnn_takes(jnp.dtype(dtype).itemsize, head_dim)


def forward(q_NTH, k_KSH, v_KSH, num_queries, num_keys, *, causal: bool) -> tuple[jax.Array, jax.Array]:
    """Attend from the first `num_queries` rows to the first `num_keys` keys.

    Args:
        q_NTH, k_KSH, v_KSH: of one dtype.
        num_queries, num_keys: int32 scalars, at least 1.
        causal: query t sees the keys up to t; else all.

    Returns:
        out_NTH in the dtype of q and lse_NT in at least float32; rows from `num_queries` on hold anything.
    """
    operands = (q_NTH, k_KSH, v_KSH, num_queries, num_keys)

    def fused(q, k, v, num_queries, num_keys):
        scale = q.shape[-1] ** -0.5
        return compat.cudnn_forward(q, k, v, num_queries, num_keys, causal=causal, scale=scale)

    def plain(*operands):
        return _plain_forward(*operands, causal)

    if not supports(q_NTH.dtype, q_NTH.shape[-1]):
        return plain(*operands)
    return lax.platform_dependent(*operands, cuda=fused, default=plain)


def backward(q_NTH, k_KSH, v_KSH, num_queries, num_keys, out_NTH, lse_NT, dout_NTH, *, causal: bool):
    """Differentiate `forward`.

    Args:
        q_NTH, k_KSH, v_KSH, num_queries, num_keys, causal: as given to `forward`.
        out_NTH, lse_NT: GLOBAL results of these queries, over all their keys.
        dout_NTH: cotangent of the global output, in the dtype of q.

    Returns:
        dq_NTH, dk_KSH, dv_KSH in the dtype of q; rows beyond `num_queries` and `num_keys` hold anything.
    """
    operands = (q_NTH, k_KSH, v_KSH, num_queries, num_keys, out_NTH, lse_NT, dout_NTH)

    def fused(*operands):
        return compat.cudnn_backward(*operands, causal=causal, scale=q_NTH.shape[-1] ** -0.5)

    def plain(*operands):
        return _plain_backward(*operands, causal)

    if not supports(q_NTH.dtype, q_NTH.shape[-1]):
        return plain(*operands)
    return lax.platform_dependent(*operands, cuda=fused, default=plain)


def _scores(q_NTH, k_KSH, num_keys, causal):
    """Return scaled scores [K, G, T, S] in at least float32, -inf where masked."""
    num_heads, num_queries, head_dim = q_NTH.shape
    q = q_NTH.reshape(k_KSH.shape[0], -1, num_queries, head_dim)
    acc = accumulator(q.dtype)
    s = jnp.einsum("kgth,ksh->kgts", q, k_KSH, preferred_element_type=acc) * head_dim**-0.5
    keys = jnp.arange(k_KSH.shape[1], dtype=jnp.int32)
    mask_TS = jnp.broadcast_to(keys < num_keys, s.shape[2:])
    if causal:
        mask_TS = mask_TS & (keys <= jnp.arange(num_queries, dtype=jnp.int32)[:, None])
    return jnp.where(mask_TS, s, -jnp.inf)


def _plain_forward(q_NTH, k_KSH, v_KSH, num_queries, num_keys, causal):
    s = _scores(q_NTH, k_KSH, num_keys, causal)
    lse = jax.nn.logsumexp(s, axis=-1)
    p = jnp.exp(s - lse[..., None]).astype(v_KSH.dtype)
    out = jnp.einsum("kgts,ksh->kgth", p, v_KSH, preferred_element_type=s.dtype)
    return out.reshape(q_NTH.shape).astype(q_NTH.dtype), lse.reshape(q_NTH.shape[:2])


def _plain_backward(q_NTH, k_KSH, v_KSH, num_queries, num_keys, out_NTH, lse_NT, dout_NTH, causal):
    num_kv_heads, dtype, scale = k_KSH.shape[0], q_NTH.dtype, q_NTH.shape[-1] ** -0.5
    s = _scores(q_NTH, k_KSH, num_keys, causal)
    # Unlike a fused kernel, the rows that are not asked for must be kept out of the sums over rows.
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
