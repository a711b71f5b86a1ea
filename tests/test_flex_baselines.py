"""What flexible teams are compared with: which documents lie where, and what more rows than a window cost."""

import numpy as np
import pytest
from flex_cases import KINDS, contents_of, draw_shape, draw_sizes, make_shape, pack

from bench.flex_counts import count_pairs
from sppo_jax.flex.baselines import baselines, per_batch, static
from sppo_jax.flex.contract import check_columns, far_cells
from sppo_jax.flex.placement import Pieces
from sppo_jax.flex.rows import write


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(4))
def test_every_way_keeps_the_rules_and_flex_is_the_fastest_that_fits(kind, seed):
    rng = np.random.default_rng([seed, KINDS.index(kind), 1])
    shape = draw_shape(rng)
    pieces = pack(draw_sizes(rng, kind, shape)[:200], shape, 0.9)
    found = baselines(pieces, shape)
    assert list(found) == ["static", "packed", "per_batch", "flex"]
    for name, way in found.items():
        assert way.name == name and sum(len(window.pieces) for window in way.windows) == len(pieces)
        assert len(way.windows) == -(-way.rows // shape.rows)
        for window in way.windows:
            batch = write(window, contents_of(window.pieces))
            check_columns(batch, shape, dealing=True)
            assert np.array_equal(window.attention, count_pairs(batch, shape))
            far, level = far_cells(batch["document_ids"], shape)
            assert np.array_equal(window.cells.far, far) and np.array_equal(window.cells.level, level)
            assert (batch["document_ids"] >= 0).sum() == window.pieces.size.sum()
    assert found["flex"].cost <= found["per_batch"].cost <= found["packed"].cost


def test_static_gives_every_document_the_members_of_the_longest():
    shape = make_shape(2, (64, 32), ring=4, stages=1)
    found = static(Pieces.packed([[30, 17, 16, 5], [1] * 3]), shape)
    # 30 tokens need 2 members of 16 slots; a chunk has two such blocks, the second chunk's hold 16 tokens.
    (window,) = found.windows
    assert window.degree.tolist() == [2] * 7 and found.rows == 2
    places = list(zip(window.row.tolist(), window.chunk.tolist(), window.member.tolist(), strict=True))
    assert places == [(0, 0, 0), (0, 0, 2), (0, 1, 0), (0, 1, 2), (1, 0, 0), (1, 0, 2), (1, 1, 0)]
    assert window.cost == found.cost


def test_static_over_all_members_begins_a_chunk_with_every_document():
    shape = make_shape(2, (64, 32), ring=4, stages=1)
    found = static(Pieces.packed([[90, 6], [33, 33]]), shape)
    first, second = found.windows
    assert first.begin.tolist() == [0, 0] and first.row.tolist() == [0, 1]
    # 6 tokens would fit behind 33 in the chunk, but a document is alone in its chunks.
    assert second.begin.tolist() == [0, 64] and second.row.tolist() == [0, 0] and found.rows == 3
    assert found.cost == first.cost + second.cost // 2


def test_a_batch_has_one_degree_or_all_members():
    shape = make_shape(2, (64, 64), ring=8, hidden=1)
    degrees = per_batch(Pieces.packed([[8] * 14, [8] * 14]), shape).degree
    # All three fit; the smallest sends nothing.
    assert set(degrees.tolist()) == {1}
    # One document needs all members, so all documents have them.
    assert set(per_batch(Pieces.packed([[100, 8, 8], [8] * 12]), shape).degree.tolist()) == {8}


def test_an_empty_window_costs_what_padding_costs():
    shape = make_shape(2, (64, 64))
    found = baselines(Pieces.packed([[], []]), shape)
    assert found["flex"].cost == found["packed"].cost > 0 and found["static"].rows == 1
    assert found["static"].cost == found["packed"].cost // 2
