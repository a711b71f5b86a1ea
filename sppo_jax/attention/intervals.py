"""Which keys each query sees, as one interval of the key buffer a query, and the blocks of both that a kernel visits.

Documents are contiguous and positions increase within them, so what a query sees in one member's buffer is one run of
keys. A kernel then needs no tags: a key is visible if lo <= its index < hi.

Letters: T queries, S keys, P cores of a device, N steps; a step is a block of queries and a block of keys.
"""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp

from sppo_jax.attention.pallas_blocks import Blocks
from sppo_jax.attention.spans import Spans
from sppo_jax.rules import Facts, check

NONE, EDGE, FULL = 0, 1, 2  # kinds of a step: nothing is visible, some pairs are, all are
# A step is one int32: the first bit and the mask of each of its fields.
_BITS = {"kind": (0, 3), "first": (2, 1), "last": (3, 1), "query": (4, 0xFFF), "key": (16, 0xFFFF)}
_FAR = 2**30


class Intervals(NamedTuple):
    """Query t sees keys lo[t] .. hi[t] - 1: none where hi <= lo; int32 [T]."""

    lo: jax.Array
    hi: jax.Array


class Steps(NamedTuple):
    """The steps of each core, packed: `table` [P, N].

    `count` of them are run, the same on every core; on core p `active[p]` have visible pairs.
    """

    table: jax.Array
    count: jax.Array
    active: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Meets:
    """Where a chunk's queries and one member's keys meet: what the kernel gets in place of a mask."""

    intervals: Intervals
    forward: Steps
    backward: Steps
    blocks: Blocks = field(metadata={"static": True})

    def take(self, index) -> "Meets":
        """Picks one row of stacked ones."""
        return jax.tree.map(lambda x: x[index], self)


def from_spans(spans: Spans, num_queries: int) -> Intervals:
    """Turns a rectangle and one triangle a document into intervals.

    Args:
        spans: of T queries, without a window.
        num_queries: T.
    """
    rows = jnp.arange(num_queries, dtype=jnp.int32)
    numbers = jnp.arange(spans.query_begin.shape[0], dtype=jnp.int32)
    is_real = (numbers < spans.num_documents) & (spans.query_count > 0) & (spans.key_count > 0)
    begins = jnp.where(is_real, spans.query_begin, num_queries)
    number = jnp.full((num_queries,), -1, jnp.int32).at[begins].max(numbers, mode="drop")
    number = jax.lax.cummax(number)  # of the last triangle that begins at or before each query
    begin, count, key_begin, key_count = (
        x[jnp.maximum(number, 0)] for x in (spans.query_begin, spans.query_count, spans.key_begin, spans.key_count)
    )
    is_inside = (number >= 0) & (rows < begin + count)
    lo = jnp.where(is_inside, key_begin, 0)
    hi = jnp.where(is_inside, key_begin + jnp.minimum(rows - begin + 1, key_count), 0)
    if spans.past is None:
        return Intervals(lo, hi)
    has_past = (rows < spans.past.queries) & (spans.past.keys > 0)
    end = spans.past.begin + spans.past.keys
    return Intervals(jnp.where(has_past, spans.past.begin, lo), jnp.where(has_past, jnp.maximum(hi, end), hi))


def within_window(intervals: Intervals, start, window: int, members: tuple = (0, 0), num_members: int = 1) -> Intervals:
    """Leaves out the keys that lie before the windows of the queries.

    Token t of a sequence lies on ring member t mod R. Positions rise by one within a document.

    Args:
        intervals: of a chunk's queries on one member and the keys of a member.
        start: key index of the chunk's first token.
        window: how many positions a query sees, its own among them.
        members: ring members of the queries and of the keys.
        num_members: R.
    """
    own, other = (jnp.asarray(x, jnp.int32) for x in members)
    rows = start + jnp.arange(intervals.lo.shape[0], dtype=jnp.int32)
    # Key s is token s * R + other, query t is token t * R + own: the difference must be less than the window.
    first = rows + jnp.floor_divide(own - other - window, num_members) + 1
    return Intervals(jnp.maximum(intervals.lo, first), intervals.hi)


def read_field(word: jax.Array, name: str) -> jax.Array:
    """Reads a field of a packed step: `kind`, `first` or `last` step of its query block, `query` or `key` block."""
    shift, mask = _BITS[name]
    return (jax.lax.shift_right_logical(word, jnp.int32(shift)) if shift else word) & mask


def _pack(**fields: jax.Array) -> jax.Array:
    word = jnp.zeros((), jnp.int32)
    for name, x in fields.items():
        word = word | jnp.left_shift(x.astype(jnp.int32), _BITS[name][0])
    return word


class _Reach(NamedTuple):
    """Of each query block: key blocks first .. last - 1 have visible pairs, full_first .. full_last - 1 have no other.

    All int32 [T / block_q].
    """

    first: jax.Array
    last: jax.Array
    full_first: jax.Array
    full_last: jax.Array


def _reach(intervals: Intervals, block_q: int, block_k: int) -> _Reach:
    lo, hi = (x.reshape(-1, block_q) for x in intervals)
    some = hi > lo
    last = -(-jnp.where(some, hi, 0).max(1) // block_k)
    begin = jnp.where(some, lo, _FAR)
    return _Reach(
        first=jnp.minimum(begin.min(1) // block_k, last),
        last=last,
        full_first=-(-begin.max(1) // block_k),
        full_last=jnp.where(some.all(1), hi.min(1) // block_k, 0),
    )


def find_steps(intervals: Intervals, num_keys: int, blocks: tuple[int, int], *, num_lists: int, by: str) -> Steps:
    """Lists the steps of each core, query block after query block, key blocks ascending.

    Every query block has at least one step, so that its output is written.

    Args:
        intervals: of T queries.
        num_keys: S.
        blocks: queries and keys in a block; the queries divide T.
        num_lists: P; blocks are dealt to the cores in turn.
        by: which blocks are dealt: "query" (each core has its own queries) or "key" (its own keys).

    Raises:
        ValueError: there are more pairs of blocks than a core can list.
    """
    block_q, block_k = blocks
    num_q, num_k = intervals.lo.shape[0] // block_q, -(-num_keys // block_k)
    check(Facts(kernel="pallas", visits=(num_q, num_k)))
    shared = -(-num_q // num_lists), num_k
    size = math.prod(shared if by == "query" else (num_q, -(-num_k // num_lists)))
    reach = _reach(intervals, block_q, block_k)
    lists = [_list_of(core, num_lists, reach, by, size) for core in range(num_lists)]
    tables, counts, active = zip(*lists, strict=True)
    return Steps(jnp.stack(tables), jnp.stack(counts).max(), jnp.stack(active))


def _list_of(core: int, num_lists: int, reach: _Reach, by: str, size: int):
    """Returns the packed steps [N] of a core, how many these are, and how many have visible pairs."""
    num_q = reach.first.shape[0]
    if by == "query":
        is_own = jnp.arange(num_q, dtype=jnp.int32) % num_lists == core
        start, stride = reach.first, 1
        seen = jnp.where(is_own, reach.last - reach.first, 0)
        counts = jnp.where(is_own, jnp.maximum(seen, 1), 0)
    else:
        start, stride = reach.first + (core - reach.first) % num_lists, num_lists
        seen = jnp.maximum(-(-(reach.last - start) // num_lists), 0)
        counts = jnp.maximum(seen, 1)
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    n = jnp.arange(size, dtype=jnp.int32)
    query = jnp.minimum((n[:, None] >= ends[None]).sum(1, dtype=jnp.int32), num_q - 1)
    within = n - (ends[query] - counts[query])
    is_step = n < ends[-1]
    is_active = is_step & (within < seen[query])
    key = start[query] + within * stride
    is_full = (key >= reach.full_first[query]) & (key < reach.full_last[query])
    kind = jnp.where(is_active, jnp.where(is_full, FULL, EDGE), NONE)
    # A step without pairs keeps the key block of the step before, or of the first with pairs: nothing is fetched.
    place = jax.lax.cummax(jnp.where(is_active, n, -1))
    place = jnp.where(place < 0, jnp.argmax(is_active).astype(jnp.int32), place)
    key = jnp.where(is_active.any(), key[place], 0)
    query = jnp.where(is_step, query, query[jnp.maximum(ends[-1] - 1, 0)])
    first, last = is_step & (within == 0), is_step & (within == counts[query] - 1)
    table = _pack(kind=kind, first=first, last=last, query=query, key=key)
    return table, ends[-1], is_active.sum(dtype=jnp.int32)
