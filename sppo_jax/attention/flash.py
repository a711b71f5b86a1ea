"""A chunk's attention to its prefix by a fused kernel: rectangles, triangles, bands (see `spans`), merged by their LSE.

Same contract as `blockwise`: keys and values are read tile by tile out of a larger buffer, the backward takes the
GLOBAL output and LSE and adds into the prefix's gradient buffers, and nothing is seen by autodiff.

Letters: T query tokens, N query heads, K key/value heads, H head dim, S keys in the buffer, C keys in a tile;
X leading buffer dims (slot, layer).
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sppo_jax.arrays import buffers
from sppo_jax.arrays.dtypes import accumulator
from sppo_jax.attention import cudnn
from sppo_jax.attention.blockwise import merge
from sppo_jax.attention.operands import Cotangent, Gradients, Mask, Prefix
from sppo_jax.attention.spans import Past, Spans, shift_rows
from sppo_jax.program.past_tile import MAX_TILE, past_tile


class _Tile:
    """`size` keys from `begin` on; keys behind the buffer's end are read as zero and are not written."""

    def __init__(self, buffer_shape: tuple[int, ...], index: tuple, begin, size: int):
        self.shape = (buffer_shape[-3], size, buffer_shape[-1])
        at = jnp.clip(begin, 0, buffer_shape[-2] - size)
        # JAX silently shifts a slice that runs over the end, so the slice is taken where it fits and then shifted.
        self.where, self.over = (*index, 0, at), jnp.minimum(begin - at, size)

    def read(self, buffer: jax.Array) -> jax.Array:
        return shift_rows(buffers.read(buffer, self.where, self.shape), -self.over, 1)

    def add(self, buffer: jax.Array, value: jax.Array) -> jax.Array:
        return buffers.add(buffer, self.where, shift_rows(value, self.over, 1))


def _rows(x: jax.Array, count) -> jax.Array:
    """Sets the rows (dim 1) from `count` on to zero: a fused kernel leaves any values there, NaN among them.

    A product with a mask would keep NaN.
    """
    inside = jnp.arange(x.shape[1], dtype=jnp.int32) < count
    return jnp.where(inside.reshape(-1, *(1,) * (x.ndim - 2)), x, 0)


class _Piece(NamedTuple):
    """Queries and keys of one kernel call: a tile of the past, which is a rectangle, or a document, a triangle.

    `num_queries` query rows begin at row `at`; `num_keys` keys begin at `begin` of the buffer and lie in a tile of
    `size` keys. A band, which is a document with a window, may begin before row 0: `at` is negative.
    """

    at: jax.Array | int
    num_queries: jax.Array
    begin: jax.Array
    num_keys: jax.Array
    size: int
    causal: bool
    window: int = 0

    def lengths(self) -> tuple[jax.Array, jax.Array]:
        """Returns both counts, at least 1: the kernel takes no empty operand."""
        return jnp.maximum(self.num_queries, 1), jnp.maximum(self.num_keys, 1)


def _past_piece(past: Past, step, tile: int) -> _Piece:
    left = past.keys - step * tile
    return _Piece(0, past.queries, past.begin + step * tile, jnp.minimum(left, tile), tile, causal=False)


def _document_piece(spans: Spans, number, size: int, window: int) -> _Piece:
    at, queries, begin, keys = (
        buffers.pick(x, number) for x in (spans.query_begin, spans.query_count, spans.key_begin, spans.key_count)
    )
    return _Piece(at, queries, begin, keys, size, causal=True, window=window)


def _for_each_piece(mask: Mask, sizes: tuple[int, int], past, document, state):
    """Calls `past(piece, state)` for each tile of the past, then `document(piece, state)` for each document.

    Each is a loop whose trips the batch decides, at each of which a GPU reads its predicate. So where there is nothing
    past there is no loop, nor where there is one document at most: of padding alone its piece has no queries.

    Args:
        mask: has the spans of what the queries see.
        sizes: keys in a tile of the past, and in the tile of a document.
        past, document: return the next state.
        state: the first state.
    """
    (tile, size), spans, window = sizes, mask.meets, mask.window
    if spans.past is not None:
        piece = partial(_past_piece, spans.past, tile=tile)
        steps = -(-spans.past.keys // tile)
        state = lax.fori_loop(0, steps, lambda step, state: past(piece(step), state), state)
    if spans.has_one_document:
        return document(_document_piece(spans, 0, size, window), state)
    return lax.fori_loop(
        0,
        spans.num_documents,
        lambda number, state: document(_document_piece(spans, number, size, window), state),
        state,
    )


def _with_room(x: jax.Array, window: int) -> jax.Array:
    """Adds rows of zeros (dim 1) for the queries of a band that are none: they change no gradient."""
    return jnp.pad(x, [(0, window if dim == 1 else 0) for dim in range(x.ndim)]) if window else x


def forward(q_TNH: jax.Array, prefix: Prefix, mask: Mask) -> tuple[jax.Array, jax.Array]:
    """Attends to a prefix.

    Args:
        q_TNH: queries.
        prefix: keys and values.
        mask: its spans, from `find_spans` for these queries and keys; the tags are not read.

    Returns:
        out_TNH and lse_TN, both in at least float32; zeros and -inf for a query that sees nothing.
    """
    q_NTH, acc = q_TNH.swapaxes(0, 1), accumulator(q_TNH.dtype)
    num_queries = q_NTH.shape[1]

    def add(piece: _Piece, q, state):
        place = _Tile(prefix.k.shape, prefix.index, piece.begin, piece.size)
        k, v = place.read(prefix.k), place.read(prefix.v)
        operands = cudnn.Operands(q, k, v, *piece.lengths())
        out, lse = cudnn.forward(operands, causal=piece.causal, window=piece.window)
        count = jnp.where(piece.num_keys > 0, piece.num_queries, 0)
        inside = jnp.arange(q.shape[1], dtype=jnp.int32) < count
        lse = jnp.where(inside, lse, -jnp.inf)
        out = shift_rows(_rows(out, count), piece.at, 1).astype(acc)
        lse = shift_rows(lse, piece.at, 1, -jnp.inf)
        if piece.window:
            out, lse = out[:, :num_queries], lse[:, :num_queries]
        return (out, lse) if state is None else merge(*state, out, lse)

    def past(piece, state):
        return add(piece, q_NTH, state)

    def document(piece, state):
        return add(piece, shift_rows(with_room, -piece.at, 1), state)

    with_room = _with_room(q_NTH, mask.window)
    nothing = jnp.zeros(q_NTH.shape, acc), jnp.full(q_NTH.shape[:2], -jnp.inf, acc)
    state = None if mask.meets.is_one_piece else nothing
    out_NTH, lse_NT = _for_each_piece(mask, _tile_sizes(q_TNH, prefix, mask.window), past, document, state)
    return out_NTH.swapaxes(0, 1), lse_NT.T


def backward(
    q_TNH: jax.Array, prefix: Prefix, mask: Mask, cotangent: Cotangent, gradients: Gradients
) -> tuple[jax.Array, Gradients]:
    """Differentiates `forward` with the global output and LSE and adds to the gradients of the prefix.

    Args:
        q_TNH, prefix, mask: as given to `forward`.
        cotangent: of these queries; its summary is the global out_TNH.
        gradients: buffers in float32 or a lower dtype.

    Returns:
        dq_TNH in at least float32, and the buffers with this chunk's contribution added.
    """
    dtype, acc = q_TNH.dtype, accumulator(q_TNH.dtype)
    # Of a query that sees nothing: exp(s - inf) is 0 for every score s, also for -inf where a kernel masks scores
    # before it takes the LSE from them. With an LSE of -inf that is no number, which spoils dK and dV of all keys.
    lse_TN = jnp.where(cotangent.lse_TN == -jnp.inf, jnp.inf, cotangent.lse_TN)
    by_token = (q_TNH, cotangent.summary.astype(dtype), lse_TN, cotangent.dout_TNH.astype(dtype))
    rows = [x.swapaxes(0, 1) for x in by_token]

    def add(piece: _Piece, rows, sums):
        dq_NTH, dk, dv = sums
        read = _Tile(prefix.k.shape, prefix.index, piece.begin, piece.size)
        q, *results = rows
        lengths = piece.lengths()
        operands = cudnn.Operands(q, read.read(prefix.k), read.read(prefix.v), *lengths)
        how = dict(causal=piece.causal, window=piece.window)
        more_q, more_k, more_v = cudnn.backward(operands, cudnn.Results(*results), **how)
        some = (piece.num_queries > 0) & (piece.num_keys > 0)
        num_queries, num_keys = (jnp.where(some, count, 0) for count in (piece.num_queries, piece.num_keys))
        write = _Tile(dk.shape, prefix.grads_at, piece.begin, piece.size)
        dk = write.add(dk, _rows(more_k, num_keys).astype(acc))
        dv = write.add(dv, _rows(more_v, num_keys).astype(acc))
        more_q = shift_rows(_rows(more_q, num_queries), piece.at, 1)
        if piece.window:
            more_q = more_q[:, : dq_NTH.shape[1]]
        return dq_NTH + more_q.astype(acc), dk, dv

    def past(piece, sums):
        return add(piece, rows, sums)

    def document(piece, sums):
        return add(piece, [shift_rows(x, -piece.at, 1) for x in with_room], sums)

    with_room = [_with_room(x, mask.window) for x in rows]
    sums = (jnp.zeros(rows[0].shape, acc), *gradients)
    dq_NTH, *sums = _for_each_piece(mask, _tile_sizes(q_TNH, prefix, mask.window), past, document, sums)
    return dq_NTH.swapaxes(0, 1), Gradients(*sums)


def _tile_sizes(q_TNH: jax.Array, prefix: Prefix, window: int) -> tuple[int, int]:
    """Returns the keys in a tile of the past, and in the tile of a document of the chunk, or of its band."""
    num_heads, num_keys, head_dim = prefix.k.shape[-3:]
    row_bytes = num_heads * head_dim * prefix.k.dtype.itemsize
    return past_tile(num_keys, row_bytes, MAX_TILE), min(q_TNH.shape[0] + window, num_keys)
