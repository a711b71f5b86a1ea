"""The report on teams: cells, levels and shares by hand on small windows."""

import dataclasses

import numpy as np
import pytest
from flex_cases import draw_shape, draw_sizes, make_shape, pack

from sppo_jax.flex.baselines import baselines
from sppo_jax.flex.cells import plan_cells, today
from sppo_jax.flex.placement import Pieces
from sppo_jax.report.flex.cells import CellFigures, cells_of
from sppo_jax.report.flex.figures import TeamFigures
from sppo_jax.report.flex.text import _runs, _some, teams_text


def figures(pieces, shape):
    """Figures of one window without a plan; what needs the plan's costs is not there."""
    return TeamFigures(
        plan=None,
        model=None,
        cluster=None,
        costs=None,
        shape=shape,
        source="by hand",
        windows=(pieces,),
        placed=(baselines(pieces, shape),),
    )


def cell(**changes):
    empty = CellFigures(
        row=0,
        chunk=0,
        stream=False,
        level=0,
        groups=(),
        documents=0,
        tokens=0,
        slots=64,
        attention_max=0,
        attention_mean=0.0,
    )
    return dataclasses.replace(empty, **changes)


@pytest.mark.parametrize("seed", range(30))
def test_cells_hold_every_document_and_token_of_any_window(seed):
    rng = np.random.default_rng(seed)
    shape = draw_shape(rng)
    pieces = pack(draw_sizes(rng, ["tail", "uniform", "short", "one long"][seed % 4], shape), shape, fill=0.9)
    for placement in (plan_cells(pieces, shape), today(pieces, shape)):
        found = cells_of(placement)
        assert len(found) == shape.rows * shape.num_chunks
        assert sum(each.tokens for each in found) == pieces.size.sum()
        assert sum(each.slots for each in found) == shape.rows * shape.length
        in_one_cell = np.bincount(placement.segments.piece, minlength=len(pieces)) <= 1
        assert sum(each.documents for each in found) >= in_one_cell.sum()
        for each in found:
            blocks = sum(degree * count for degree, count, _ in each.groups)
            assert not (each.stream and each.groups) and blocks <= 2 * shape.members * shape.levels
            assert each.attention_max >= each.attention_mean
            assert "document" in teams_text(each) or "natural order" in teams_text(each) or not each.documents


def test_levels_are_those_that_ticks_execute():
    for seed in range(10):
        rng = np.random.default_rng(seed)
        shape = draw_shape(rng)
        shown = figures(pack(draw_sizes(rng, "tail", shape), shape, fill=0.8), shape)
        executed = shown.first.exchanges[shape.ops != "H"].tolist()
        levels = shown.levels()
        assert len(levels) == len(executed)
        for (kind, level), number in zip(levels, executed, strict=True):
            assert kind in "FB" and (level in "SM" if number == shape.levels else int(level, 16) == number)


def test_a_document_of_a_whole_row_is_long_and_stays_on_all_members():
    shape = make_shape(2, (64, 64), ring=4)
    shown = figures(Pieces.packed([[128], [128]]), shape)
    assert shown.long_share == shown.stream_share == 1 and shown.fill == 1
    assert not shown.helps and shown.gain["packed"] == 1 and {level for _, level in shown.levels()} == {"S"}
    assert 0 < shown.exchange_share < 1
    assert "too long for half of the 4 members of a chunk" in shown.why()
    # The first chunk has a third of the pairs of the second: even attention would take less.
    assert shown.uneven_share > 0


def test_free_exchange_leaves_only_what_is_uneven():
    shape = make_shape(2, (64, 64), ring=4)
    weights = dataclasses.replace(
        shape.weights,
        forward=dataclasses.replace(shape.weights.forward, stream=(0, 0)),
        backward=dataclasses.replace(shape.weights.backward, stream=(0, 0)),
    )
    shown = figures(Pieces.packed([[128], [128]]), dataclasses.replace(shape, weights=weights))
    assert shown.exchange_share == 0 and shown.uneven_share > 0


def test_teams_in_words():
    assert teams_text(cell()) == "empty"
    assert teams_text(cell(stream=True, documents=1)) == "stream: 1 document"
    in_teams = cell(groups=((4, 1, 1), (1, 3, 7)), documents=9)
    assert teams_text(in_teams) == "1 x 4: 1 document, 3 x 1: 7, in natural order: 1"


def test_shown_cells_are_of_each_level_and_in_order():
    cells = [cell(row=number, level=int(number == 50), stream=number in (3, 70)) for number in range(100)]
    shown = _some(cells, 16)
    assert len(shown) == 16 and [each.row for each in shown] == sorted(each.row for each in shown)
    assert {3, 50, 70} <= {each.row for each in shown} and _some(cells[:16], 16) == cells[:16]


def test_runs_of_levels():
    assert _runs("SSS00M") == "3 x S, 2 x 0, 1 x M"
    assert _runs("01" * 30).endswith("20 more runs; --json has all")
