"""A backward whose calls of the fused kernel take one block of a chunk's queries each (see `spans.Cut`).

cuDNN's backward takes device memory by its queries, and an H100 runs it faster with fewer of them. Loops over blocks
have a number of iterations that is known while tracing: a GPU reads the predicate of others, which takes about as long
as a call that is asked for nothing. So a block that sees nothing of a tile is called all the same. The tiles of the
past and the triangles of several documents are as many as the batch says.

Letters: T query tokens, N query heads, H head dim.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sppo_jax.arrays import buffers
from sppo_jax.arrays.dtypes import accumulator
from sppo_jax.attention.flash_calls import Piece, differentiate, document_piece, past_piece
from sppo_jax.attention.operands import Gradients, Prefix
from sppo_jax.attention.spans import Past, Spans, shift_rows


class _Blocks:
    """The rows of a chunk's queries in blocks of `size`, and the sums of a backward: dQ of all rows, dK and dV.

    `rows`: see `flash_calls.differentiate`.
    """

    def __init__(self, rows: Sequence[jax.Array], prefix: Prefix, count: int):
        self.num_queries = rows[0].shape[1]
        self.count, self.size = count, -(-self.num_queries // count)
        more = count * self.size - self.num_queries
        self.rows = [jnp.pad(x, [(0, more if dim == 1 else 0) for dim in range(x.ndim)]) for x in rows]
        self.prefix = prefix

    def nothing(self) -> jax.Array:
        """Returns dQ of no call."""
        return jnp.zeros(self.rows[0].shape, accumulator(self.rows[0].dtype))

    def add(self, block, piece: Piece, sums):
        """Adds a call of the queries of a block; the piece's rows count from the block's first."""
        dq_NTH, gradients = sums
        first = (0, block * self.size)
        rows = [buffers.read(x, first, (x.shape[0], self.size, *x.shape[2:])) for x in self.rows]
        if not isinstance(piece.at, int):
            rows = [shift_rows(x, -piece.at, 1) for x in rows]
        more_NTH, gradients = differentiate(piece, rows, self.prefix, gradients)
        if not isinstance(piece.at, int):
            more_NTH = shift_rows(more_NTH, piece.at, 1)
        return buffers.add(dq_NTH, first, more_NTH), gradients

    def add_past(self, past: Past, tile: int, sums):
        """Adds what all blocks see of the keys before the chunk, tile by tile."""

        def add(step, block, sums):
            queries = jnp.clip(past.queries - block * self.size, 0, self.size)
            return self.add(block, past_piece(past._replace(queries=queries), step, tile), sums)

        def add_tile(step, sums):
            return lax.fori_loop(0, self.count, lambda block, sums: add(step, block, sums), sums)

        return lax.fori_loop(0, -(-past.keys // tile), add_tile, sums)

    def add_rectangles(self, rectangles: Past, tile: int, sums):
        """Adds what each block sees of those before it."""
        tile = min(tile, (self.count - 1) * self.size)
        places = [(b, step) for b in range(1, self.count) for step in range(-(-b * self.size // tile))]
        blocks, steps = (jnp.asarray(x) for x in np.array(places, np.int32).T)

        def add(number, sums):
            block = buffers.pick(blocks, number)
            past = Past(*(buffers.pick(x, block) for x in rectangles))
            piece = past_piece(past, buffers.pick(steps, number), tile)
            return self.add(block, piece._replace(num_keys=jnp.maximum(piece.num_keys, 0)), sums)

        return lax.fori_loop(0, len(places), add, sums)

    def add_triangles(self, triangles: Spans, is_one: bool, sums):
        """Adds the documents, cut where a block ends; `is_one`: a chunk has one document at most."""
        size = min(self.size, self.prefix.k.shape[-2])

        def add(number, sums):
            piece = document_piece(triangles, number, size)
            block = buffers.quotient(piece.at, self.size)
            return self.add(block, piece._replace(at=piece.at - block * self.size), sums)

        return lax.fori_loop(0, self.count if is_one else triangles.num_documents, add, sums)


def backward_in_blocks(
    rows: Sequence[jax.Array], prefix: Prefix, spans: Spans, gradients: Gradients, tile: int
) -> tuple[jax.Array, Gradients]:
    """Differentiates a chunk's attention to a prefix, block by block.

    Args:
        rows: of the chunk; see `flash_calls.differentiate`.
        prefix: keys and values.
        spans: what the queries see; with its `cut`.
        gradients: of the prefix.
        tile: keys of a call at most.

    Returns:
        dq_NTH in at least float32, and the buffers with this chunk's contribution added.
    """
    assert spans.cut is not None
    rectangles, triangles = spans.cut
    blocks = _Blocks(rows, prefix, rectangles.keys.shape[0])
    sums = blocks.nothing(), gradients
    if spans.past is not None:
        sums = blocks.add_past(spans.past, tile, sums)
    sums = blocks.add_rectangles(rectangles, tile, sums)
    dq_NTH, gradients = blocks.add_triangles(triangles, spans.has_one_document, sums)
    return dq_NTH[:, : blocks.num_queries], gradients
