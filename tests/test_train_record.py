"""The books of a run: whole lines, also where the disk is full for a while; a report that never stops the run."""

import json
import os
import resource
import signal
from pathlib import Path

import pytest
from tiny_runs import lines_of

from sppo_jax.config import load_config
from sppo_jax.processes.output import Output
from sppo_jax.train.metrics import record as module
from sppo_jax.train.metrics.record import Record

CONFIG = load_config(Path(__file__).parent.parent / "configs" / "quickstart.yaml")
LINE = {"loss": 1.0, "tokens_per_s": 1.0, "places_per_s": 1.0, "step_s": 1.0, "host_peak_bytes": 1}


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


def test_lines_go_on_where_the_run_does(tmp_path):
    record = Record(tmp_path, CONFIG, step=0)
    for step in (1, 2, 3):
        record.metrics({"step": step, **LINE})
    record.event("save", 3, "step 3: saving")
    record.finish("all done")
    record.close()
    (tmp_path / "events.jsonl").open("a").write('{"step": 3, "ki')
    again = Record(tmp_path, CONFIG, step=2)
    again.metrics({"step": 3, **LINE})
    again.event("resume", 2, "goes on")
    assert [line["step"] for line in lines_of(tmp_path)] == [1, 2, 3]
    assert [line["kind"] for line in lines_of(tmp_path, "events")] == ["save", "resume"]
    assert not (tmp_path / "finished").exists()


def test_a_full_disk_loses_no_line(tmp_path, monkeypatch):
    record = Record(tmp_path, CONFIG, step=0)
    record.metrics({"step": 1, **LINE})

    def full(path, line):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("sppo_jax.train.metrics.record._append_line", full)
        with pytest.warns(UserWarning, match="No space left on device.*retries"):
            record.metrics({"step": 2, **LINE})
        record.metrics({"step": 3, **LINE})
    record.metrics({"step": 4, **LINE})
    assert [line["step"] for line in lines_of(tmp_path)] == [1, 2, 3, 4]


def test_output_that_nobody_reads_is_an_event(tmp_path, monkeypatch, capsys):
    reader, writer = os.pipe()
    monkeypatch.setattr("sys.stdout", Output(None, writer, drops=True))
    record = Record(tmp_path, CONFIG, step=0)
    record.metrics({"step": 1, **LINE})
    os.close(reader)
    for step in (2, 3):
        record.metrics({"step": step, **LINE})
    record.event("save", 3, "step 3: saving")
    record.close()
    os.close(writer)
    warning, save = lines_of(tmp_path, "events")
    assert (warning["kind"], warning["step"], save["kind"]) == ("warning", 2, "save")
    assert "(Broken pipe): its lines are dropped, the run continues" in warning["text"]
    assert [line["step"] for line in lines_of(tmp_path)] == [1, 2, 3]
    assert capsys.readouterr().err == warning["text"] + "\n"


def test_half_a_line_is_taken_back(tmp_path):
    """A file that may not grow beyond so many bytes, as on a full disk."""
    path, before = tmp_path / "metrics.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    line = json.dumps({"step": 1, "text": "x" * 80}) + "\n"
    try:
        module._append_line(path, line)
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(line) + 20, before[1]))
        with pytest.raises(OSError):
            module._append_line(path, line)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.read_text() == line
    module._append_line(path, line)
    assert path.read_text() == line * 2
