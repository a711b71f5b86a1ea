"""Attention of whole sequences on one device: the reference that every parallel form is compared with.

Letters: B sequences, T = S tokens, N query heads, K key/value heads, H head dim.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from sppo_jax.arrays.dtypes import accumulator
from sppo_jax.attention import blockwise
from sppo_jax.attention.operands import Cotangent, Gradients, Mask, Prefix
from sppo_jax.attention.sinks import sinks_gradient, with_sinks
from sppo_jax.attention.tags import Tags


def dense_attention(
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    positions_BT: jax.Array,
    document_ids_BT: jax.Array,
    *,
    window: int = 0,
    sinks_N: jax.Array | None = None,
) -> jax.Array:
    """Causal attention within documents.

    Args:
        q_BTNH: queries; N a multiple of K.
        k_BTKH: keys.
        v_BTKH: values.
        positions_BT: int32, increasing within a document.
        document_ids_BT: int32, not decreasing along a sequence; -1 is padding.
        window: how many positions a query sees, its own among them; 0: all before it.
        sinks_N: a score of each query head that takes its share of the softmax and gives nothing; None: none.

    Returns:
        out_BTNH in the dtype of q; zeros for padding.
    """
    return _attention(window, sinks_N, q_BTNH, k_BTKH, v_BTKH, positions_BT, document_ids_BT)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(window: int, sinks_N: jax.Array | None, *arrays: jax.Array) -> jax.Array:
    return _forward(window, sinks_N, *arrays)[0]


def _prefix(k_TKH, v_TKH) -> Prefix:
    return Prefix(k_TKH.swapaxes(0, 1), v_TKH.swapaxes(0, 1), ())


def _mask(tags: Tags, window: int) -> Mask:
    return Mask(tags, tags, blockwise.find_blocks(tags, tags, window), window)


def _forward(window, sinks_N, q_BTNH, k_BTKH, v_BTKH, positions_BT, document_ids_BT):
    def one(args):
        q, k, v, tags = args
        out, lse = blockwise.forward(q, _prefix(k, v), _mask(tags, window))
        out = out.astype(q.dtype)
        return (out, lse) if sinks_N is None else with_sinks(out, lse, sinks_N)

    out, lse = lax.map(one, (q_BTNH, k_BTKH, v_BTKH, Tags(positions_BT, document_ids_BT)))
    return out, (sinks_N, q_BTNH, k_BTKH, v_BTKH, positions_BT, document_ids_BT, out, lse)


def _backward(window, saved, dout_BTNH):
    sinks_N, q_BTNH, k_BTKH, v_BTKH, positions_BT, document_ids_BT, out_BTNH, lse_BTN = saved

    def one(args):
        q, k, v, tags, out, lse, dout = args
        zeros = jnp.zeros(k.swapaxes(0, 1).shape, accumulator(k.dtype))
        prefix, mask = _prefix(k, v), _mask(tags, window)
        cotangent = Cotangent(dout, lse, blockwise.delta(out, dout))
        dq, (dk, dv) = blockwise.backward(q, prefix, mask, cotangent, Gradients(zeros, zeros))
        return dq.astype(q.dtype), dk.swapaxes(0, 1).astype(k.dtype), dv.swapaxes(0, 1).astype(v.dtype)

    dsinks_N = None
    if sinks_N is not None:
        of_sequences = partial(jax.vmap(sinks_gradient, in_axes=(None, 0, 0, 0)), sinks_N)
        dsinks_N = of_sequences(out_BTNH, lse_BTN, dout_BTNH).sum(0)
    tags = Tags(positions_BT, document_ids_BT)
    return dsinks_N, *lax.map(one, (q_BTNH, k_BTKH, v_BTKH, tags, out_BTNH, lse_BTN, dout_BTNH)), None, None


_attention.defvjp(_forward, _backward)
