"""Rectangles and triangles cover exactly what a mask shows, whatever the documents, chunks and ring members."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from team_cases import deal

from sppo_jax.attention.spans import Known, find_spans, find_team_spans, shift_rows
from sppo_jax.attention.tags import Tags, visible
from sppo_jax.program.past_tile import block_size


def random_tags(rng, length):
    """Documents of any length with padding between some of them and at both ends."""
    documents, positions, number = [], [], 0
    while len(documents) < length:
        if rng.random() < 0.3:
            gap = int(rng.integers(1, 4))
            documents += [-1] * gap
            positions += [0] * gap
        size = int(rng.integers(1, length // 2))
        documents += [number] * size
        positions += list(range(size))
        number += int(rng.integers(1, 3))
    return np.array(documents[:length], np.int32), np.array(positions[:length], np.int32)


def covered(spans, num_queries, num_keys, window=None):
    mask = np.zeros((num_queries, num_keys), int)
    if spans.past is not None:
        queries, begin, keys = map(int, spans.past)
        mask[:queries, begin : begin + keys] += 1
    for d in range(int(spans.num_documents)):
        at, queries, begin, keys = (int(x[d]) for x in spans[2:6])
        for i in range(queries):
            first = max(0, i + 1 - window) if window else 0
            assert first < keys or not keys, "a query of a call sees a key"
            if at + i >= 0:
                mask[at + i, begin + first : begin + min(i + 1, keys)] += 1
    return mask


@pytest.mark.parametrize("members", [1, 2, 3, 5])
@pytest.mark.parametrize("window", [0, 1, 2, 3, 7, 100])
def test_spans_are_the_mask(members, window):
    """The window of so many keys of one member is one of so many times the members."""
    rng, find = np.random.default_rng(members), jax.jit(find_spans, static_argnames="window")
    for _ in range(40):
        length, size = 12 * members, 4
        documents, positions = random_tags(rng, length)
        stripes = [Tags(positions[m::members], documents[m::members]) for m in range(members)]
        start, count = 4 * int(rng.integers(0, 3)), int(rng.integers(1, size + 1))
        me, other = (int(x) for x in rng.integers(0, members, 2))
        queries = Tags(*(x[start : start + size].copy() for x in stripes[me]))
        queries.documents[count:] = -1
        keys = Tags(*(np.pad(x, (0, size), constant_values=-1) for x in stripes[other]))
        spans = find(queries.documents, keys.documents, jnp.int32(start), other > me, window=window)
        want = visible(Tags(*map(jnp.asarray, queries)), Tags(*map(jnp.asarray, keys)), window * members)
        np.testing.assert_array_equal(covered(spans, size, 12 + size, window), np.asarray(want).astype(int))
        assert not window or (spans.past is None and 0 <= int(spans.key_count.max()) <= size + window)


@pytest.mark.parametrize("known", [Known(False, False), Known(True, True), Known(False, True)], ids=str)
@pytest.mark.parametrize("members", [1, 3])
@pytest.mark.parametrize("window", [0, 3])
def test_spans_of_what_is_known_while_tracing_are_the_mask(known, members, window):
    """Chunks that begin their sequence, sequences of one document, or both; some chunks are padding alone."""
    rng, find = np.random.default_rng(members), jax.jit(find_spans, static_argnames=("window", "known"))
    met = set()
    for _ in range(20):
        length, size = 12 * members, 4
        documents, positions = random_tags(rng, length)
        if known.one_document:
            first, end = np.sort(rng.integers(0, length + 1, 2))
            positions[:] = np.arange(length)
            documents[:] = np.where((positions >= first) & (positions < end), 5, -1)
        stripes = [Tags(positions[m::members], documents[m::members]) for m in range(members)]
        start = 4 * int(rng.integers(0, 3)) if known.has_past else 0
        me, other = (int(x) for x in rng.integers(0, members, 2))
        queries = Tags(*(x[start : start + size] for x in stripes[me]))
        keys = Tags(*(np.pad(x, (0, size), constant_values=-1) for x in stripes[other]))
        spans = find(queries.documents, keys.documents, jnp.int32(start), other > me, window=window, known=known)
        want = visible(Tags(*map(jnp.asarray, queries)), Tags(*map(jnp.asarray, keys)), window * members)
        np.testing.assert_array_equal(covered(spans, size, 12 + size, window), np.asarray(want).astype(int))
        assert (spans.past is None) == (window > 0 or not known.has_past)
        assert spans.query_begin.shape == ((1,) if known.one_document else (size,))
        met.add(int(spans.num_documents))
    assert met == {0, 1} if known.one_document else max(met) > 1


def covered_in_blocks(spans, size, num_keys, block):
    mask = covered(spans._replace(num_documents=0), size, num_keys) + covered(spans.cut.triangles, size, num_keys)
    for number, rectangle in enumerate(zip(*map(np.asarray, spans.cut.rectangles), strict=True)):
        queries, begin, keys = map(int, rectangle)
        assert queries <= block and not (number == 0 and keys)
        mask[number * block : number * block + queries, begin : begin + keys] += 1
    for at, queries in np.stack(spans.cut.triangles[2:4], 1)[: int(spans.cut.triangles.num_documents)]:
        assert not queries or at // block == (at + queries - 1) // block, "a triangle is one of a block"
    return mask


@pytest.mark.parametrize("known", [Known(True, False, 3), Known(False, False, 2), Known(False, True, 3)], ids=str)
@pytest.mark.parametrize("members", [1, 3])
def test_blocks_of_queries_are_the_mask(known, members):
    """Blocks of a chunk of seven, of three or two queries; documents go on from block to block."""
    rng, find = np.random.default_rng(members), jax.jit(find_spans, static_argnames=("known",))
    met = np.zeros(2, int)
    for _ in range(60):
        length, size = 21 * members, 7
        documents, positions = random_tags(rng, length)
        if known.one_document:
            first, end = np.sort(rng.integers(0, length + 1, 2))
            positions[:], places = np.arange(length), np.arange(length)
            documents[:] = np.where((places >= first) & (places < end), 5, -1)
        stripes = [Tags(positions[m::members], documents[m::members]) for m in range(members)]
        start = 7 * int(rng.integers(0, 3)) if known.has_past else 0
        me, other = (int(x) for x in rng.integers(0, members, 2))
        queries = Tags(*(x[start : start + size] for x in stripes[me]))
        keys = Tags(*(np.pad(x, (0, size), constant_values=-1) for x in stripes[other]))
        spans = find(queries.documents, keys.documents, jnp.int32(start), other > me, known=known)
        want = visible(Tags(*map(jnp.asarray, queries)), Tags(*map(jnp.asarray, keys)))
        block = block_size(size, known.backward_queries)
        np.testing.assert_array_equal(covered_in_blocks(spans, size, 21 + size, block), np.asarray(want).astype(int))
        met += np.asarray(spans.cut.rectangles.keys).any(), int(spans.cut.triangles.num_documents) > 1
    assert (met > 5).all()


def test_a_short_chunk_and_a_window_are_not_cut():
    documents, known = jnp.zeros(8, jnp.int32), Known(backward_queries=4)

    def cut(queries, window=0):
        return jax.eval_shape(lambda: find_spans(documents[:queries], documents, 0, False, window, known)).cut

    assert cut(8) is not None and cut(8, window=3) is None and cut(4) is None
    assert [block_size(count, 8192) for count in (8192, 8193, 12288, 40960, 131072)] == [8192, 4097, 6144, 8192, 8192]
    assert block_size(40960, 0) == 40960


@pytest.mark.parametrize("members", [2, 4, 8])
def test_spans_of_dealt_documents_are_the_mask(members):
    rng, find = np.random.default_rng(members), jax.jit(find_team_spans)
    for _ in range(40):
        documents, positions, _ = deal(rng, members, 9, 0, members)
        tags = [Tags(*(x[m].astype(np.int32) for x in (positions, documents))) for m in range(members)]
        queries, keys = (tags[int(m)] for m in rng.integers(0, members, 2))
        spans = find(queries, keys)
        want = np.asarray(visible(Tags(*map(jnp.asarray, queries)), Tags(*map(jnp.asarray, keys))))
        np.testing.assert_array_equal(covered(spans, 9, 9), want.astype(int))
        # Each document is a call of the kernel, so none is listed that sees nothing.
        assert (np.asarray(spans.query_count[: spans.num_documents]) > 0).all()
        assert (np.asarray(spans.key_count[: spans.num_documents]) > 0).all()


@pytest.mark.parametrize("by", [-3, -1, 0, 2, 3])
def test_shifted_rows(by):
    x = np.arange(1, 7).reshape(2, 3)
    want = np.zeros_like(x)
    for row in range(3):
        if 0 <= row - by < 3:
            want[:, row] = x[:, row - by]
    np.testing.assert_array_equal(shift_rows(jnp.asarray(x), jnp.int32(by), 1), want)
