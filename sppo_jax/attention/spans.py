"""What a chunk's queries see, as rectangles and triangles: a fused kernel takes only two lengths and a causal flag.

Documents do not decrease along a sequence and each document is contiguous. So only the chunk's first document has keys
before the chunk, and its queries see all of these keys: a rectangle. Within the chunk every document is a triangle.
On a ring, token t lies on member t mod R. Between two members a triangle is the same, or excludes its diagonal.

With a window every document is a band: a triangle whose queries see their last keys alone. The band of the first
document begins with the keys before the chunk that its first query sees, and with as many queries that are none, so
that query i of the band still sees its keys up to i. On a ring whose R members divide the window, each pair of
members has a band of window / R keys.

Where every chunk begins its sequence there are no keys before it, and no rectangle. Where a sequence has one document
at most there is one triangle or band, of no queries if the chunk is padding alone. Both are known while tracing.

Letters: T queries of a chunk on one ring member, S keys of a member's buffer.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sppo_jax.arrays import buffers
from sppo_jax.attention.tags import Tags

_FAR = 2**31 - 1


class Known(NamedTuple):
    """What is known of every chunk while tracing: whether keys may lie before it, and whether it has one document."""

    has_past: bool = True
    one_document: bool = False


NOTHING_KNOWN = Known()


class Past(NamedTuple):
    """A rectangle: the first `queries` queries see `keys` keys from `begin` of the buffer on; int32 scalars."""

    queries: jax.Array
    begin: jax.Array
    keys: jax.Array


class Spans(NamedTuple):
    """The rectangle and the triangles of a chunk's queries and one member's keys; int32, scalars or [D] by document.

    `past` is None where nothing is past besides the documents' bands. D is T, or 1 for one document at most. Document d
    of `num_documents` in the chunk has `query_count[d]` queries from `query_begin[d]` on and `key_count[d]` keys from
    `key_begin[d]` on; its query i sees its keys 0..i, or the last of these that a window holds. Query rows count from
    the chunk's start, where a band may begin before row 0; keys count from the buffer's start.
    """

    past: Past | None
    num_documents: jax.Array
    query_begin: jax.Array
    query_count: jax.Array
    key_begin: jax.Array
    key_count: jax.Array

    @property
    def has_one_document(self) -> bool:
        """Whether there is one document at most."""
        return self.query_begin.shape[-1] == 1

    @property
    def is_one_piece(self) -> bool:
        """Whether all that the queries see is one triangle or band."""
        return self.past is None and self.has_one_document

    def take(self, index) -> "Spans":
        """Picks one row of stacked spans."""
        return jax.tree.map(lambda x: buffers.pick(x, index), self)


def shift_rows(x: jax.Array, by, dim: int, fill=0) -> jax.Array:
    """Moves rows along `dim` by `by` places (later if positive, at most all of them) and fills the gap with `fill`."""
    size = x.shape[dim]
    padding = [(size, size, 0) if d == dim else (0, 0, 0) for d in range(x.ndim)]
    padded = lax.pad(x, jnp.asarray(fill, x.dtype), padding)
    first = [size - by if d == dim else 0 for d in range(x.ndim)]
    return buffers.read(padded, tuple(first), x.shape)


def find_spans(
    query_documents_T: jax.Array,
    key_documents_S: jax.Array,
    start,
    later,
    window: int = 0,
    known: Known = NOTHING_KNOWN,
) -> Spans:
    """Finds the spans of one ring member's queries and a member's keys, its own or another's.

    Args:
        query_documents_T: document of each of the chunk's queries, -1 for padding.
        key_documents_S: document of each key of the buffer.
        start: where the chunk starts in a member's tokens.
        later: whether the keys' member comes after the queries' on the ring.
        window: of the keys of one member so many are seen at most; 0: all.
        known: what need not be looked for.
    """
    num_queries, num_keys = query_documents_T.shape[0], key_documents_S.shape[0]
    start = jnp.asarray(start, jnp.int32)
    rows = jnp.arange(num_queries, dtype=jnp.int32)
    begins, order = _runs(query_documents_T)

    def by_document(values, where, fill):
        empty = jnp.full((num_queries,), fill, jnp.int32)
        return empty.at[jnp.where(where, order, num_queries)].set(values, mode="drop")

    documents = by_document(query_documents_T, begins, _FAR)
    query_begin = by_document(rows, begins, 0)
    query_count = _count(order, query_documents_T >= 0)
    key_begin, key_count = _keys_in_chunk(documents, key_documents_S, start)
    # A triangle without its diagonal is a triangle that leaves out its first query.
    strict = jnp.where(key_count > 0, key_begin - query_begin + jnp.asarray(later, jnp.int32), 0)

    num_listed = 1 if known.one_document else num_queries
    spans = Spans(
        past=None,
        num_documents=begins.sum(dtype=jnp.int32),
        query_begin=(query_begin + strict)[:num_listed],
        query_count=(query_count - strict)[:num_listed],
        key_begin=(start + key_begin)[:num_listed],
        key_count=key_count[:num_listed],
    )
    if not known.has_past:
        return spans
    first = (key_documents_S == documents[0]) & (jnp.arange(num_keys, dtype=jnp.int32) < start)
    keys = first.sum(dtype=jnp.int32)  # they end where the chunk starts, because a document is contiguous
    if window:
        return _with_band(spans, keys, start, jnp.asarray(later, jnp.int32), window)
    return spans._replace(past=Past(jnp.where(keys > 0, query_count[0], 0), start - keys, keys))


def _with_band(spans: Spans, past_keys: jax.Array, start: jax.Array, later: jax.Array, window: int) -> Spans:
    """Puts the past that a window holds before the first document: of `past_keys` keys before the chunk's start."""
    past = jnp.minimum(past_keys, window - 1 + later)

    def first(values, value):
        return values.at[0].set(jnp.where(past > 0, value, values[0]))

    end = spans.query_begin[0] + spans.query_count[0]  # the last query is the same, with or without the past
    return spans._replace(
        query_begin=first(spans.query_begin, later - past),
        query_count=first(spans.query_count, end - later + past),
        key_begin=first(spans.key_begin, start - past),
        key_count=first(spans.key_count, spans.key_count[0] + past),
    )


def find_team_spans(queries: Tags, keys: Tags) -> Spans:
    """Finds the spans of one member's queries and the keys of a member of its team, or its own; nothing is past.

    Tokens of a document are dealt cyclically to the members of its team. So two members' tokens of a document make a
    triangle, whose diagonal is visible unless the first key comes after the first query. Documents that have no token
    on either member are left out, because each document is a call of the kernel.

    Args:
        queries: tags of the queries, [T].
        keys: tags of the keys, [T].
    """
    size = queries.documents.shape[0]
    begins, order = _runs(queries.documents)
    rows = jnp.arange(size, dtype=jnp.int32)

    def by_document(values, fill):
        return jnp.full((size,), fill, jnp.int32).at[jnp.where(begins, order, size)].set(values, mode="drop")

    documents, query_begin = by_document(queries.documents, _FAR), by_document(rows, 0)
    query_count = _count(order, queries.documents >= 0)
    key_begin, key_count = _keys_in_chunk(documents, keys.documents, jnp.int32(0))
    later = keys.positions[key_begin] > queries.positions[query_begin]
    strict = jnp.where(key_count > 0, later.astype(jnp.int32), 0)
    meet = (key_count > 0) & (query_count > strict)
    place = jnp.where(meet, jnp.cumsum(meet, dtype=jnp.int32) - 1, size)

    def compact(values):
        return jnp.zeros((size,), jnp.int32).at[place].set(values, mode="drop")

    return Spans(
        past=None,
        num_documents=meet.sum(dtype=jnp.int32),
        query_begin=compact(query_begin + strict),
        query_count=compact(query_count - strict),
        key_begin=compact(key_begin),
        key_count=compact(key_count),
    )


def _runs(documents: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns whether a document begins at each token, and the number of each token's document, counted from 0."""
    before = jnp.concatenate([jnp.full((1,), -1, documents.dtype), documents[:-1]])
    begins = (documents >= 0) & (documents != before)
    return begins, jnp.cumsum(begins, dtype=jnp.int32) - 1


def _count(order: jax.Array, where: jax.Array) -> jax.Array:
    size = order.shape[0]
    return jnp.zeros((size,), jnp.int32).at[jnp.where(where, order, size)].add(1, mode="drop")


def _keys_in_chunk(documents: jax.Array, key_documents_S: jax.Array, start) -> tuple[jax.Array, jax.Array]:
    """Returns the first key, counted from the chunk's start, and the number of keys of each document of the chunk."""
    size, num_keys = documents.shape[0], key_documents_S.shape[0]
    padded = jnp.pad(key_documents_S, (0, size), constant_values=-1)
    window = jax.lax.dynamic_slice(padded, (jnp.minimum(start, num_keys),), (size,))
    # Sorting, because binary search is a loop, and some compilers fail on slices that depend on a loop.
    order = jnp.searchsorted(documents, window, method="sort").astype(jnp.int32)
    found = (window >= 0) & (documents[jnp.minimum(order, size - 1)] == window)
    begins = found & _runs(window)[0]
    where = jnp.where(begins, order, size)
    begin = jnp.zeros((size,), jnp.int32).at[where].set(jnp.arange(size, dtype=jnp.int32), mode="drop")
    return begin, _count(order, found)
