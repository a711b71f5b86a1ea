"""The table of records: rows are what the planner finds today, and a small lead decides nothing."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.blocks import read_block
from studies import records, records_compiled, records_people, records_picture, records_planned

STALE = "bench/results/records.md is stale: make it again with `python -m studies.records --write`"
ROWS = {record.cell + record.theirs: record for record in records_planned.THROUGHPUT}


@pytest.mark.parametrize(
    "name",
    [
        "7B, 4M, 64 A800BurstEngine",
        pytest.param("Qwen3-8B, 1M, 8 H100TRL", marks=pytest.mark.slow),
        "7B, 1M, 8 A800MEMO",
    ],
)
def test_throughput_is_todays(name):
    assert records_planned.throughput_row(ROWS[name]) in read_block(records.PAGE, "records"), STALE


def assert_row_of_length(cell, monkeypatch):
    record = next(record for record in records_planned.LENGTHS if record.cell == cell)
    monkeypatch.setattr(records_planned, "stopped_by", lambda *_: "STOPS")  # takes half a minute
    before, _, after = records_planned.length_row(record).partition("STOPS")
    rows = read_block(records_planned.PAGE, "records").splitlines()
    assert after and any(row.startswith(before) and row.endswith(after) for row in rows), STALE


@pytest.mark.slow
@pytest.mark.parametrize("cell", ["8B, 1 H200", "7B, 8 A800"])
def test_lengths_are_todays(cell, monkeypatch):
    assert_row_of_length(cell, monkeypatch)


@pytest.mark.slow
def test_a_length_of_the_page_fits_today_and_the_next_one_does_not(monkeypatch):
    """Two searches instead of the nine of the whole row, which is a slow test."""

    def max_length(config, cluster):
        fits = []
        for size in (7_077_888, 7_340_032):  # a sixteenth of 4M apart
            fits.append(
                records_planned.search(replace(config, sequence=replace(config.sequence, length=size)), cluster).fits
            )
        assert fits == [True, False], STALE
        return SimpleNamespace(best=SimpleNamespace(size=7_077_888), stopped=SimpleNamespace(size=7_340_032))

    monkeypatch.setattr(records_planned, "max_length", max_length)
    assert_row_of_length("7B, 8 A800", monkeypatch)


def test_every_record_has_a_row_and_its_source():
    block = read_block(records.PAGE, "records")
    for record in (*records_planned.THROUGHPUT, *records_planned.LENGTHS):
        assert f"| {record.cell} | {record.theirs} |" in block and record.source in block, STALE
        assert "[V]" in record.source or "[C]" in record.source


def test_who_leads(monkeypatch):
    record = replace(ROWS["7B, 4M, 64 A800BurstEngine"], length=2**20)
    plan = records_planned.search(record.config(), records_planned.parse_cluster(record.cluster))
    ours = record.length / (64 * plan.plan.predicted.step_s)
    monkeypatch.setattr(records_planned, "search", lambda *_: plan)
    leaders = {
        factor: records_planned.throughput_row(replace(record, figure=ours * factor)) for factor in (0.5, 0.95, 1.05, 2)
    }
    assert "ours by 100% (predicted)" in leaders[0.5] and "BurstEngine by 100%" in leaders[2]
    assert "too close to say" in leaders[0.95] and "too close to say" in leaders[1.05]


def test_one_command_writes_all_blocks_and_the_picture(monkeypatch, tmp_path):
    page = tmp_path / "records.md"
    monkeypatch.setattr(records, "PAGE", page)
    monkeypatch.setattr(records, "BLOCKS", {name: lambda name=name: f"of {name}" for name in records.BLOCKS})
    monkeypatch.setattr(records.figures, "draw", records.figures.digest)
    assert records.main([]) == 0 and not page.exists()
    assert records.main(["--write"]) == 0
    assert [read_block(page, name) for name in records.BLOCKS] == ["of compiled", "of people", "of records"]
    assert (tmp_path / "records.svg").read_text() == records.figures.digest(records_picture.picture())
    stored = Path(records_planned.PAGE).read_text()
    assert all(f"<!-- begin {name} -->" in stored for name in records.BLOCKS) and "(records.svg)" in stored


def test_the_picture_has_every_compiled_length_and_every_record_of_its_models():
    points = records_picture.points()
    shown = {(round(series.y[0], 2)) for panel in records_picture.picture() for series in panel.series}
    assert sum(point.system == "compiled here" for point in points) == len(records_compiled.AIMS)
    assert sum(len(series.x) for panel in records_picture.picture() for series in panel.series) == len(points) == 18
    assert {7.0, 2.1, 5.24} & shown and ("llama3-8b", "UPipe", 8, 5 * 2**20) in {
        tuple(vars(one).values()) for one in points
    }


def test_what_stops_a_longer_sequence_is_what_helps(monkeypatch):
    record = records_planned.LENGTHS[0]
    cluster, bound = records_planned.parse_cluster(record.cluster), SimpleNamespace(stopped=SimpleNamespace(size=2**23))
    assert records_planned.stopped_by(record, SimpleNamespace(stopped=None)) == "no tried length failed"

    def searched(needs_hbm, needs_host):
        def search(config, larger):
            assert config.sequence.length == 2**23
            hbm = larger.device.hbm_bytes / cluster.device.hbm_bytes
            return SimpleNamespace(fits=hbm >= needs_hbm and larger.host_bytes / cluster.host_bytes >= needs_host)

        return search

    for needs, words in {
        (2, 1): "limit: HBM",
        (1, 2): "limit: host memory",
        (1, 1): "limit: either HBM or host memory",
        (2, 2): "limit: HBM and host memory",
    }.items():
        monkeypatch.setattr(records_planned, "search", searched(*needs))
        assert records_planned.stopped_by(record, bound) == words


def test_the_holders_of_memory_add_up():
    """Each row of the second table has the bytes of the plan."""
    block = read_block(records_planned.PAGE, "compiled")
    rows = [line for line in block.splitlines() if line.startswith("| ")]
    first, second = rows[1 : 1 + len(records_compiled.AIMS)], rows[-len(records_compiled.AIMS) :]
    for compiled, held in zip(first, second, strict=True):
        sizes = [float(cell) for cell in held.split("|")[4:13]]
        hbm, off = (float(compiled.split("|")[place].split()[0].rstrip("%")) for place in (6, 8))
        assert abs(sum(sizes[:5]) / hbm - 1 - off / 100) < 0.01
        assert abs(sum(sizes[5:]) - sum(float(compiled.split("|")[place].split()[0]) for place in (9, 10))) < 1.5


def test_compiled_records_are_of_todays_results():
    block = read_block(records.PAGE, "compiled")
    assert records_compiled.report() == block, "records.md is stale: python -m studies.records_compiled --write"
    assert all(f"| {aim.theirs} |" in block for aim in records_compiled.AIMS)


PEOPLE = "bench/results/records.md is stale: make it again with `python -m studies.records_people --write`"


@pytest.mark.parametrize(
    "model",
    [
        "qwen3-8b h100:1x8",
        *(pytest.param(model, marks=pytest.mark.slow) for model in ("llama3-8b h100:1x8", "qwen3-32b h100:2x8")),
    ],
)
def test_what_people_run_is_todays(model):
    block = read_block(records_people.PAGE, "people")
    assert records_people.assumed().strip() in block, PEOPLE
    for setting in records_people.SETTINGS:
        if f"{setting.model} {setting.cluster}" == model:
            assert records_people.row(setting) in block, PEOPLE


def test_what_people_run_has_every_setting():
    lines = [line for line in read_block(records_people.PAGE, "people").splitlines() if line.startswith("| ")]
    assert len(lines) == 1 + len(records_people.SETTINGS), PEOPLE
    asked = {(size, gpus, length) for size in ("8b", "32b") for gpus in ("1", "8") for length in ("128K", "256K", "1M")}
    cells = [[cell.strip() for cell in line.split("|")[1:4]] for line in lines]
    assert asked <= {(model.rpartition("-")[2], gpus, tokens) for model, gpus, tokens in cells}
    assert len({line.count("|") for line in lines}) == 1


def test_mfu_is_compared_where_lengths_differ():
    twice = records_people.Run(system="X", tokens_s=1.0, length=2**18)
    setting = records_people.Setting(model="llama3-8b", cluster="h100:1x1", length=2**17, theirs=twice)
    line = records_people.row(setting)
    assert "X at 256K" in line and line.endswith("(predicted) |")
    ours, theirs = (float(cell.strip().rstrip("%")) for cell in line.split("|") if cell.strip().endswith("%"))
    assert ours == pytest.approx(41.4, abs=0.05) and theirs < 0.1
