"""Rows of the stash on the host: one of each forward tick, free again after its backward."""

import pytest

from sppo_jax.program.host_rows import host_rows
from sppo_jax.schedule.generators import make_table
from sppo_jax.schedule.outline import make_outline

TABLES = {
    "one-stage": ("sppo", 1, 3, (8, 8, 8)),
    "sppo": ("sppo", 3, 2, (8,) * 5),
    "few-chunks": ("sppo", 4, 2, (8,) * 2),
    "breadth-first": ("breadth-first", 2, 2, (8,) * 3, 4),
    "wave": ("sppo", 3, 4, (8,) * 4, 1, 2),
}


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("every", [1, 3])
def test_a_row_holds_one_stash_from_its_forward_to_its_backward(name, every):
    table = make_table(*TABLES[name])
    of_bundle = [bundle % every for bundle in range(max(table.diagonal_bundles) + 1)]
    classes = [None if bundle is None else of_bundle[bundle] for bundle in table.tick_bundles]
    rows, held = host_rows(table, classes), {}
    for index, tick in enumerate(table.ticks):
        units = {unit[1:] for unit in tick.units if unit is not None}
        place = (classes[index], rows.get(index))
        if tick.op == "F":
            assert place not in held
            held[place] = units
        elif tick.op == "B":
            assert held.pop(place) == units
    assert not held
    most = {made: 2 for made in of_bundle}
    for index, row in rows.items():
        most[classes[index]] = max(most[classes[index]], row + 1)
    assert dict(enumerate(table.host_rows(of_bundle))) == most
    outline = make_outline(*TABLES[name])
    assert dict(enumerate(outline.host_rows(of_bundle))) == most


def test_ticks_that_mix_sequences_have_rows_by_stage():
    table = make_table("seq1f1b", 2, 4, (8,) * 4)
    of_bundle = [0] * (max(table.diagonal_bundles) + 1)
    assert host_rows(table, [None if bundle is None else 0 for bundle in table.tick_bundles]) is None
    assert table.host_rows(of_bundle) == [count + 1 for count in table.stash_peaks(of_bundle)]


def test_rows_of_one_sequence_are_a_line_forward_and_back():
    table = make_table("sppo", 3, 1, (8,) * 6)
    rows = host_rows(table, [None if bundle is None else 0 for bundle in table.tick_bundles])
    forward, backward = ([rows[i] for i, tick in enumerate(table.ticks) if tick.op == op] for op in "FB")
    assert forward == list(range(8)) == backward[::-1]
