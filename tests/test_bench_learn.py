"""The page that teaches shows the stored run of its notebook's recipe."""

import json

import pytest

from bench import figures, learn
from bench.blocks import read_block

AGAIN = "write it again: python -m bench.learn; after a change of the recipe: python -m bench.learn --run"


@pytest.fixture(scope="module")
def stored():
    return json.loads(learn.STORED.read_text(encoding="utf-8"))


def test_the_tables_of_the_page_are_those_of_the_stored_run(stored):
    assert read_block(learn.PAGE, "right") == learn.table(stored), AGAIN
    assert read_block(learn.PAGE, "stages") == learn.stages(stored), AGAIN


def test_the_pictures_of_the_page_show_the_stored_run(stored):
    for path, panel in learn.panels(stored).items():
        svg = (learn.PAGE.parent / path).read_text(encoding="utf-8")
        assert figures.stored_digest(svg) == figures.digest([panel]), AGAIN


def test_the_stored_run_has_the_recipe_of_the_notebook(stored, tmp_path, monkeypatch):
    monkeypatch.setenv("SPPO_RUNS", str(tmp_path))
    names = {}
    for text in learn.cells(shown=False)[:2]:
        exec(text, names)
    assert json.loads(json.dumps(names["RECIPE"])) == stored["recipe"], AGAIN


def test_a_share_has_the_standard_error_of_independent_answers():
    assert learn.error(0.5, 100) == 0.05 and learn.error(1.0, 7) == 0.0


def test_a_run_keeps_what_the_cells_measured(monkeypatch):
    monkeypatch.setattr(learn, "cells", lambda shown: ["width = 2", "figures = {'right': {'a': width}}"])
    assert learn.run()["right"] == {"a": 2}
