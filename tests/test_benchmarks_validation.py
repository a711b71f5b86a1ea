"""The generated blocks of docs/validation.md and its pictures are what the code makes today, byte for byte."""

import functools
import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import clock  # noqa: E402
import fit  # noqa: E402
import validation  # noqa: E402
from blocks import read_block  # noqa: E402

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "validation.md"
pytestmark = pytest.mark.xdist_group("validation")


@pytest.fixture(scope="module")
def made():
    blocks = validation.BLOCKS
    return functools.cache(lambda name: blocks[name]())


@pytest.mark.parametrize("name", validation.BLOCKS)
def test_block_and_pictures_are_of_todays_code(made, name):
    text, files = made(name)
    again = f"is stale: make it again with `{validation.COMMAND}`"
    assert read_block(PAGE, name) == text.strip(), f"the block {name!r} of docs/validation.md {again}"
    for path, content in files.items():
        assert (ROOT / path).read_text() == content + "\n", f"{path} {again}"


def test_every_block_of_the_page_is_made():
    page = PAGE.read_text()
    assert [page.count(f"<!-- begin {name} -->") for name in validation.BLOCKS] == [1] * len(validation.BLOCKS)
    assert page.count("<!-- begin ") == len(validation.BLOCKS)
    assert f"    {validation.COMMAND}\n" in page


def test_every_compiled_case_keeps_its_plan_and_the_block_shows_the_compilers_bytes(made):
    results = fit.load()
    assert all(row["plan"] for row in results["rows"])
    assert {row["name"] for row in results["rows"]} == {case.name for case in fit.CASES}
    changed = {**results, "rows": [dict(row) for row in results["rows"]]}
    changed["rows"][3]["compiler"] = {"hbm_bytes": 2**30, "host_bytes": 0}
    assert fit.block(fit.predicted_rows(changed), changed["jax"]) != made("fit")[0]


def test_the_clocks_block_shows_the_measured_seconds_and_todays_predictions(made):
    stored = json.loads((ROOT / "benchmarks" / "results" / "clock_cpu_2dev.json").read_text())
    slower = {**stored, "rows": [{**row, "measured_s": row["measured_s"] * 2} for row in stored["rows"]]}
    assert clock.block(clock.predicted_again(slower)) != made("clock")[0]
    forgotten = {**stored, "rows": [{**row, "predicted_s": 9.0} for row in stored["rows"]]}
    assert clock.block(clock.predicted_again(forgotten)) == made("clock")[0]


def test_a_choice_that_was_not_timed_is_named_and_another_case_is_refused():
    stored = json.loads((ROOT / "benchmarks" / "results" / "clock_cpu_2dev.json").read_text())
    rows = [{**row, "chunks": 7} if row["plan"] == clock.FREE else row for row in stored["rows"]]
    text = clock.block(clock.predicted_again({**stored, "rows": rows}))
    assert f"Today's {clock.FREE} is another Plan, which was not timed" in text
    assert "not timed" not in clock.block(clock.predicted_again(stored))
    rows = [{**row, "chunks": 7} for row in stored["rows"]]
    with pytest.raises(ValueError, match="run clock.py"):
        clock.predicted_again({**stored, "rows": rows})


def test_the_command_writes_blocks_and_pictures(made, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(validation, "DOCS", tmp_path / "docs")
    monkeypatch.setattr(validation, "HERE", tmp_path / "benchmarks")
    monkeypatch.setattr(validation, "BLOCKS", {name: functools.partial(made, name) for name in validation.BLOCKS})
    (tmp_path / "docs").mkdir()
    assert validation.main() == 0
    assert read_block(tmp_path / "docs" / "validation.md", "bubble") == made("bubble")[0].strip()
    assert (tmp_path / "docs" / "papers.svg").read_text() == (ROOT / "docs" / "papers.svg").read_text()
    assert capsys.readouterr().out.count("written") == len(validation.BLOCKS)
