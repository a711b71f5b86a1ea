"""Tails: what a layer with a window needs of the chunks before, the keys and values of its last tokens.

So its cache holds a tail and a chunk, not a sequence; `rules.has_tails` says when. A forward stashes the tail that it
finds, and leaves the next chunk's behind. A backward writes the stashed tail again, so that it needs no chunk before.
It finds dK and dV of the next chunk's tail, moves them to where these tokens lie in its own chunk, and leaves those of
its own tail.

Letters: K key/value heads and H head dim of one device, W tokens of a window on one ring member, T tokens of a chunk on
one member with its padding, S = W + T.
"""

import jax
import jax.numpy as jnp

from sppo_jax.arrays import buffers
from sppo_jax.attention.spreading.sequence import Cache, Chunk
from sppo_jax.attention.tags import Tags
from sppo_jax.pipeline.stash.buffers import TAILS

Shape = tuple[int, ...]


def near_keys(keys: Tags, start, room: int, tail: int) -> Tags:
    """Cuts the tags of a chunk and of its tail out of those of its sequence: of all keys that a cache has room for.

    Args:
        keys: of the sequence on every ring member, [R, tokens].
        start: where the chunk starts in a member's tokens.
        room: T of the longest tick.
        tail: W; tokens before the sequence are padding.
    """

    def cut(x, fill):
        padded = jnp.pad(x, ((0, 0), (tail, 0)), constant_values=fill)
        return buffers.read(padded, (0, start), (x.shape[0], tail + room))

    return Tags(cut(keys.positions, 0), cut(keys.documents, -1))


def tail_of(cache: Cache, chunk: Chunk, layer, shape: Shape) -> dict[str, jax.Array]:
    """Returns the keys and values of the tokens before a chunk, by their names in the stash; `shape` is [K, W, H]."""
    place = chunk.slot, layer
    return {name: buffers.once(buffers.read(x, place, shape)) for name, x in zip(TAILS, cache, strict=True)}


def with_tail(cache: Cache, chunk: Chunk, layer, tail: dict[str, jax.Array]) -> Cache:
    """Returns the cache with these keys and values before a chunk."""
    place = chunk.slot, layer
    return Cache(*(buffers.write(x, place, tail[name]) for name, x in zip(TAILS, cache, strict=True)))


def moved_on(cache: Cache, chunk: Chunk, layer, shape: Shape, out_TNH: jax.Array) -> Cache:
    """Returns the cache with the next chunk's tail, once this chunk's output is there; an idle unit has no tokens."""
    place = chunk.slot, layer
    # Without an order between its reads and this write XLA copies the cache.
    end = (*place, 0, chunk.length + buffers.after(out_TNH))
    return Cache(*(buffers.write(x, place, buffers.once(buffers.read(x, end, shape))) for x in cache))


def handed_on(sums: Cache, chunk: Chunk, layer, shape: Shape) -> Cache:
    """Returns dK and dV with those of the next chunk's tail where these tokens lie in this chunk."""
    place = chunk.grad_slot, layer

    def move(x):
        tail = buffers.once(buffers.read(x, place, shape))
        x = buffers.write(x, place, jnp.zeros(shape, x.dtype))
        return buffers.write(x, (*place, 0, chunk.length), tail)

    return Cache(*map(move, sums))
