"""Attention of a chunk whose documents choose their members: over the whole `seq` axis, or within teams of members.

A chunk of a sequence is *stream* (its documents cross chunks or need all members: see `sequence`) or a *team chunk*
(whole documents on aligned teams of at most half the members: see `near`). The tags of the batch decide. Each path
runs in loops of 0 or 1 trips. Trip counts are maxima over ALL devices: one device that skipped a collective would leave
the others waiting.

A plan without teams has `Chunk.teams` None; its program has `sequence` alone.

Letters: R members, M sequences of a pipeline, C chunks, S tokens, T tokens of a chunk on one member, N query heads,
K key/value heads, H head dim, E elements of a head in a cache, U ulysses members.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sppo_jax.arrays import buffers
from sppo_jax.arrays.dtypes import accumulator
from sppo_jax.attention.blockwise import delta
from sppo_jax.attention.operands import Cotangent
from sppo_jax.attention.spreading import near, sequence, ulysses
from sppo_jax.attention.spreading.sequence import Attended, Cache, Chunk, Split

_FAR = 2**31 - 1


class Modes(NamedTuple):
    """How each chunk of each sequence attends, int32 [M, C].

    Args:
        own_stream: 1 where the chunk of this pipeline is a stream chunk.
        stream: 1 where the chunk of any pipeline is.
        level: exchanges of the team chunks of all pipelines, the most of any.
    """

    own_stream: jax.Array
    stream: jax.Array
    level: jax.Array


class Teams(NamedTuple):
    """How one tick attends.

    Args:
        is_stream: whether this device's own chunk is a stream chunk.
        stream_trips: 1 if any device's chunk is; the same on all devices.
        level: exchanges of the team chunks; the same on all devices.
        tags: masks of this device's own chunk as a team chunk; without documents if it is a stream chunk.
    """

    is_stream: jax.Array
    stream_trips: jax.Array
    level: jax.Array
    tags: near.NearTags


def find_modes(documents_MS: jax.Array, starts: Sequence[int], lengths: Sequence[int], all_axes) -> Modes:
    """Finds out once a step how each chunk attends; call it inside `shard_map`.

    Args:
        documents_MS: documents of this device's own tokens, with space for a longest chunk behind them.
        starts, lengths: first token and tokens of each chunk on one member.
        all_axes: every axis of the mesh.
    """
    num_members, size = lax.axis_size(near.AXES), max(lengths)
    begin_C, length_C = jnp.asarray(starts, jnp.int32), jnp.asarray(lengths, jnp.int32)

    def look(place):
        row, chunk = place
        own_T = buffers.read(documents_MS, (row, begin_C[chunk]), (size,))
        own_T = jnp.where(jnp.arange(size, dtype=jnp.int32) < length_C[chunk], own_T, -1)
        documents_RT = lax.all_gather(own_T, near.AXES)
        low = jnp.where(documents_RT >= 0, documents_RT, _FAR).min()
        return _level(documents_RT), low, documents_RT.max()

    shape = documents_MS.shape[0], len(lengths)
    places = [x.reshape(-1) for x in jnp.meshgrid(*(jnp.arange(n, dtype=jnp.int32) for n in shape), indexing="ij")]
    level, low, high = (x.reshape(shape) for x in lax.map(look, tuple(places)))
    before = _exclusive(lax.cummax(high, axis=1), -1)
    after = _exclusive(lax.cummin(low[:, ::-1], axis=1), _FAR)[:, ::-1]
    own = ((low == before) | (high == after) | (1 << level >= num_members)).astype(jnp.int32)
    return Modes(own, lax.pmax(own, all_axes), lax.pmax(jnp.where(own == 1, 0, level), all_axes))


def _level(documents_RT: jax.Array) -> jax.Array:
    """Returns log2 of the members in the smallest aligned teams that hold each document whole."""
    members = lax.broadcasted_iota(jnp.int32, documents_RT.shape, 0).reshape(-1)
    documents, members = lax.sort((documents_RT.reshape(-1), members), num_keys=2)
    begins = jnp.concatenate([jnp.ones((1,), bool), documents[1:] != documents[:-1]])
    first = members[lax.cummax(jnp.where(begins, jnp.arange(documents.size, dtype=jnp.int32), 0))]
    # Members a and b lie in one aligned team of 2^n exactly if a XOR b has at most n binary digits.
    apart = jnp.where(documents >= 0, members ^ first, 0)
    return (32 - lax.clz(apart)).max()


def _exclusive(x_MC: jax.Array, first: int) -> jax.Array:
    """Moves columns one place later."""
    return jnp.concatenate([jnp.full_like(x_MC[:, :1], first), x_MC[:, :-1]], axis=1)


def chunk_teams(modes: Modes, own: tuple, all_of_tick: tuple, tags: tuple, split: Split) -> Teams:
    """Returns how a tick attends.

    Args:
        modes: from `find_modes`.
        own: sequence and chunk of this device's unit.
        all_of_tick: sequence, chunk and activity (0 or 1) of every stage's unit, int32 [stages] each.
        tags: the unit's chunk on every ring member, [ring, T * U], and its tokens on one member.
        split: how `seq` is divided.
    """
    sequences, chunks, active = all_of_tick

    def most(x_MC):
        return jnp.where(active == 1, x_MC[sequences, chunks], 0).max()

    is_stream = modes.own_stream[own] == 1
    chunk, length = tags
    own_length, how = jnp.where(is_stream, 0, length), (split.ulysses, split.kernel, split.window, split.target)
    masks = near.near_tags(chunk, own_length, *how)
    return Teams(is_stream, most(modes.stream), most(modes.level), masks)


def write_prefix(cache: Cache, k_TKH, v_TKH, chunk: Chunk, layer, split: Split, *, behind=None) -> Cache:
    """Puts a chunk's keys and values into the cache; of a team chunk, all heads of this device's tokens.

    `behind`: see `sequence.write_blocks`.
    """
    teams = chunk.teams
    if teams is None or split.ulysses == 1:
        return sequence.write_prefix(cache, k_TKH, v_TKH, chunk, layer, split, behind=behind)

    def exchange(trip, _):
        return tuple(sequence.prefix_block(_in_trip(trip, x), split) for x in (k_TKH, v_TKH))

    own = tuple(_own_block(x, split.ulysses) for x in (k_TKH, v_TKH))
    stream = lax.fori_loop(0, teams.stream_trips, exchange, tuple(map(jnp.zeros_like, own)))
    blocks = [jnp.where(teams.is_stream, a, b) for a, b in zip(stream, own, strict=True)]
    return sequence.write_blocks(cache, blocks, chunk, layer, behind)


def _own_block(x_TKH: jax.Array, num_ulysses: int) -> jax.Array:
    """[T, K, H] -> [K / U, T * U, H], the shape of a stream chunk's block in the cache; nothing is sent.

    Tokens come first, as in a stream chunk: the padding of a short chunk lies behind it, where the next chunk may go.
    """
    x = ulysses.replicate(x_TKH, num_ulysses)
    num_tokens, num_heads, head_dim = x.shape
    x = x.reshape(num_tokens, num_ulysses, -1, head_dim).transpose(2, 0, 1, 3)
    return x.reshape(num_heads // num_ulysses, -1, head_dim)


def _own_keys(cache: Cache, chunk: Chunk, layer, like_TKH, split: Split) -> list[jax.Array]:
    """Reads what `_own_block` arranged: k_KTE and v_KTE."""
    num_tokens, num_kv_heads, _ = like_TKH.shape
    head_dim = cache.k.shape[-1]
    shape = (cache.k.shape[-3], num_tokens * split.ulysses, head_dim)
    where = (chunk.slot, layer, 0, chunk.start)

    def take(buffer):
        x = buffers.read(buffer, where, shape).reshape(shape[0], num_tokens, split.ulysses, head_dim)
        x = x.transpose(2, 0, 1, 3).reshape(-1, num_tokens, head_dim)
        return x[:: x.shape[0] // num_kv_heads]

    return [take(buffer) for buffer in cache]


def forward(q_TNH, like_TKH, cache: Cache, chunk: Chunk, layer, split: Split) -> tuple[jax.Array, jax.Array]:
    """Attends from a chunk.

    Args:
        q_TNH: this device's queries, all heads.
        like_TKH: an array with the shape of this device's keys.
        cache, chunk, layer, split: see `sequence.forward`.

    Returns:
        out_TNH in the dtype of q, and lse_TN in at least float32.
    """
    teams = chunk.teams
    if teams is None:
        return sequence.forward(q_TNH, cache, chunk, layer, split)
    own = near.forward(q_TNH, *_own_keys(cache, chunk, layer, like_TKH, split), teams.tags, teams.level)

    def stream(trip, _):
        return sequence.forward(_in_trip(trip, q_TNH), *_prefix_in_trip(trip, cache, chunk, layer), split)

    nothing = jnp.zeros_like(q_TNH), jnp.full(q_TNH.shape[:2], -jnp.inf, accumulator(q_TNH.dtype))
    out, lse = lax.fori_loop(0, teams.stream_trips, stream, nothing)
    return jnp.where(teams.is_stream, out, own[0].astype(out.dtype)), jnp.where(teams.is_stream, lse, own[1])


def backward(attended: Attended, like_TKH, cache: Cache, sums: Cache, chunk: Chunk, layer, split: Split):
    """Differentiates `forward`, and takes a chunk's finished dK and dV.

    Args:
        attended: queries, results and cotangent.
        like_TKH: an array with the shape and dtype of this device's keys.
        cache, sums: keys and values, and the buffers that gather the gradients of stream chunks.
        chunk, layer, split: as in `forward`.

    Returns:
        dq_TNH in the dtype of q, dk_TKH and dv_TKH in that of `like_TKH`, and `sums`.
    """

    def over_all_members(attended, cache, chunk, layer, sums):
        dq, sums = sequence.backward(attended, cache, sums, chunk, layer, split)
        dk, dv, sums = sequence.take_gradient(sums, chunk, layer, like_TKH, split)
        return (dq, dk, dv), sums

    teams = chunk.teams
    if teams is None:
        (dq, dk, dv), sums = over_all_members(attended, cache, chunk, layer, sums)
        return dq, dk, dv, sums
    q_TNH, out_TNH, lse_TN, dout_TNH = attended
    summary = out_TNH if split.kernel == "cudnn" else delta(out_TNH, dout_TNH)
    keys = _own_keys(cache, chunk, layer, like_TKH, split)
    dq, own = near.backward(q_TNH, *keys, teams.tags, teams.level, Cotangent(dout_TNH, lse_TN, summary))
    own = [dq.astype(q_TNH.dtype), *(x.swapaxes(0, 1)[..., : like_TKH.shape[-1]].astype(like_TKH.dtype) for x in own)]

    def stream(trip, carry):
        own = Attended(*(_in_trip(trip, x) for x in attended))
        return over_all_members(own, *_prefix_in_trip(trip, cache, chunk, layer), carry[1])

    nothing = jnp.zeros_like(q_TNH), *(jnp.zeros(like_TKH.shape, like_TKH.dtype) for _ in range(2))
    of_stream, sums = lax.fori_loop(0, teams.stream_trips, stream, (nothing, sums))
    return (*(jnp.where(teams.is_stream, a, b) for a, b in zip(of_stream, own, strict=True)), sums)


def _in_trip(trip, x: jax.Array) -> jax.Array:
    """Returns `x` in a loop of 0 or 1 trips. The compiler would move out what is the same in every trip."""
    return jnp.where(trip == 0, x, jnp.zeros_like(x))


def _prefix_in_trip(trip, cache: Cache, chunk: Chunk, layer) -> tuple[Cache, Chunk, jax.Array]:
    """Returns a place in the cache that the compiler takes to differ between the trips of a loop of 0 or 1 trips."""
    num_slots, num_layers = cache.k.shape[:2]
    # The index of a dim of size 1 is known to be 0.
    if num_layers > 1:
        return cache, chunk, layer + trip
    if num_slots > 1:
        return cache, chunk._replace(slot=chunk.slot + trip), layer
    return Cache(*(_in_trip(trip, x) for x in cache)), chunk, layer
