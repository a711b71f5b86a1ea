"""Blockwise attention in plain jnp: a chunk's queries against a prefix buffer, forward and hand-written backward.

Keys and values are read block by block straight out of a (possibly much larger) buffer, and only the blocks that a
query block can see are visited, so the cost follows the prefix and the documents, not the buffer. Nothing here is seen
by autodiff: the backward takes the GLOBAL output and LSE, so partial results of a ring can be merged without care.

Letters: T query tokens, N query heads, K key/value heads, G = N // K, H head dim, S keys in the buffer,
Q queries in a block, C keys in a block; X leading buffer dims (slot, layer).
"""

import jax
import jax.numpy as jnp
from jax import lax

from sppo_jax.arrays import buffers
from sppo_jax.arrays.dtypes import accumulator
from sppo_jax.attention.operands import Cotangent, Gradients, Mask, Prefix
from sppo_jax.attention.tags import BlockRange, Tags, block_range, visible

BLOCK_Q = 512
BLOCK_K = 512


def block_sizes(num_queries: int, num_keys: int) -> tuple[int, int]:
    """Returns (queries, keys) in a block: the tuned sizes, or the counts themselves if these are smaller."""
    return min(BLOCK_Q, num_queries), min(BLOCK_K, num_keys)


def find_blocks(queries: Tags, keys: Tags, window: int = 0) -> BlockRange:
    """Returns the key blocks that each block of queries may attend to."""
    return block_range(queries, keys, *block_sizes(queries.documents.shape[0], keys.documents.shape[0]), window)


def _start(block, num_keys: int, block_k: int):
    # The last block is shifted back to end with the buffer (dynamic_slice would do so silently).
    return jnp.minimum(block * block_k, num_keys - block_k)


def _read(buffer, index, start, block_k):
    num_heads, _, head_dim = buffer.shape[-3:]
    return buffers.read(buffer, (*index, 0, start), (num_heads, block_k, head_dim))


def _block_mask(q_tags, mask: Mask, block, start, block_k):
    rows = [buffers.read(x, (start,), (block_k,)) for x in mask.keys]
    fresh = start + jnp.arange(block_k, dtype=jnp.int32) >= block * block_k  # not seen by the block before
    return visible(q_tags, Tags(*rows), mask.window) & fresh[None]


def _add_turned(buffer, index, value_KHC):
    """Adds a block whose last two dims are swapped.

    XLA:CPU takes half the time for a product over queries in this form. The block is swapped with the sum, because a
    product that is swapped by itself XLA writes in the other form again.
    """
    num_kv_heads, head_dim, block_k = value_KHC.shape
    old_KHC = buffers.read(buffer, index, (num_kv_heads, block_k, head_dim)).swapaxes(1, 2)
    return buffers.write(buffer, index, (old_KHC.astype(value_KHC.dtype) + value_KHC).swapaxes(1, 2))


def _query_blocks(x_TNH, num_kv_heads: int, block_q: int):
    """[T, N, H] -> [T/Q, K, G*Q, H]; rows added at the end are zero."""
    num_tokens, num_heads, head_dim = x_TNH.shape
    x = jnp.pad(x_TNH, ((0, -num_tokens % block_q), (0, 0), (0, 0)))
    x = x.reshape(-1, block_q, num_kv_heads, num_heads // num_kv_heads, head_dim)
    return x.transpose(0, 2, 3, 1, 4).reshape(x.shape[0], num_kv_heads, -1, head_dim)


def _from_query_blocks(x, num_tokens: int, block_q: int):
    """Inverse of `_query_blocks`."""
    num_blocks, num_kv_heads, rows, head_dim = x.shape
    x = x.reshape(num_blocks, num_kv_heads, rows // block_q, block_q, head_dim).transpose(0, 3, 1, 2, 4)
    return x.reshape(num_blocks * block_q, -1, head_dim)[:num_tokens]


def _tag_blocks(tags: Tags, block_q: int) -> Tags:
    pad = -tags.documents.shape[0] % block_q
    return Tags(
        jnp.pad(tags.positions, (0, pad)).reshape(-1, block_q),
        jnp.pad(tags.documents, (0, pad), constant_values=-1).reshape(-1, block_q),
    )


def _scores(q_KMH, k_KCH, mask_QC, scale, acc):
    """Returns scaled scores [K, G, Q, C] with -inf where masked."""
    s = jnp.einsum("kmh,kch->kmc", q_KMH, k_KCH, preferred_element_type=acc) * scale
    s = s.reshape(s.shape[0], -1, *mask_QC.shape)
    return jnp.where(mask_QC, s, -jnp.inf)


def forward(q_TNH: jax.Array, prefix: Prefix, mask: Mask) -> tuple[jax.Array, jax.Array]:
    """Attends to a prefix with an online softmax.

    Args:
        q_TNH: queries.
        prefix: keys and values.
        mask: tags of both, and the block range from `find_blocks`. A padding query (document -1) gives zeros and an
            LSE of -inf.

    Returns:
        out_TNH and lse_TN, both in at least float32.
    """
    num_tokens, num_heads, head_dim = q_TNH.shape
    num_kv_heads, num_keys = prefix.k.shape[-3], prefix.k.shape[-2]
    block_q, block_k = block_sizes(num_tokens, num_keys)
    acc, scale = accumulator(q_TNH.dtype), head_dim**-0.5

    def query_block(args):
        q_KMH, tags, first, last = args

        def key_block(block, carry):
            top_KGQ, sum_KGQ, out_KGQH = carry
            start = _start(block, num_keys, block_k)
            mask_QC = _block_mask(tags, mask, block, start, block_k)
            s = _scores(q_KMH, _read(prefix.k, prefix.index, start, block_k), mask_QC, scale, acc)
            top = jnp.maximum(top_KGQ, s.max(-1))
            safe = jnp.where(top == -jnp.inf, 0, top)
            p = jnp.exp(s - safe[..., None])
            shrink = jnp.exp(top_KGQ - safe)
            v_KCH = _read(prefix.v, prefix.index, start, block_k)
            pv = jnp.einsum("kgqc,kch->kgqh", p.astype(v_KCH.dtype), v_KCH, preferred_element_type=acc)
            return top, sum_KGQ * shrink + p.sum(-1), out_KGQH * shrink[..., None] + pv

        shape = (num_kv_heads, num_heads // num_kv_heads, block_q)
        start = (jnp.full(shape, -jnp.inf, acc), jnp.zeros(shape, acc), jnp.zeros((*shape, head_dim), acc))
        top, total, out = lax.fori_loop(first, last, key_block, start)
        out = out / jnp.where(total == 0, 1, total)[..., None]
        lse = jnp.where(total == 0, -jnp.inf, top + jnp.log(jnp.where(total == 0, 1, total)))
        return out.reshape(num_kv_heads, -1, head_dim), lse.reshape(num_kv_heads, -1, 1)

    xs = (_query_blocks(q_TNH, num_kv_heads, block_q), _tag_blocks(mask.queries, block_q), *mask.meets)
    out, lse = lax.map(query_block, xs)
    return _from_query_blocks(out, num_tokens, block_q), _from_query_blocks(lse, num_tokens, block_q)[..., 0]


def backward(
    q_TNH: jax.Array, prefix: Prefix, mask: Mask, cotangent: Cotangent, gradients: Gradients
) -> tuple[jax.Array, Gradients]:
    """Differentiates `forward` with the global LSE and adds to the gradients of the prefix.

    Args:
        q_TNH, prefix, mask: as given to `forward`.
        cotangent: of these queries; its summary is delta_TN from `delta`.
        gradients: buffers in float32 or a lower dtype.

    Returns:
        dq_TNH in at least float32, and the buffers with this chunk's contribution added.
    """
    num_tokens, _, head_dim = q_TNH.shape
    num_kv_heads, num_keys = prefix.k.shape[-3], prefix.k.shape[-2]
    block_q, block_k = block_sizes(num_tokens, num_keys)
    acc, scale = accumulator(q_TNH.dtype), head_dim**-0.5

    def query_block(sums, args):
        q_KMH, dout_KMH, lse_KM1, delta_KM1, tags, first, last = args
        shape = (num_kv_heads, -1, block_q, 1)
        lse = jnp.where(lse_KM1 == -jnp.inf, 0, lse_KM1).reshape(shape)
        delta = delta_KM1.reshape(shape)

        def key_block(block, carry):
            dq_KMH, dk, dv = carry
            start = _start(block, num_keys, block_k)
            k_KCH, v_KCH = (_read(x, prefix.index, start, block_k) for x in (prefix.k, prefix.v))
            s = _scores(q_KMH, k_KCH, _block_mask(tags, mask, block, start, block_k), scale, acc)
            p = jnp.exp(s - lse)
            dp = jnp.einsum("kmh,kch->kmc", dout_KMH, v_KCH, preferred_element_type=acc).reshape(s.shape)
            ds = (p * (dp - delta) * scale).astype(q_KMH.dtype).reshape(num_kv_heads, -1, block_k)
            p = p.astype(q_KMH.dtype).reshape(ds.shape)
            dq_KMH = dq_KMH + jnp.einsum("kmc,kch->kmh", ds, k_KCH, preferred_element_type=acc)
            where = (*prefix.grads_at, 0, start)
            dk = _add_turned(dk, where, jnp.einsum("kmc,kmh->khc", ds, q_KMH, preferred_element_type=acc))
            dv = _add_turned(dv, where, jnp.einsum("kmc,kmh->khc", p, dout_KMH, preferred_element_type=acc))
            return dq_KMH, dk, dv

        dq, *sums = lax.fori_loop(first, last, key_block, (jnp.zeros(q_KMH.shape, acc), *sums))
        return Gradients(*sums), dq

    by_token = (q_TNH, cotangent.dout_TNH, cotangent.lse_TN[..., None], cotangent.summary[..., None])
    rows = [_query_blocks(x, num_kv_heads, block_q) for x in by_token]
    xs = (*rows, _tag_blocks(mask.queries, block_q), *mask.meets)
    gradients, dq = lax.scan(query_block, gradients, xs)
    return _from_query_blocks(dq, num_tokens, block_q), gradients


def delta(out_TNH: jax.Array, dout_TNH: jax.Array) -> jax.Array:
    """Returns delta_TN, the sum over H of out * dout, in at least float32: what the softmax adds to the backward."""
    acc = accumulator(out_TNH.dtype)
    return jnp.sum(out_TNH.astype(acc) * dout_TNH.astype(acc), axis=-1)


def merge(out_a, lse_a, out_b, lse_b) -> tuple[jax.Array, jax.Array]:
    """Joins two partial attentions over disjoint keys (out_TNH, lse_TN in at least float32; never under autodiff)."""
    top = jnp.maximum(lse_a, lse_b)
    safe = jnp.where(top == -jnp.inf, 0, top)
    weight_a, weight_b = jnp.exp(lse_a - safe), jnp.exp(lse_b - safe)
    total = weight_a + weight_b
    share = jnp.where(total == 0, 1, total)
    out = (out_a * weight_a[..., None] + out_b * weight_b[..., None]) / share[..., None]
    return out, jnp.where(total == 0, -jnp.inf, safe + jnp.log(share))
