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

A backward may take fewer queries in a call than a chunk has. Then the chunk's queries are cut into blocks. The triangle
of a document is a triangle in each block, and a rectangle of what the block sees of the blocks before it.

Letters: T queries of a chunk on one ring member, S keys of a member's buffer, B blocks of queries.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sppo_jax.arrays import buffers
from sppo_jax.attention.tags import Tags
from sppo_jax.program.past_tile import block_size

_FAR = 2**31 - 1


class Known(NamedTuple):
    """What is known of every chunk while tracing: whether keys may lie before it, and whether it has one document.

    `backward_queries`: how many queries a call of a backward takes at most; 0: any number.
    """

    has_past: bool = True
    one_document: bool = False
    backward_queries: int = 0


NOTHING_KNOWN = Known()


class Past(NamedTuple):
    """A rectangle: the first `queries` queries see `keys` keys from `begin` of the buffer on; int32 scalars."""

    queries: jax.Array
    begin: jax.Array
    keys: jax.Array


class SpanCut(NamedTuple):
    """What blocks of queries see of their own chunk.

    `rectangles`, [B] each: what a block's first queries see of the blocks before it, if their document began there.
    `triangles`: the documents, cut where a block ends.
    """

    rectangles: Past
    triangles: "Spans"


class Spans(NamedTuple):
    """The rectangle and the triangles of a chunk's queries and one member's keys; int32, scalars or [D] by document.

    `past` is None where nothing is past besides the documents' bands. D is T, or 1 for one document at most. Document d
    of `num_documents` in the chunk has `query_count[d]` queries from `query_begin[d]` on and `key_count[d]` keys from
    `key_begin[d]` on; its query i sees its keys 0..i, or the last of these that a window holds. Query rows count from
    the chunk's start, where a band may begin before row 0; keys count from the buffer's start. `cut`: the triangles for
    a backward that takes fewer queries in a call than the chunk has.
    """

    past: Past | None
    num_documents: jax.Array
    query_begin: jax.Array
    query_count: jax.Array
    key_begin: jax.Array
    key_count: jax.Array
    cut: SpanCut | None = None

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
    start, later = jnp.asarray(start, jnp.int32), jnp.asarray(later, jnp.int32)
    own_keys_T = _keys_of_chunk(key_documents_S, start, num_queries)
    spans = _triangles(query_documents_T, own_keys_T, start, later, 1 if known.one_document else num_queries)
    size = block_size(num_queries, known.backward_queries)
    if size < num_queries and not window:
        spans = spans._replace(cut=_cut(query_documents_T, own_keys_T, start, later, size, known.one_document))
    if not known.has_past:
        return spans
    first = query_documents_T[jnp.argmax(query_documents_T >= 0)]
    past = (key_documents_S == first) & (first >= 0) & (jnp.arange(num_keys, dtype=jnp.int32) < start)
    keys = past.sum(dtype=jnp.int32)  # they end where the chunk starts, because a document is contiguous
    if window:
        return _with_band(spans, keys, start, later, window)
    queries = (query_documents_T == first).sum(dtype=jnp.int32)
    return spans._replace(past=Past(jnp.where(keys > 0, queries, 0), start - keys, keys))


def _triangles(query_documents_T, own_keys_T, start, later, num_listed: int) -> Spans:
    """Finds the triangles of documents within a chunk, of which so many are listed.

    Args:
        query_documents_T, start, later: see `find_spans`.
        own_keys_T: document of each key of the chunk.
        num_listed: of documents.
    """
    size = query_documents_T.shape[0]
    begins, order = _runs(query_documents_T)

    by_document = partial(_by_document, begins, order)
    query_begin = by_document(jnp.arange(size, dtype=jnp.int32), 0)
    query_count = _count(order, query_documents_T >= 0)
    key_begin, key_count = _keys_in_chunk(by_document(query_documents_T, _FAR), own_keys_T)
    # A triangle without its diagonal is a triangle that leaves out its first query.
    strict = jnp.where(key_count > 0, key_begin - query_begin + later, 0)
    return Spans(
        past=None,
        num_documents=begins.sum(dtype=jnp.int32),
        query_begin=(query_begin + strict)[:num_listed],
        query_count=(query_count - strict)[:num_listed],
        key_begin=(start + key_begin)[:num_listed],
        key_count=key_count[:num_listed],
    )


def _cut(query_documents_T, own_keys_T, start, later, size: int, one_document: bool) -> SpanCut:
    """Cuts the triangles of a chunk into blocks of so many queries; arguments as `_triangles`."""
    num_queries = query_documents_T.shape[0]
    num_blocks = -(-num_queries // size)
    rows = jnp.arange(num_queries, dtype=jnp.int32)
    begins, order = _runs(query_documents_T)
    listed = jnp.full((num_queries,), _FAR, jnp.int32)
    listed = listed.at[jnp.where(begins, order, num_queries)].set(query_documents_T, mode="drop")
    # The same number in queries and keys of a document; -1 for none, and for keys of documents without a query.
    queries_T = jnp.where(query_documents_T >= 0, order, -1)
    key_order, is_found = _find_documents(listed, own_keys_T)
    keys_T = jnp.where(is_found, key_order, -1)

    firsts_B = jnp.arange(num_blocks, dtype=jnp.int32) * size
    goes_on_B = queries_T[firsts_B]
    same_BT = (queries_T == goes_on_B[:, None]) & (rows // size == firsts_B[:, None] // size)
    before_BT = (keys_T == goes_on_B[:, None]) & (rows < firsts_B[:, None]) & (goes_on_B >= 0)[:, None]
    keys_B = before_BT.sum(axis=1, dtype=jnp.int32)  # they end where the block begins
    queries_B = jnp.where(keys_B > 0, same_BT.sum(axis=1, dtype=jnp.int32), 0)

    in_blocks = (jnp.where(x >= 0, x * num_blocks + rows // size, -1) for x in (queries_T, keys_T))
    num_listed = num_blocks if one_document else num_queries
    triangles = _triangles(*in_blocks, start, later, num_listed)
    return SpanCut(Past(queries_B, start + firsts_B - keys_B, keys_B), triangles)


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

    by_document = partial(_by_document, begins, order)
    documents, query_begin = by_document(queries.documents, _FAR), by_document(rows, 0)
    query_count = _count(order, queries.documents >= 0)
    key_begin, key_count = _keys_in_chunk(documents, keys.documents)
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


def _by_document(begins: jax.Array, order: jax.Array, values: jax.Array, fill: int) -> jax.Array:
    """Returns of each document its value at the document's first token; of numbers without a document the fill."""
    size = begins.shape[0]
    return jnp.full((size,), fill, jnp.int32).at[jnp.where(begins, order, size)].set(values, mode="drop")


def _runs(documents: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns whether a document begins at each token, and the number of each token's document, counted from 0."""
    before = jnp.concatenate([jnp.full((1,), -1, documents.dtype), documents[:-1]])
    begins = (documents >= 0) & (documents != before)
    return begins, jnp.cumsum(begins, dtype=jnp.int32) - 1


def _count(order: jax.Array, where: jax.Array) -> jax.Array:
    size = order.shape[0]
    return jnp.zeros((size,), jnp.int32).at[jnp.where(where, order, size)].add(1, mode="drop")


def _keys_of_chunk(key_documents_S: jax.Array, start: jax.Array, size: int) -> jax.Array:
    """Returns the documents of so many keys from `start` on."""
    padded = jnp.pad(key_documents_S, (0, size), constant_values=-1)
    return lax.dynamic_slice(padded, (jnp.minimum(start, key_documents_S.shape[0]),), (size,))


def _find_documents(documents: jax.Array, keys_T: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns where a key's document is, or would be, in a rising list of documents, and whether it is there."""
    # Sorting, because binary search is a loop, and some compilers fail on slices that depend on a loop.
    order = jnp.searchsorted(documents, keys_T, method="sort").astype(jnp.int32)
    return order, (keys_T >= 0) & (documents[jnp.minimum(order, documents.shape[0] - 1)] == keys_T)


def _keys_in_chunk(documents: jax.Array, keys_T: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the first key, counted from the chunk's start, and the number of keys of each document of the chunk."""
    size = documents.shape[0]
    order, found = _find_documents(documents, keys_T)
    begins = found & _runs(keys_T)[0]
    where = jnp.where(begins, order, size)
    begin = jnp.zeros((size,), jnp.int32).at[where].set(jnp.arange(size, dtype=jnp.int32), mode="drop")
    return begin, _count(order, found)
