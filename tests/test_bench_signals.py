"""Runs that are signalled at random moments end in time, by the stated code, and saved once there is a step."""

import os
from dataclasses import replace

import pytest
from quick_flags import QUICK_XLA_FLAGS

from bench import signals


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """What is compiled once is not compiled by every run; the sweep leaves out jax's own variables."""
    code = f"""
import os
os.environ |= {{"JAX_COMPILATION_CACHE_DIR": {str(tmp_path / "compiled")!r}}}
os.environ |= {{"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}}
os.environ |= {{"XLA_FLAGS": {QUICK_XLA_FLAGS!r}}}
"""
    monkeypatch.setattr(signals, "_HOOK", code + signals._HOOK)


@pytest.mark.parametrize(
    "num_processes, num_signals",
    [
        pytest.param(1, 5, marks=pytest.mark.slow),
        pytest.param(1, 9, marks=pytest.mark.slow),
        pytest.param(2, 3, marks=pytest.mark.slow),
    ],
)
def test_runs_end_as_they_should(tmp_path, monkeypatch, cache, num_processes, num_signals):
    monkeypatch.setattr(signals, "LIMIT_S", 60.0)  # other tests share the cores
    (tmp_path / "runs").mkdir()
    ends = signals.sweep(
        tmp_path / "runs", num_signals=num_signals, num_processes=num_processes, seed=num_processes, jobs=2
    )
    assert [end for end in ends if end.problem] == []
    assert len(ends) == num_signals and {end.name for end in ends} == {"SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1"}
    assert ends[0].phase == "loop" and ends[0].code == 0 and ends[0].saved >= 1
    assert os.listdir(tmp_path / "runs" / "hook") and not (tmp_path / "runs" / "0").exists()
    assert signals.table(ends).count("\n") >= 2


SAVED = signals.End(
    name="SIGINT",
    tee=True,
    at_s=9.0,
    phase="loop",
    code=0,
    seconds=1.0,
    compile_s=0.0,
    before=3,
    step=4,
    saved=4,
    errors="",
)
EARLY = replace(SAVED, phase="data", code=130, before=0, step=0, saved=0)


@pytest.mark.parametrize(
    "end, problem",
    [
        (SAVED, ""),
        (EARLY, ""),
        (replace(EARLY, phase="compiling", seconds=40.0, compile_s=31.0), ""),
        (replace(EARLY, phase="loop"), ""),
        (replace(SAVED, phase="compiling", before=0, step=1, saved=1), ""),
        (replace(SAVED, saved=3), "step 4, saved 3"),
        (replace(SAVED, step=0, before=0, saved=0), "step 0, saved 0"),
        (replace(SAVED, code=1), "exit code 1"),
        (replace(SAVED, code=130), "exit code 130"),
        (replace(SAVED, code=-11), "exit code -11"),
        (replace(EARLY, code=0), "exit code 0"),
        (replace(EARLY, phase="start", code=-2, errors="Traceback (most recent call last)"), ""),
        (replace(EARLY, code=-2), "exit code -2"),
        (replace(EARLY, phase="loop", step=1), "step 1, saved 0"),
        (replace(EARLY, errors="Traceback (most recent call last)"), "a traceback"),
        (replace(EARLY, phase="compiling", seconds=42.0, compile_s=31.0), "42 s"),
    ],
)
def test_the_judge_sees_what_is_wrong(end, problem):
    assert end.problem == problem
