"""The pages of bench/results/figures/ are what the code makes today, byte for byte; pictures show the data of today."""

import functools
import json
import re
import xml.etree.ElementTree as ElementTree

import pytest

from bench import clock, figures, fit, shipped, validation
from bench.blocks import FIGURES, ROOT, read_block
from sppo_jax.report.draw.axis import axis_ends

PICTURES = (
    "bench/results/figures/bubble.svg",
    "bench/results/figures/clock.svg",
    "bench/results/figures/papers.svg",
    "bench/results/records.svg",
    "docs/flexsp.svg",
    "docs/quickstart_hybrid.svg",
    "docs/recall.svg",
    "docs/recall_hybrid.svg",
    "docs/resume.svg",
)
pytestmark = pytest.mark.xdist_group("validation")


@pytest.fixture(scope="module")
def made():
    return functools.cache(lambda name: validation.BLOCKS[name]())


# Its searches take a minute; three of its rows are compared in CI.
SEARCHED = "shipped"
IN_CI = [name for name in validation.BLOCKS if name != SEARCHED]


@pytest.fixture(scope="module")
def pictures(made):
    found = validation.stored_pictures()
    for name in IN_CI:
        found |= made(name)[1]
    return found


AGAIN = f"is stale: make it again with `{validation.COMMAND}`"


@pytest.mark.parametrize("name", [*IN_CI, pytest.param(SEARCHED, marks=pytest.mark.slow)])
def test_block_is_of_todays_code(made, name):
    assert read_block(FIGURES / f"{name}.md", name) == made(name)[0].strip(), f"{name}.md {AGAIN}"


@pytest.mark.parametrize("name", ["llama3-8b-1gpu-80g", "olmo-3-7b-1gpu", "llama3-8b-1m-v5p-64"])
def test_rows_of_shipped_configs_are_of_todays_code(name):
    lines = read_block(FIGURES / "shipped.md", SEARCHED).splitlines()
    rows = [line for line in lines if line.startswith(f"| {name} | ")]
    assert rows[-1] == f"| {' | '.join(shipped.row(name, shipped.load().get(name)))} |", f"shipped.md {AGAIN}"


def test_the_block_with_searches_makes_no_picture(monkeypatch):
    monkeypatch.setattr(shipped, "block", str)
    assert validation.BLOCKS[SEARCHED]()[1] == {}


@pytest.mark.parametrize("name", PICTURES)
def test_stored_picture_shows_todays_data(pictures, name):
    svg = (ROOT / name).read_text()
    assert figures.stored_digest(svg) == figures.digest(pictures[name]), f"{name} {AGAIN}"
    assert len(svg) < 150_000


@pytest.mark.parametrize("name", PICTURES)
def test_stored_picture_has_all_labels_and_its_points_lie_inside_the_axes(pictures, name):
    root = ElementTree.fromstring((ROOT / name).read_text())
    texts = {element.text for element in root.iter("{http://www.w3.org/2000/svg}text")}
    for panel in pictures[name]:
        labels = [panel.title, panel.x.label, panel.y.label, *(rule.title for rule in panel.rules)]
        labels += [series.name for series in panel.series]
        assert {line for label in labels for line in label.splitlines()} <= texts
        for axis, values in (
            (panel.x, [value for series in panel.series for value in series.x]),
            (panel.y, [value for series in panel.series for value in series.y]),
        ):
            low, high = axis_ends(axis, values)
            assert low <= min(values) and max(values) <= high


def test_every_picture_of_points_is_made(pictures):
    assert sorted(pictures) == list(PICTURES)
    found = [path for folder in ("docs", "bench") for path in (ROOT / folder).rglob("*.svg")]
    found = [path for path in found if path.parent.name != "learn"]  # test_bench_learn draws these again
    drawn = [path.relative_to(ROOT).as_posix() for path in found if figures.stored_digest(path.read_text())]
    assert sorted(drawn) == list(PICTURES)


def test_every_page_of_figures_is_made():
    assert {path.stem for path in FIGURES.glob("*.md")} == set(validation.BLOCKS)
    assert all(path.read_text().count("<!-- begin ") == 1 for path in FIGURES.glob("*.md"))


def test_the_page_of_evidence_says_what_the_blocks_say():
    page = (ROOT / "docs" / "evidence.md").read_text()
    blocks = {name: " ".join(read_block(FIGURES / f"{name}.md", name).split()) for name in IN_CI}
    rows = re.findall(r"\| (held out[^|]*) \| (\d+) \| (\S+) \| (\S+) \| \S+ \| (\S+) \|", blocks["fit"])
    assert len(rows) == 2
    for _, _, median, worst, host in rows:
        assert f"median error {median}, worst {worst} on" in page and f"host bytes within {host}" in page
    calibrated, assumed, _ = re.findall(r"\*\*([\d.]+%)\*\*", blocks["papers"])[:3]
    assert f"mean error {calibrated} on the 60 cells" in page and f"{assumed} on 6 others" in page
    right, wrong, undecided = re.findall(r"\| cost model \| (\d+) \| (\d+) \| (\d+) \|", blocks["papers"])[0]
    assert f"{right} right, {wrong} wrong, {undecided} undecided" in page
    mean, worst = re.findall(r"nothing was fitted: \*\*([\d.]+%)\*\*, worst -(\d+)", blocks["kernels"])[0]
    assert f"mean error {mean}, worst {worst}%" in page
    rank, ratio = re.findall(r"over 30 Plans: \*\*([\d.]+)\*\*.*?takes \*\*([\d.]+)\*\* times", blocks["clock"])[0]
    assert f"rank correlation {rank}; the plan with the shortest predicted step takes {ratio} times" in page


def test_every_compiled_case_keeps_its_plan_and_the_block_shows_the_compilers_bytes(made):
    results = fit.load()
    assert all(row["plan"] for row in results["rows"])
    assert {row["name"] for row in results["rows"]} == {case.name for case in fit.CASES}
    changed = {**results, "rows": [dict(row) for row in results["rows"]]}
    changed["rows"][3]["compiler"] = {"hbm_bytes": 2**30, "host_bytes": 0}
    assert fit.block(fit.predicted_rows(changed), changed["jax"]) != made("fit")[0]


def test_the_clocks_block_shows_the_measured_seconds_and_todays_predictions(made):
    stored = json.loads((ROOT / "bench" / "results" / "clock_cpu_2dev.json").read_text())
    slower = {**stored, "rows": [{**row, "measured_s": row["measured_s"] * 2} for row in stored["rows"]]}
    assert clock.block(clock.predicted_again(slower)) != made("clock")[0]
    forgotten = {**stored, "rows": [{**row, "predicted_s": 9.0} for row in stored["rows"]]}
    assert clock.block(clock.predicted_again(forgotten)) == made("clock")[0]


def test_a_choice_that_was_not_timed_is_named_and_another_case_is_refused():
    stored = json.loads((ROOT / "bench" / "results" / "clock_cpu_2dev.json").read_text())
    rows = [{**row, "chunks": 7} if row["plan"] == clock.FREE else row for row in stored["rows"]]
    text = clock.block(clock.predicted_again({**stored, "rows": rows}))
    assert f"Today's {clock.FREE} is another Plan, which was not timed" in text
    assert "not timed" not in clock.block(clock.predicted_again(stored))
    rows = [{**row, "chunks": 7} for row in stored["rows"]]
    with pytest.raises(ValueError, match="run clock.py"):
        clock.predicted_again({**stored, "rows": rows})


def test_the_command_writes_blocks_and_pictures(made, pictures, tmp_path, monkeypatch, capsys):
    pages = tmp_path / FIGURES.relative_to(ROOT)
    monkeypatch.setattr(validation, "FIGURES", pages)
    monkeypatch.setattr(validation, "HERE", tmp_path / "bench")
    blocks = {name: functools.partial(made, name) for name in IN_CI}
    monkeypatch.setattr(validation, "BLOCKS", {**blocks, SEARCHED: lambda: ("rows", {})})
    monkeypatch.setattr(figures, "draw", figures.digest)
    for folder in (pages, tmp_path / "docs"):
        folder.mkdir(parents=True)
    assert validation.main() == 0
    assert read_block(pages / "bubble.md", "bubble") == made("bubble")[0].strip()
    for path, panels in pictures.items():
        assert (tmp_path / path).read_text() == figures.digest(panels)
    assert capsys.readouterr().out.count("written") == len(validation.BLOCKS) + len(PICTURES)
