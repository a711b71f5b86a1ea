"""A chunk's attention to its prefix by a fused kernel: rectangles, triangles, bands (see `spans`), merged by their LSE.

Same contract as `blockwise`: keys and values are read tile by tile out of a larger buffer, the backward takes the
GLOBAL output and LSE and adds into the prefix's gradient buffers, and nothing is seen by autodiff.

Letters: T query tokens, N query heads, K key/value heads, H head dim.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from sppo_jax.arrays.dtypes import accumulator
from sppo_jax.attention import cudnn
from sppo_jax.attention.blockwise import merge
from sppo_jax.attention.flash_blocks import backward_in_blocks
from sppo_jax.attention.flash_calls import Piece, Tile, asked_rows, differentiate, document_piece, past_piece
from sppo_jax.attention.operands import Cotangent, Gradients, Mask, Prefix
from sppo_jax.attention.spans import shift_rows
from sppo_jax.program.past_tile import MAX_TILE, past_tile


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
        piece = partial(past_piece, spans.past, tile=tile)
        steps = -(-spans.past.keys // tile)
        state = lax.fori_loop(0, steps, lambda step, state: past(piece(step), state), state)
    if spans.has_one_document:
        return document(document_piece(spans, 0, size, window), state)
    return lax.fori_loop(
        0,
        spans.num_documents,
        lambda number, state: document(document_piece(spans, number, size, window), state),
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

    def add(piece: Piece, q, state):
        place = Tile(prefix.k.shape, prefix.index, piece.begin, piece.size)
        k, v = place.read(prefix.k), place.read(prefix.v)
        operands = cudnn.CudnnOperands(q, k, v, *piece.lengths())
        out, lse = cudnn.forward(operands, causal=piece.causal, window=piece.window)
        count = jnp.where(piece.num_keys > 0, piece.num_queries, 0)
        inside = jnp.arange(q.shape[1], dtype=jnp.int32) < count
        lse = jnp.where(inside, lse, -jnp.inf)
        out = shift_rows(asked_rows(out, count), piece.at, 1).astype(acc)
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
    dtype = q_TNH.dtype
    # Of a query that sees nothing: exp(s - inf) is 0 for every score s, also for -inf where a kernel masks scores
    # before it takes the LSE from them. With an LSE of -inf that is no number, which spoils dK and dV of all keys.
    lse_TN = jnp.where(cotangent.lse_TN == -jnp.inf, jnp.inf, cotangent.lse_TN)
    by_token = (q_TNH, cotangent.summary.astype(dtype), lse_TN, cotangent.dout_TNH.astype(dtype))
    rows = [x.swapaxes(0, 1) for x in by_token]

    sizes = _tile_sizes(q_TNH, prefix, mask.window)
    if mask.meets.cut is not None:
        dq_NTH, gradients = backward_in_blocks(rows, prefix, mask.meets, gradients, sizes[0])
        return dq_NTH.swapaxes(0, 1), gradients

    def add(piece: Piece, rows, sums):
        dq_NTH, gradients = sums
        more_NTH, gradients = differentiate(piece, rows, prefix, gradients)
        more_NTH = shift_rows(more_NTH, piece.at, 1)
        if piece.window:
            more_NTH = more_NTH[:, : dq_NTH.shape[1]]
        return dq_NTH + more_NTH, gradients

    def past(piece, sums):
        return add(piece, rows, sums)

    def document(piece, sums):
        return add(piece, [shift_rows(x, -piece.at, 1) for x in with_room], sums)

    with_room = [_with_room(x, mask.window) for x in rows]
    sums = (jnp.zeros(rows[0].shape, accumulator(dtype)), gradients)
    dq_NTH, gradients = _for_each_piece(mask, sizes, past, document, sums)
    return dq_NTH.swapaxes(0, 1), gradients


def _tile_sizes(q_TNH: jax.Array, prefix: Prefix, window: int) -> tuple[int, int]:
    """Returns the keys in a tile of the past, and in the tile of a document of the chunk, or of its band."""
    num_heads, num_keys, head_dim = prefix.k.shape[-3:]
    row_bytes = num_heads * head_dim * prefix.k.dtype.itemsize
    return past_tile(num_keys, row_bytes, MAX_TILE), min(q_TNH.shape[0] + window, num_keys)
