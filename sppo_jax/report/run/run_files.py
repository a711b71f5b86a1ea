"""Reads a run directory; missing, torn and empty files leave gaps in the report and raise no error."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sppo_jax.config import Config, load_config
from sppo_jax.files.locks import try_lock
from sppo_jax.files.whole import parse_json
from sppo_jax.plan.plan import Plan

CONFIG, PLAN, METRICS, EVENTS, FINISHED = "config.yaml", "plan.json", "metrics.jsonl", "events.jsonl", "finished"
LOCK = "lock"

# So that a report of a long run is fast: of more lines than this every nth is read, and those with news.
_MOST_LINES = 6000
_NEWS = ('"validation_loss"', '"spike": true')


@dataclass(frozen=True, kw_only=True)
class RunData:
    """A run, as its files describe it.

    Args:
        run_dir: the directory.
        config: the settings; None if they cannot be read.
        config_text: the text of config.yaml.
        plan: the plan; None if it cannot be read.
        rows: lines of metrics.jsonl by rising step, each step once; of a long run a sample.
        events: lines of events.jsonl as they were written.
        notes: a sentence for each file or line that could not be read.
        finished: whether the run has marked itself as finished.
        age_s: seconds since the last line was written; infinite if there is no line.
        held: whether a process holds the lock of the run directory; None if this cannot be known here.
    """

    run_dir: Path
    config: Config | None
    config_text: str
    plan: Plan | None
    rows: Sequence[Mapping[str, Any]]
    events: Sequence[Mapping[str, Any]]
    notes: Sequence[str]
    finished: bool
    age_s: float
    held: bool | None

    @property
    def name(self) -> str:
        return self.run_dir.resolve().name


def read_run_dir(run_dir: Path) -> RunData:
    """Reads a run directory.

    Raises:
        ValueError: the directory is missing, holds no run, or has a file that may not be read.
    """
    if not run_dir.is_dir():
        what = "a file" if run_dir.exists() else "nothing there"
        raise ValueError(f"RUN_DIR must be a run directory, got {run_dir} ({what}); name one that sppo train wrote")
    if not any((run_dir / name).exists() for name in (CONFIG, PLAN, METRICS, EVENTS)):
        raise ValueError(
            f"a run directory must hold {CONFIG}, {PLAN} and {METRICS}, got {run_dir} with none of them; "
            "name a directory that sppo train wrote"
        )
    notes: list[str] = []
    config_text = _text(run_dir / CONFIG)
    rows = [_counted(row) for row in _lines(run_dir / METRICS, notes) if _step(row) is not None]
    events = [event for event in _lines(run_dir / EVENTS, notes) if isinstance(event.get("kind"), str)]
    return RunData(
        run_dir=run_dir,
        config=_config(run_dir / CONFIG, config_text, notes),
        config_text=config_text,
        plan=_plan(run_dir / PLAN, notes),
        rows=_without_repeats(rows),
        events=events,
        notes=notes,
        finished=(run_dir / FINISHED).exists(),
        age_s=_age_s(run_dir),
        held=_held(run_dir / LOCK),
    )


def number(row: Mapping[str, Any], key: str) -> float | None:
    """Returns a finite number of a line; None if the line has none."""
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # a whole number that no float holds
        return None


def _step(row: Mapping[str, Any]) -> int | None:
    step = row.get("step")
    return step if isinstance(step, int) and not isinstance(step, bool) and step >= 0 else None


def _counted(row: dict[str, Any]) -> dict[str, Any]:
    """Returns a line whose tokens are trained tokens: older versions wrote places under that name, and nothing else."""
    if "places_per_s" in row or "tokens_per_s" not in row:
        return row
    return {"places_per_s" if name == "tokens_per_s" else name: value for name, value in row.items()}


def _text(path: Path) -> str:
    """Returns a file's text; "" if there is no file.

    Raises:
        ValueError: the file exists and cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise ValueError(
            f"the files of a run must be readable, got {path} ({error.strerror}); correct or move the file"
        ) from None


def _lines(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    found, torn = [], 0
    for line in _sample([line for line in _text(path).split("\n") if line.strip()], path.name, notes):
        try:
            entry = parse_json(line)
        except ValueError:
            entry = None
        if isinstance(entry, dict):
            found.append(entry)
        else:
            torn += 1
    if torn:
        notes.append(f"{path.name} has {torn} {'line that is' if torn == 1 else 'lines that are'} torn and left out.")
    return found


def _sample(lines: list[str], name: str, notes: list[str]) -> list[str]:
    """Returns all lines; of very many, every nth line, the last, and lines with news."""
    nth = -(-len(lines) // _MOST_LINES)
    if nth < 2:
        return lines
    notes.append(f"{name} has {len(lines):,} lines: one in {nth} is shown, and each with a validation or spike.")
    return [
        line
        for index, line in enumerate(lines)
        if index % nth == 0 or index >= len(lines) - 30 or any(news in line for news in _NEWS)
    ]


def _without_repeats(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Drops the lines of steps that a resumed run repeated later."""
    kept: list[dict[str, Any]] = []
    for row in rows:
        while kept and kept[-1]["step"] >= row["step"]:
            kept.pop()
        kept.append(row)
    return kept


def _config(path: Path, text: str, notes: list[str]) -> Config | None:
    if not text:
        notes.append(f"There is no {path.name} yet, so the settings are not shown.")
        return None
    try:
        return load_config(path)
    except ValueError as error:
        notes.append(f"{path.name} cannot be read ({error}).")
        return None


def _plan(path: Path, notes: list[str]) -> Plan | None:
    text = _text(path)
    if not text:
        notes.append(f"There is no {path.name} yet, so the plan is not shown.")
        return None
    try:
        return Plan.from_json(text)
    except ValueError as error:
        notes.append(f"{path.name} cannot be read ({error}).")
        return None


def _age_s(run_dir: Path) -> float:
    times = [path.stat().st_mtime for path in (run_dir / METRICS, run_dir / EVENTS, run_dir / CONFIG) if path.exists()]
    return max(0.0, time.time() - max(times)) if times else math.inf


def _held(lock: Path) -> bool | None:
    """Returns whether a process holds the run's lock; None if it may be another host's, which is not seen here."""
    try:
        with lock.open(encoding="utf-8") as file:
            here = file.read().strip().endswith(f" on {socket.gethostname()}")
            locked = try_lock(file, shared=True)
    except (OSError, ValueError):
        return None
    if locked is False:
        return True
    return False if locked and here else None
