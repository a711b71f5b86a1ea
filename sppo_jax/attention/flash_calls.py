"""One call of the fused kernel: which keys are read out of a larger buffer, and what of a result counts.

Letters: T query tokens, N query heads, K key/value heads, H head dim, C keys of a call; X leading buffer dims (slot,
layer).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from sppo_jax.arrays import buffers
from sppo_jax.arrays.dtypes import accumulator
from sppo_jax.attention import cudnn
from sppo_jax.attention.operands import Gradients, Prefix
from sppo_jax.attention.spans import Past, Spans, shift_rows


class Tile:
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


def asked_rows(x: jax.Array, count) -> jax.Array:
    """Sets the rows (dim 1) from `count` on to zero: a fused kernel leaves any values there, NaN among them.

    A product with a mask would keep NaN.
    """
    inside = jnp.arange(x.shape[1], dtype=jnp.int32) < count
    return jnp.where(inside.reshape(-1, *(1,) * (x.ndim - 2)), x, 0)


class Piece(NamedTuple):
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


def past_piece(past: Past, step, tile: int) -> Piece:
    """Returns the call of a tile of a rectangle's keys; `step` says which."""
    left = past.keys - step * tile
    return Piece(0, past.queries, past.begin + step * tile, jnp.minimum(left, tile), tile, causal=False)


def document_piece(spans: Spans, number, size: int, window: int = 0) -> Piece:
    """Returns the call of a document whose keys lie in a tile of `size`."""
    at, queries, begin, keys = (
        buffers.pick(x, number) for x in (spans.query_begin, spans.query_count, spans.key_begin, spans.key_count)
    )
    return Piece(at, queries, begin, keys, size, causal=True, window=window)


def differentiate(piece: Piece, rows, prefix: Prefix, gradients: Gradients) -> tuple[jax.Array, Gradients]:
    """Differentiates a call, and adds to the gradients of its keys and values.

    Args:
        piece: of the call.
        rows: queries, their global output and LSE, and the output's cotangent, [N, T, ...]; the first ones are asked.
        prefix: keys and values.
        gradients: buffers in float32 or a lower dtype.

    Returns:
        dq_NTH in at least float32, zeros in rows that were not asked, and the buffers.
    """
    (q_NTH, *results), acc = rows, accumulator(rows[0].dtype)
    read = Tile(prefix.k.shape, prefix.index, piece.begin, piece.size)
    operands = cudnn.CudnnOperands(q_NTH, read.read(prefix.k), read.read(prefix.v), *piece.lengths())
    how = dict(causal=piece.causal, window=piece.window)
    dq_NTH, dk_KCH, dv_KCH = cudnn.backward(operands, cudnn.CudnnResults(*results), **how)
    some = (piece.num_queries > 0) & (piece.num_keys > 0)
    num_queries, num_keys = (jnp.where(some, count, 0) for count in (piece.num_queries, piece.num_keys))
    write = Tile(gradients.dk.shape, prefix.grads_at, piece.begin, piece.size)
    dk = write.add(gradients.dk, asked_rows(dk_KCH, num_keys).astype(acc))
    dv = write.add(gradients.dv, asked_rows(dv_KCH, num_keys).astype(acc))
    return asked_rows(dq_NTH, num_queries).astype(acc), Gradients(dk, dv)
