"""The books of a run: its report is drawn with the first line, then now and then, and never stops the run."""

import json
from pathlib import Path

import pytest

from sppo_jax.config import load_config
from sppo_jax.train import record as module
from sppo_jax.train.record import Record

CONFIG = load_config(Path(__file__).parent.parent / "configs" / "quickstart.yaml")
LINE = {"loss": 1.0, "tokens_per_s": 1.0, "step_s": 1.0, "host_peak_bytes": 1}


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def test_the_report_is_drawn_with_the_first_line_and_then_each_minute(tmp_path, monkeypatch, clock):
    drawn = []
    monkeypatch.setattr(module, "write_report", lambda run_dir: drawn.append(clock[0]))
    record = Record(tmp_path, CONFIG, step=0)
    for step, now in enumerate((100, 101, 159, 161, 200, 222), start=1):
        clock[0] = now
        record.metrics({"step": step, **LINE})
    record.close()
    assert drawn == [100, 161, 222]
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").open()] == [1, 2, 3, 4, 5, 6]


def test_a_slow_report_is_drawn_less_often_and_one_that_fails_is_a_warning(tmp_path, monkeypatch, clock):
    drawn = []

    def slow(run_dir):
        drawn.append(clock[0])
        clock[0] += 2.0
        raise ValueError("no picture today")

    monkeypatch.setattr(module, "write_report", slow)
    record = Record(tmp_path, CONFIG, step=0)
    with pytest.warns(UserWarning, match="report.html was not written .no picture today."):
        for step, now in enumerate((100, 400, 1090, 1103), start=1):
            clock[0] = now
            record.metrics({"step": step, **LINE})
    record.close()
    assert drawn == [100, 1103]
