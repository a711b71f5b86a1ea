"""`sppo plan` writes a trace, and shows on a terminal, and nowhere else, that a search takes long."""

import json
import sys
import time

import pytest
import yaml

from sppo_jax.cli import main
from sppo_jax.commands import plan

SETTINGS = {
    "model": {"vocab_size": 256, "hidden_size": 64, "num_layers": 4, "num_heads": 4, "mlp_size": 256},
    "mesh": {"pipe": 2},
    "sequence": {"length": 4096, "chunks": 4},
    "train": {"steps": 1},
    "hardware": {"cluster": "h100:1x2"},
}


@pytest.fixture
def config(tmp_path, monkeypatch):
    """A config in an empty working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(SETTINGS))
    return "small.yaml"


def shown(monkeypatch, capsys, *, is_terminal, search_s):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    monkeypatch.setattr(plan, "_MOMENT_S", 0.1)
    with plan._seconds_shown():
        time.sleep(search_s)
    captured = capsys.readouterr()
    assert not captured.out
    return captured.err


def test_a_long_search_shows_its_seconds_on_a_terminal(monkeypatch, capsys):
    assert shown(monkeypatch, capsys, is_terminal=True, search_s=0.5) == "\rsearching for a plan: 0 s\r\033[K"


@pytest.mark.parametrize(("is_terminal", "search_s"), [(False, 0.3), (True, 0.0)])
def test_nothing_is_shown_elsewhere_nor_for_a_moment(monkeypatch, capsys, is_terminal, search_s):
    assert shown(monkeypatch, capsys, is_terminal=is_terminal, search_s=search_s) == ""


def test_the_line_ends_where_a_search_fails(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(plan, "_MOMENT_S", 0.05)
    with pytest.raises(ValueError), plan._seconds_shown():
        time.sleep(0.3)
        raise ValueError
    assert capsys.readouterr().err.endswith("\r\033[K")


@pytest.mark.parametrize(("overrides", "code"), [((), 0), (("hardware.hbm_bytes=65536", "schedule.interleave=1"), 3)])
def test_a_trace_is_written_beside_the_text(config, tmp_path, capsys, overrides, code):
    assert main(["plan", config, *overrides, "--trace", "trace.json"]) == code
    assert "F0.0" in capsys.readouterr().out
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert sum(event.get("cat") == "forward" for event in events) == 2 * 4


@pytest.mark.parametrize(("file", "reason"), [(".", "it is a directory"), ("none/t.json", "there is no directory")])
def test_a_trace_that_cannot_be_written_is_one_line(config, tmp_path, capsys, monkeypatch, file, reason):
    monkeypatch.setattr(plan, "search", lambda _: pytest.fail("the file is checked first"))
    assert main(["plan", config, "--trace", file]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("--trace must name a file that can be written, got ") and reason in captured.err
    assert captured.err.count("\n") == 1 and captured.out == ""
    assert [path.name for path in tmp_path.iterdir()] == ["small.yaml"]
