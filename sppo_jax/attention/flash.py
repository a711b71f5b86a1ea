"""A chunk's attention to its prefix by a fused kernel: rectangles and triangles (see `spans`), merged by their LSE.

Same contract as `blockwise`: keys and values are read tile by tile out of a larger buffer, the backward takes the
GLOBAL output and LSE and adds into the prefix's gradient buffers, and nothing is seen by autodiff.

Letters: T query tokens, N query heads, K key/value heads, H head dim, S keys in the buffer, C keys in a tile;
X leading buffer dims (slot, layer).
"""

import jax
import jax.numpy as jnp
from jax import lax

from sppo_jax import buffers
from sppo_jax.attention import cudnn
from sppo_jax.attention.blockwise import Prefix, merge
from sppo_jax.attention.spans import Spans, shift_rows
from sppo_jax.dtypes import accumulator

# Keys of the past in one kernel call: many, so that merging is little work, within what a tile's copies may take.
TILE_BYTES, MAX_TILE = 64 * 2**20, 32768


def past_tile(num_keys: int, row_bytes: int) -> int:
    """Return the keys in a tile of the past: a power of two, or all there are if that is less.

    Args:
        num_keys: in the buffer.
        row_bytes: of one key, over all its heads.
    """
    fitting = max(1, TILE_BYTES // row_bytes)
    return min(2 ** (fitting.bit_length() - 1), MAX_TILE, num_keys)


class _Tile:
    """`size` keys from `begin` on; what would lie behind the buffer's end reads as zero and is not written."""

    def __init__(self, buffer_shape: tuple[int, ...], index: tuple, begin, size: int):
        self.shape = (buffer_shape[-3], size, buffer_shape[-1])
        at = jnp.clip(begin, 0, buffer_shape[-2] - size)
        # A slice over the end is shifted back silently, so it is taken where it fits, and shifted forth.
        self.where, self.over = (*index, 0, at), jnp.minimum(begin - at, size)

    def read(self, buffer: jax.Array) -> jax.Array:
        return shift_rows(buffers.read(buffer, self.where, self.shape), -self.over, 1)

    def add(self, buffer: jax.Array, value: jax.Array) -> jax.Array:
        return buffers.add(buffer, self.where, shift_rows(value, self.over, 1))


def _rows(x: jax.Array, count) -> jax.Array:
    """Zero the rows (dim 1) from `count` on: a fused kernel leaves anything there."""
    inside = jnp.arange(x.shape[1], dtype=jnp.int32) < count
    return jnp.where(inside.reshape(-1, *(1,) * (x.ndim - 2)), x, 0)


def forward(q_TNH: jax.Array, prefix: Prefix, spans: Spans) -> tuple[jax.Array, jax.Array]:
    """Attend to a prefix.

    Args:
        q_TNH: queries.
        prefix: keys and values; its tags are not looked at.
        spans: from `find_spans` for these queries and keys.

    Returns:
        out_TNH and lse_TN, both in at least float32; zeros and -inf for a query that sees nothing.
    """
    q_NTH = q_TNH.swapaxes(0, 1)
    num_queries, acc = q_TNH.shape[0], accumulator(q_TNH.dtype)
    tile = _past_tile(prefix)

    def part(at, q, num_queries, begin, num_keys, size, *, causal):
        place = _Tile(prefix.k.shape, prefix.index, begin, size)
        k, v = place.read(prefix.k), place.read(prefix.v)
        out, lse = cudnn.forward(q, k, v, jnp.maximum(num_queries, 1), jnp.maximum(num_keys, 1), causal=causal)
        count = jnp.where(num_keys > 0, num_queries, 0)
        inside = jnp.arange(q.shape[1], dtype=jnp.int32) < count
        lse = jnp.where(inside, lse, -jnp.inf)
        return shift_rows(_rows(out, count), at, 1).astype(acc), shift_rows(lse, at, 1, -jnp.inf)

    def past(step, state):
        left = spans.past_keys - step * tile
        begin = spans.past_begin + step * tile
        keys = jnp.minimum(left, tile)
        return merge(*state, *part(0, q_NTH, spans.past_queries, begin, keys, tile, causal=False))

    def document(number, state):
        at, queries, begin, keys = _triangle(spans, number)
        size = min(num_queries, prefix.k.shape[-2])
        more = part(at, shift_rows(q_NTH, -at, 1), queries, begin, keys, size, causal=True)
        return merge(*state, *more)

    state = (jnp.zeros(q_NTH.shape, acc), jnp.full(q_NTH.shape[:2], -jnp.inf, acc))
    state = lax.fori_loop(0, -(-spans.past_keys // tile), past, state)
    out_NTH, lse_NT = lax.fori_loop(0, spans.num_documents, document, state)
    return out_NTH.swapaxes(0, 1), lse_NT.T


def backward(q_TNH, prefix: Prefix, spans: Spans, out_TNH, lse_TN, dout_TNH, dk, dv, index: tuple):
    """Differentiate `forward` with the global output and LSE, adding into the prefix's gradient buffers.

    Args:
        q_TNH, prefix, spans: as given to `forward`.
        out_TNH, lse_TN: GLOBAL results of these queries, over every key of every device.
        dout_TNH: cotangent of the global output.
        dk, dv: accumulators [X..., K, S, H], float32 or a lower dtype.
        index: where in X of `dk`, `dv` this prefix lies.

    Returns:
        dq_TNH in at least float32, and the buffers with this chunk's contribution added.
    """
    rows = [x.swapaxes(0, 1) for x in (q_TNH, out_TNH.astype(q_TNH.dtype), lse_TN, dout_TNH.astype(q_TNH.dtype))]
    num_queries, acc = q_TNH.shape[0], accumulator(q_TNH.dtype)
    tile = _past_tile(prefix)

    def part(at, rows, num_queries, begin, num_keys, size, sums, *, causal):
        dq_NTH, dk, dv = sums
        read = _Tile(prefix.k.shape, prefix.index, begin, size)
        q, out, lse, dout = rows
        lengths = jnp.maximum(num_queries, 1), jnp.maximum(num_keys, 1)
        k, v = read.read(prefix.k), read.read(prefix.v)
        more_q, more_k, more_v = cudnn.backward(q, k, v, *lengths, out, lse, dout, causal=causal)
        some = (num_queries > 0) & (num_keys > 0)
        num_queries, num_keys = (jnp.where(some, count, 0) for count in (num_queries, num_keys))
        write = _Tile(dk.shape, index, begin, size)
        dk = write.add(dk, _rows(more_k, num_keys).astype(acc))
        dv = write.add(dv, _rows(more_v, num_keys).astype(acc))
        return dq_NTH + shift_rows(_rows(more_q, num_queries), at, 1).astype(acc), dk, dv

    def past(step, sums):
        left = spans.past_keys - step * tile
        begin = spans.past_begin + step * tile
        return part(0, rows, spans.past_queries, begin, jnp.minimum(left, tile), tile, sums, causal=False)

    def document(number, sums):
        at, queries, begin, keys = _triangle(spans, number)
        moved = [shift_rows(x, -at, 1) for x in rows]
        return part(at, moved, queries, begin, keys, min(num_queries, prefix.k.shape[-2]), sums, causal=True)

    sums = (jnp.zeros(rows[0].shape, acc), dk, dv)
    sums = lax.fori_loop(0, -(-spans.past_keys // tile), past, sums)
    dq_NTH, dk, dv = lax.fori_loop(0, spans.num_documents, document, sums)
    return dq_NTH.swapaxes(0, 1), dk, dv


def _past_tile(prefix: Prefix) -> int:
    num_heads, num_keys, head_dim = prefix.k.shape[-3:]
    return past_tile(num_keys, num_heads * head_dim * prefix.k.dtype.itemsize)


def _triangle(spans: Spans, number):
    return tuple(x[number] for x in (spans.query_begin, spans.query_count, spans.key_begin, spans.key_count))
