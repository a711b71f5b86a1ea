"""The table and the picture of docs/flexsp.md: of today's code, and every document in a box of its own area."""

import json
from pathlib import Path

import numpy as np
import pytest

from bench import figures
from bench.blocks import read_block
from studies import groups

ROOT = Path(__file__).parents[1]
PAGE = groups.DOCS / "flexsp.md"
AGAIN = "is stale: make it again with `python -m studies.groups --write`"


@pytest.fixture(scope="module")
def found():
    return groups.simulated(groups.PICTURE, length=16384, rows=4, chunks=2)


def test_a_row_of_the_block_is_of_todays_code():
    assert groups.row_of(groups.SETTINGS[0], groups.simulated(groups.SETTINGS[0])) in read_block(PAGE, "groups"), AGAIN


@pytest.mark.slow
def test_the_block_is_of_todays_code():
    assert read_block(PAGE, "groups") == groups.report(), AGAIN


def test_the_picture_shows_todays_data(found):
    stored = figures.stored_digest((groups.DOCS / "flexsp.svg").read_text())
    assert stored == figures.digest(groups.picture(found)), AGAIN


def test_each_document_has_a_box_as_wide_as_its_team(found):
    placement = found.first
    boxes = [box for row in range(4) for box in groups._boxes(placement, row)]
    assert len(boxes) >= len(placement.pieces)
    area = sum((right - left) * (high - low) for left, right, low, high, _ in boxes)
    assert area == pytest.approx(placement.pieces.size.sum(), abs=len(boxes))
    assert all(right - left == degree for left, right, _, _, degree in boxes)
    # All kinds of chunks are in the picture.
    assert {degree for *_, degree in boxes} == {1, 2, 4, 8}


def test_boxes_of_one_member_do_not_overlap(found):
    for row in range(4):
        covered = np.zeros((16, 2 * 1024))
        for left, right, low, high, _ in groups._boxes(found.first, row):
            covered[int(left) : int(right), round(low) : round(high)] += 1
        # A slot of rounding at either end of a box.
        assert (covered > 1).sum() <= 2 * len(groups._boxes(found.first, row)) * 4


def test_the_table_of_flexsps_problem_is_that_of_the_stored_result():
    rows = json.loads((ROOT / "studies" / "results" / "flexsp.json").read_text())["cells"]["rows"]
    page = (ROOT / "studies" / "README.md").read_text()
    for row in rows:
        if row["corpus"] == "wikipedia":
            name = f"{row['model'].upper()}, {row['max_kilotokens']}K"
            assert f"| {name} | {row['gain']:.2f} | {row['gain_unbounded']:.2f} | {row['published']:.2f} |" in page
    page = (ROOT / "bench" / "README.md").read_text()
    measured = json.loads((ROOT / "bench" / "results" / "flex.json").read_text())["measured"]["cases"]
    for case in measured.values():
        assert f"| 1 | {case['rows']['per_batch']['cpu_ratio_to_packed']:.2f} | " in page
        assert f" | {case['rows']['flex']['cpu_ratio_to_packed']:.2f} | " in page
