"""A chunk's attention over the whole `seq` axis: heads scattered over `ulysses`, tokens over `ring`, prefix resident.

Token t of a sequence lives on ring member t mod ring, ulysses member (t // ring) mod ulysses, for all chunk lengths.
So a chunk is one slice of a member's tokens, and the chunk is in natural order after the all-to-all. A chunk that is
shorter than its tick has its padding behind it, where the next chunk overwrites the padding.

Letters: T tokens of a chunk on one device, N query heads, K key/value heads, H head dim, U ulysses members,
M = T * U tokens of a chunk on one ring member, S tokens of a sequence on one ring member, with space for a chunk.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sppo_jax.arrays import buffers
from sppo_jax.arrays.dtypes import accumulator
from sppo_jax.attention.blockwise import delta
from sppo_jax.attention.operands import Cotangent, Gradients, Prefix
from sppo_jax.attention.pallas_blocks import Target
from sppo_jax.attention.spans import NOTHING_KNOWN, Known
from sppo_jax.attention.spreading import ring, ulysses
from sppo_jax.attention.tags import Tags


class Cache(NamedTuple):
    """Resident keys and values, [slots, layers, K, S, E], each of a sequence and a layer group; or their gradients.

    The first H of E elements count, see `plan.parts.cache_head_dim`.
    """

    k: jax.Array
    v: jax.Array


class Chunk(NamedTuple):
    """Where a chunk lies: the cache's slot, its first token and token count on this ring member, its masks.

    `grad_slot` is the slot of dK and dV. `teams`, if any, says how the chunk attends within teams of members; see
    `attention.spreading.teams`.
    """

    slot: jax.Array
    start: jax.Array
    length: jax.Array
    tags: ring.RingTags
    teams: Any = None
    grad_slot: jax.Array | int = 0

    def prefix(self, cache: Cache, layer) -> Prefix:
        """Returns the chunk's keys and values in the cache."""
        return Prefix(*cache, (self.slot, layer), (self.grad_slot, layer))


class Split(NamedTuple):
    """How `seq` is divided, what travels on the ring in this tick ("kv" or "q"), and the kernel on one device.

    `window`: how many positions a query sees, its own among them; 0: all before it. `target`: what the kernel "pallas"
    is compiled for. `known`: what the kernel "cudnn" need not loop over.
    """

    ulysses: int
    ring: int
    passes: str
    kernel: str = "blockwise"
    window: int = 0
    target: Target | None = None
    known: Known = NOTHING_KNOWN


def cache_heads(num_kv_heads: int, num_members: int) -> int:
    """Returns how many key/value heads one device keeps."""
    return ulysses.replicated_heads(num_kv_heads, num_members) // num_members


def member_tags(positions_S: jax.Array, documents_S: jax.Array, split: Split, spare: int) -> Tags:
    """Divides a sequence's tags over the ring: [R, S / R + spare]; the spare tokens are padding."""

    def stripe(x, fill):
        return jnp.pad(x.reshape(-1, split.ring).T, ((0, 0), (0, spare)), constant_values=fill)

    return Tags(stripe(positions_S, 0), stripe(documents_S, -1))


def gather_tags(own_T: Tags, split: Split) -> Tags:
    """Gives every member of `seq` the tags of a chunk, divided over the ring: [R, M]."""
    axes = (ring.AXIS, ulysses.AXIS)

    def gather(x_T):
        if split.ring * split.ulysses > 1:
            x_T = lax.all_gather(x_T, axes)
        return x_T.reshape(split.ring, split.ulysses, -1).swapaxes(1, 2).reshape(split.ring, -1)

    return Tags(*map(gather, own_T))


def write_tags(resident: Tags, own_T: Tags, slot, start, split: Split) -> Tags:
    """Puts a chunk's tags behind those of the chunks before it.

    Args:
        resident: tags of the sequences in flight, [slots, R, S] each.
        own_T: tags of this device's tokens of the chunk.
        slot, start: the chunk's slot, and its first token on a ring member.
        split: how `seq` is divided.
    """
    chunk = gather_tags(own_T, split)
    return Tags(*(buffers.write(buffer, (slot, 0, start), x) for buffer, x in zip(resident, chunk, strict=True)))


def chunk_tags(keys: Tags, start, length, size: int, split: Split, *, bound: int | None) -> ring.RingTags:
    """Cuts a chunk's queries out of its sequence's tags; tokens beyond the chunk's `length` become padding."""
    rows = [buffers.read(x, (0, start), (x.shape[0], size)) for x in keys]
    real = jnp.arange(size, dtype=jnp.int32) < length
    queries = Tags(rows[0], jnp.where(real, rows[1], -1))
    # The slot may still hold tags of an earlier sequence behind the chunk.
    end = jnp.asarray(start + length, jnp.int32)
    written = jnp.arange(keys.documents.shape[1], dtype=jnp.int32) < end
    keys = Tags(keys.positions, jnp.where(written, keys.documents, -1))
    given = split.target if split.kernel == "pallas" else split.known
    how = dict(kernel=split.kernel, passes=split.passes, window=split.window, given=given)
    return ring.ring_tags(queries, keys, start, bound=bound, **how)


def prefix_block(x_TKH: jax.Array, split: Split) -> jax.Array:
    """[T, K, H] of this device's tokens -> [K / U, M, H] of its heads, as the cache holds them."""
    block_KMH = ulysses.scatter_heads(ulysses.replicate(x_TKH, split.ulysses), split.ulysses).swapaxes(0, 1)
    # Of keys and values that are stashed too, as [T, K, H], XLA would give the cache that order, and copy all of it for
    # the kernel.
    return buffers.row_major(block_KMH) if split.kernel == "cudnn" else block_KMH


def write_prefix(cache: Cache, k_TKH, v_TKH, chunk: Chunk, layer, split: Split, *, behind=None) -> Cache:
    """Puts a chunk's keys and values behind those of the chunks before it; `behind`: see `write_blocks`."""
    return write_blocks(cache, [prefix_block(x, split) for x in (k_TKH, v_TKH)], chunk, layer, behind)


def write_blocks(cache: Cache, blocks: list[jax.Array], chunk: Chunk, layer, behind=None) -> Cache:
    """Puts blocks [K, M, H] of keys and values in a chunk's place.

    Args:
        cache: where.
        blocks: keys, values.
        chunk, layer: the place.
        behind: from which token of the block on the cache keeps what it has, which is of later chunks; None: no token.
    """
    where = (chunk.slot, layer, 0, chunk.start)

    def put(buffer, block_KMH):
        if behind is not None:
            own = (jnp.arange(block_KMH.shape[1], dtype=jnp.int32) < behind)[None, :, None]
            block_KMH = jnp.where(own, block_KMH, buffers.read(buffer, where, block_KMH.shape))
        return buffers.write(buffer, where, block_KMH)

    return Cache(*map(put, cache, blocks))


def forward(q_TNH, cache: Cache, chunk: Chunk, layer, split: Split) -> tuple[jax.Array, jax.Array]:
    """Attends from a chunk to its prefix, which includes the chunk itself.

    Args:
        q_TNH: this device's queries, all heads.
        cache: keys and values, this chunk's written.
        chunk, layer: where in the cache.
        split: how `seq` is divided.

    Returns:
        out_TNH in the dtype of q, and lse_TN in at least float32.
    """
    q_MNH = ulysses.scatter_heads(q_TNH, split.ulysses)
    out, lse = ring.forward(q_MNH, chunk.prefix(cache, layer), chunk.tags, passes=split.passes)
    return ulysses.gather_heads(out.astype(q_TNH.dtype), split.ulysses), ulysses.gather_heads(lse, split.ulysses)


class Attended(NamedTuple):
    """This device's queries, all heads, the GLOBAL results of their forward, and the output's cotangent."""

    q_TNH: jax.Array
    out_TNH: jax.Array
    lse_TN: jax.Array
    dout_TNH: jax.Array


def backward(attended: Attended, cache: Cache, sums: Cache, chunk: Chunk, layer, split: Split):
    """Differentiates `forward` and adds to dK and dV of the whole prefix.

    Args:
        attended: queries, results and cotangent.
        cache, sums: keys and values, and the buffers that gather their gradients.
        chunk, layer, split: as in `forward`.

    Returns:
        dq_TNH in the dtype of q, and `sums`.
    """
    q_TNH, out_TNH, lse_TN, dout_TNH = attended
    q, dout = (ulysses.scatter_heads(x, split.ulysses) for x in (q_TNH, dout_TNH))
    if split.kernel == "cudnn":
        cotangent = Cotangent(dout, *(ulysses.scatter_heads(x, split.ulysses) for x in (lse_TN, out_TNH)))
    else:
        rows = lse_TN, delta(out_TNH, dout_TNH)
        if split.ulysses > 1:
            # One exchange for both. Without an exchange LSE must not wait for what delta needs.
            rows_TN2 = ulysses.scatter_heads(jnp.stack(rows, axis=-1), split.ulysses)
            rows = rows_TN2[..., 0], rows_TN2[..., 1]
        cotangent = Cotangent(dout, *rows)
    prefix = chunk.prefix(cache, layer)
    dq, gradients = ring.backward(q, prefix, chunk.tags, cotangent, Gradients(*sums), passes=split.passes)
    return ulysses.gather_heads(dq.astype(q_TNH.dtype), split.ulysses), Cache(*gradients)


def take_gradient(sums: Cache, chunk: Chunk, layer, like_TKH, split: Split):
    """Takes a chunk's finished dK and dV out of the buffers and leaves zeros for the next sequence in that slot.

    Args:
        sums: the gradient buffers.
        chunk, layer, split: as in `forward`.
        like_TKH: an array with the shape and dtype of each result.

    Returns:
        dk_TKH, dv_TKH and `sums`.
    """
    num_tokens, num_kv_heads, head_dim = like_TKH.shape
    size = num_tokens * split.ulysses
    real = (jnp.arange(size, dtype=jnp.int32) < chunk.length)[None, :, None]

    def take(buffer):
        where = (chunk.grad_slot, layer, 0, chunk.start)
        old = buffers.read(buffer, where, (buffer.shape[-3], size, head_dim))
        if split.kernel == "pallas":
            old = buffers.once(old)
        buffer = buffers.write(buffer, where, jnp.where(real, 0, old))
        x_MKH = jnp.where(real, old, 0).swapaxes(0, 1).astype(accumulator(like_TKH.dtype))
        x = ulysses.sum_replicas(ulysses.gather_heads(x_MKH, split.ulysses), num_kv_heads)
        return x.astype(like_TKH.dtype), buffer

    dk, k = take(sums.k)
    dv, v = take(sums.v)
    return dk, dv, Cache(k, v)
