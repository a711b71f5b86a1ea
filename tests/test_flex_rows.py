"""The arrays of a window: where each token lies, on which device, and what attention is counted from them."""

import jax
import numpy as np
import pytest
from flex_cases import contents_of, make_shape
from jax.sharding import AxisType, Mesh, NamedSharding

from bench.flex_counts import count_pairs
from sppo_jax.flex.cells import today
from sppo_jax.flex.placement import Pieces, Placement, bit_length, dealt_pairs
from sppo_jax.flex.rows import documents_of, indices, write, write_row
from sppo_jax.pipeline.params.layout import STRIPED


def placed(shape, sizes, **places) -> Placement:
    """Makes a placement in row 0 from lists."""
    n = len(sizes)
    given = {"chunk": [0] * n, "degree": [1] * n, "member": [0] * n, "offset": [0] * n, "begin": [-1] * n}
    given |= places
    arrays = {name: np.array(values, np.int64) for name, values in given.items()}
    return Placement(
        shape=shape, pieces=Pieces.packed([sizes]), row=np.zeros(n, np.int64), order=np.arange(n), **arrays
    )


@pytest.mark.parametrize(("ring", "ulysses"), [(8, 1), (1, 8), (4, 2), (2, 4)])
def test_columns_are_those_of_the_devices(ring, ulysses):
    shape = make_shape(1, (64,), ring=ring, ulysses=ulysses)
    mesh = Mesh(
        np.array(jax.devices()[:8]).reshape(1, 1, ring, ulysses),
        ("data", "pipe", "ring", "ulysses"),
        axis_types=(AxisType.Auto,) * 4,
    )
    # The last dim of a striped batch is the column.
    found = NamedSharding(mesh, STRIPED).devices_indices_map((1, 8, 8))
    columns = [found[device][2].start for device in jax.devices()[:8]]
    assert shape.columns.tolist() == columns
    assert shape.member_of[shape.columns].tolist() == list(range(8))
    assert ulysses > 1 and ring > 1 or columns == list(range(8))


def test_a_row_by_hand():
    shape = make_shape(1, (16, 8), ring=4, stages=1)
    placement = placed(
        shape,
        [5, 3, 2, 7],
        chunk=[0, 0, 0, 1],
        degree=[2, 1, 2, 4],
        member=[2, 0, 2, 0],
        offset=[1, 0, 0, 0],
        begin=[-1, -1, -1, 16],
    )
    batch = write(placement, contents_of(placement.pieces))
    # Slots run down, members across. Document 0 begins on member 2 + 1.
    assert batch["document_ids"][0].reshape(6, 4).tolist() == [
        [1, -1, 0, 0],
        [1, -1, 0, 0],
        [1, -1, 2, 0],
        [-1, -1, -1, 2],
        [3, 3, 3, 3],
        [3, 3, 3, -1],
    ]
    assert batch["positions"][0].reshape(6, 4)[:, 3].tolist() == [0, 2, 4, 1, 3, 0]
    assert batch["tokens"][0].reshape(6, 4)[:, 2].tolist() == [1, 3, 8, 0, 12, 16]
    assert batch["targets"][0].reshape(6, 4)[:, 2].tolist() == [2, 4, 9, -1, 13, 17]
    pairs = [[[6, 0, 2 + 4 + 1, 1 + 3 + 5 + 2], [1 + 5, 2 + 6, 3 + 7, 4]]]
    assert placement.attention.tolist() == pairs
    assert count_pairs(batch, shape).tolist() == pairs
    assert all(array.dtype == np.int32 for array in batch.values())


def test_a_hybrid_writes_members_in_the_order_of_its_columns():
    shape = make_shape(1, (16,), ring=2, ulysses=2, stages=1)
    batch = write(placed(shape, [4], degree=[2], member=[2]), contents_of(Pieces.packed([[4]])))
    # Members 2 and 3 are ring member 1: columns 1 and 3.
    assert batch["tokens"][0].reshape(4, 4)[:2].tolist() == [[0, 0, 0, 1], [0, 2, 0, 3]]
    assert batch["document_ids"][0].reshape(4, 4)[:2].tolist() == [[-1, 0, -1, 0], [-1, 0, -1, 0]]


def test_rows_as_they_are_come_out_as_they_are():
    shape = make_shape(2, (16, 16), ring=4)
    pieces = Pieces(np.array([0, 0, 1]), np.array([0, 9, 2]), np.array([5, 20, 30]))
    placement = today(pieces, shape)
    batch = write(placement, contents_of(pieces))
    for row in range(2):
        for piece, index in indices(placement, row):
            begin = pieces.begin[piece]
            assert np.array_equal(index, np.arange(begin, begin + pieces.size[piece]))
    assert batch["document_ids"][0, 5:9].tolist() == [-1] * 4
    assert documents_of(placement, 0).tolist() == [0, 1]
    assert np.array_equal(placement.attention, count_pairs(batch, shape))


def test_only_a_rows_own_documents_are_needed():
    shape = make_shape(2, (16, 16), ring=4)
    pieces = Pieces.packed([[5, 9], [3]])
    contents = contents_of(pieces)
    assert write_row(today(pieces, shape), 1, {2: contents[2]})["tokens"][:4].tolist() == [14, 15, 16, 0]


def test_pairs_count_by_position_whatever_the_first_position_is():
    shape = make_shape(1, (8,), ring=2, stages=1)
    batch = {
        "document_ids": np.array([[0, 0, 0, 5, 5, -1, -1, -1]]),
        "positions": np.array([[7, 9, 30, 1, 0, 0, 1, 2]]),
    }
    # The document 5 has its later token first: pairs follow positions, not places.
    assert count_pairs(batch, shape).tolist() == [[[1 + 3 + 1, 2 + 2]]]


@pytest.mark.parametrize("degree", [1, 2, 4, 8])
def test_pairs_of_dealt_runs(degree):
    rng = np.random.default_rng(degree)
    rank, count = rng.integers(0, 50, 40), rng.integers(0, 50, 40)
    found = dealt_pairs(rank, count, degree)
    for run in range(40):
        seen = rank[run] + 1 + np.arange(count[run])
        assert found[run].tolist() == [int(seen[first::degree].sum()) for first in range(degree)]


def test_bits():
    assert bit_length(np.array([0, 1, 2, 3, 4, 7, 8])).tolist() == [0, 1, 2, 2, 3, 3, 4]
