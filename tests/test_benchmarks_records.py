"""The table of records: rows are what the planner finds today, and a small lead decides nothing."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import records  # noqa: E402
import records_compiled  # noqa: E402
import records_people  # noqa: E402
from blocks import read_block  # noqa: E402

STALE = "docs/records.md is stale: make it again with `python benchmarks/records.py --write`"
ROWS = {record.cell + record.theirs: record for record in records.THROUGHPUT}


@pytest.mark.parametrize("name", ["7B, 4M, 64 A800BurstEngine", "Qwen3-8B, 1M, 8 H100TRL", "7B, 1M, 8 A800MEMO"])
def test_throughput_is_todays(name):
    assert records.throughput_row(ROWS[name]) in read_block(records.PAGE, "records"), STALE


@pytest.mark.parametrize("cell", ["8B, 1 H200", "7B, 8 A800"])
def test_lengths_are_todays(cell):
    record = next(record for record in records.LENGTHS if record.cell == cell)
    assert records.length_row(record) in read_block(records.PAGE, "records"), STALE


def test_every_record_has_a_row_and_its_source():
    block = read_block(records.PAGE, "records")
    for record in (*records.THROUGHPUT, *records.LENGTHS):
        assert f"| {record.cell} | {record.theirs} |" in block and record.source in block, STALE
        assert "[V]" in record.source or "[C]" in record.source


def test_who_leads(monkeypatch):
    record = replace(ROWS["7B, 4M, 64 A800BurstEngine"], length=2**20)
    plan = records.search(record.config(), records.parse_cluster(record.cluster))
    ours = record.length / (64 * plan.plan.predicted.step_s)
    monkeypatch.setattr(records, "search", lambda *_: plan)
    leaders = {factor: records.throughput_row(replace(record, figure=ours * factor)) for factor in (0.5, 0.95, 1.05, 2)}
    assert "ours by 100%, if the plan holds" in leaders[0.5] and "BurstEngine by 100%" in leaders[2]
    assert "too close to say" in leaders[0.95] and "too close to say" in leaders[1.05]


def test_compiled_records_are_of_todays_results():
    block = read_block(records.PAGE, "compiled")
    assert records_compiled.report() == block, "docs/records.md is stale: python benchmarks/records_compiled.py --write"
    assert all(f"| {aim.theirs} |" in block for aim in records_compiled.AIMS)


PEOPLE = "docs/records.md is stale: make it again with `python benchmarks/records_people.py --write`"


@pytest.mark.parametrize("model", ["llama3-8b h100:1x8", "qwen3-8b h100:1x8", "qwen3-32b h100:2x8"])
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
    assert "X at 256K" in line and line.endswith("if the plan holds |")
    ours, theirs = (float(cell.strip().rstrip("%")) for cell in line.split("|") if cell.strip().endswith("%"))
    assert ours > 40 and theirs < 0.1
