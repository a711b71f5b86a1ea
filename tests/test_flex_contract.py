"""Each rule of a rearranged row is checked: rows that break one are refused with that rule, in one line."""

import numpy as np
import pytest
from data_cases import make_corpus, stack
from flex_cases import make_shape

from sppo_jax.data.rows.packing import PackedRows
from sppo_jax.flex.contract import check_columns, far_cells

# Two chunks of 4 slots on 4 members: rows of the table are slots, columns members.
SHAPE = make_shape(1, (16, 16), ring=4, stages=1)
GOOD = [
    [0, 0, 1, 2],
    [0, 0, 1, 2],
    [0, 3, 1, -1],
    [-1, -1, 1, -1],
    [4, 4, 4, 4],
    [4, 4, -1, -1],
    [-1, -1, 5, 5],
    [5, 5, 5, -1],
]
PLACES = [
    [0, 1, 0, 0],
    [2, 3, 1, 1],
    [4, 0, 2, 0],
    [0, 0, 3, 0],
    [0, 1, 2, 3],
    [4, 5, 0, 0],
    [0, 0, 0, 1],
    [2, 3, 4, 0],
]


def batch_of(ids, places):
    return {"document_ids": np.array(ids, np.int32).reshape(1, -1), "positions": np.array(places).reshape(1, -1)}


def changed(table, changes):
    table = [list(row) for row in table]
    for (slot, member), value in changes.items():
        table[slot][member] = value
    return table


def test_a_good_row_passes_and_its_cells_are_known():
    check_columns(batch_of(GOOD, PLACES), SHAPE, dealing=True)
    far, level = far_cells(batch_of(GOOD, PLACES)["document_ids"], SHAPE)
    assert far.tolist() == [[False, True]] and level.tolist() == [[1, 0]]


BROKEN = {
    # rule: (document ids, positions, words)
    "ids fall in a column": ({(0, 0): 3, (1, 0): 3, (2, 0): 0}, {}, "rising document ids.*member 0 in chunk 0"),
    "positions fall in a column": ({}, {(1, 0): 4, (2, 0): 2}, "positions that rise.*member 0 in chunk 0"),
    "positions repeat in a column": ({}, {(2, 2): 1}, "positions that rise.*member 2 in chunk 0"),
    "ids fall between chunks": ({(0, 3): 6, (1, 3): 6}, {}, "rise from chunk to chunk, got 4 behind 6"),
    "a document on all members out of order": ({}, {(4, 0): 1, (4, 1): 0}, "natural order.*chunk 1"),
    "padding inside a document on all members": ({(4, 2): -1}, {}, "natural order.*padding within a document"),
    "a crossing document out of order": ({(4, 0): 3}, {(4, 0): 1}, "natural order, got.*chunk 0"),
    "padding before a document": ({(1, 2): -1}, {}, "padding of a team chunk.*chunk 0"),
    "not dealt cyclically": ({}, {(0, 1): 2, (1, 0): 1}, r"token 1 of document 0 on member 0 in chunk 0"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_rule_is_named(name):
    ids, places, words = BROKEN[name]
    batch = batch_of(changed(GOOD, ids), changed(PLACES, places))
    with pytest.raises(ValueError, match=words) as error:
        check_columns(batch, SHAPE, dealing=True)
    assert "\n" not in str(error.value) and "; " in str(error.value)


def test_dealing_is_checked_only_where_it_is_asked_for():
    ids, places, _ = BROKEN["not dealt cyclically"]
    check_columns(batch_of(changed(GOOD, ids), changed(PLACES, places)), SHAPE, dealing=False)


def test_a_document_with_a_token_a_member_may_lie_in_any_order():
    places = changed(PLACES, {(1, 0): 0, (1, 1): 0})
    ids = [[0, 0, 1, 2], [3, 3, 1, 2], *[list(row) for row in changed(GOOD, {(2, 0): -1, (2, 1): -1})[2:]]]
    places = changed(places, {(0, 0): 1, (0, 1): 0, (1, 0): 0, (1, 1): 1})
    check_columns(batch_of(ids, places), SHAPE, dealing=True)


@pytest.mark.parametrize("pack", ["whole", "stream", "none"])
@pytest.mark.parametrize("ring", [8, 4, 1])
def test_rows_of_today_pass(pack, ring):
    rows = PackedRows(make_corpus([1, 2, 3, 5, 7, 11, 30, 1, 1, 2] * 3), length=48, pack=pack)
    batch = stack([rows[row] for row in range(len(rows))])
    check_columns(batch, make_shape(1, (16, 32), ring=ring, ulysses=8 // ring, stages=1), dealing=True)


def test_rows_of_another_length_are_refused():
    with pytest.raises(ValueError, match=r"must be \[rows, 32\], got \[1, 28\]; give whole rows"):
        check_columns(batch_of(GOOD[1:], PLACES[1:]), SHAPE, dealing=False)
