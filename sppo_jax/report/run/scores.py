"""Scores of `sppo eval --tasks` in reports: heat maps by depth and length, and several runs on one page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from sppo_jax.files.whole import parse_json
from sppo_jax.report.draw.page import page, table

# The file in a run directory, and the key of its entries.
FILE, SCORES = "scores.json", "scores"


@dataclass(frozen=True, kw_only=True)
class ScoresOfRun:
    """Entries of one file of scores.

    Args:
        name: of the run or the file.
        entries: by length.
    """

    name: str
    entries: tuple[Mapping[str, Any], ...]

    def of_task(self, task: str) -> dict[int, Mapping[str, Any]]:
        """Returns the last entry of a task at each length."""
        return {entry["length"]: entry for entry in self.entries if entry["task"] == task}


def scores_of_run(run_dir: Path) -> ScoresOfRun:
    """Returns the scores in a run directory; none where the file is missing or torn."""
    try:
        return read_scores(run_dir)
    except ValueError:
        return ScoresOfRun(name=run_dir.name, entries=())


def read_scores(path: Path) -> ScoresOfRun:
    """Reads the scores of a run directory, or of a file.

    Raises:
        ValueError: the file cannot be read, or is no file of scores.
    """
    file = path / FILE if path.is_dir() else path
    try:
        found = parse_json(file.read_text(encoding="utf-8"))
        entries = [entry for entry in found[SCORES] if _is_entry(entry)]
    except OSError as error:
        raise ValueError(
            f"a report of several runs must have their scores, got {file} ({error.strerror}); run sppo eval {path} "
            "--tasks needle"
        ) from None
    except (ValueError, KeyError, TypeError):
        raise other_content(file) from None
    ordered = sorted(entries, key=lambda entry: entry["length"])
    name = path.resolve().name if path.is_dir() else path.stem
    return ScoresOfRun(name=name, entries=tuple(ordered))


def other_content(path: Path) -> ValueError:
    """Returns the error of a file that holds no scores."""
    return ValueError(
        f"a file of scores must be one that sppo eval --tasks wrote, got {path} with other content; name another file"
    )


def _is_entry(entry: Any) -> bool:
    """Returns whether an entry has the figures of a report, as numbers."""
    return (
        isinstance(entry, Mapping)
        and isinstance(entry.get("task"), str)
        and all(isinstance(entry.get(name), int) and entry[name] > 0 for name in ("length", "samples"))
        and all(isinstance(entry.get(name), int | float) for name in ("share", "error"))
    )


def tasks_of(runs: Sequence[ScoresOfRun]) -> list[str]:
    """Returns the tasks of all runs, each once."""
    return list(dict.fromkeys(entry["task"] for run in runs for entry in run.entries))


def score_sections(run: ScoresOfRun) -> list[str]:
    """Returns the HTML of a run's scores: a table, and of each task with depths a heat map; nothing without scores."""
    if not run.entries:
        return []
    rows = [
        (entry["task"], f"{entry['length']:,}", *_figures(entry), f"{entry['samples']:,}")
        for task in tasks_of([run])
        for entry in run.of_task(task).values()
    ]
    header = ("task", "length", "right", "error", "nats", "samples")
    return ["<h2>Scores</h2>", table(header, rows, text=(0,)), *heat_maps([run])]


def heat_maps(runs: Sequence[ScoresOfRun]) -> list[str]:
    """Returns the HTML of a heat map for each run and task with depths: the share of hits by depth and length."""
    found = []
    for task in tasks_of(runs):
        for run in runs:
            columns = {length: entry for length, entry in run.of_task(task).items() if _cells(entry)}
            if columns:
                title = f"{task} by depth" + (f": {run.name}" if len(runs) > 1 else "")
                found += [f"<h3>{escape(title)}</h3>", _heat_map(columns)]
    return found


def _cells(entry: Mapping[str, Any]) -> dict[float, float]:
    """Returns the share of hits by depth."""
    cells = entry.get("depths")
    return {cell["depth"]: cell["hits"] / cell["samples"] for cell in cells} if isinstance(cells, list) else {}


def _heat_map(columns: Mapping[int, Mapping[str, Any]]) -> str:
    shares = {length: _cells(entry) for length, entry in columns.items()}
    depths = sorted({depth for cells in shares.values() for depth in cells})
    rows = [(f"{depth:.0%}", *(_cell(cells.get(depth)) for cells in shares.values())) for depth in depths]
    header = ("depth", *(f"{length:,}" for length in shares))
    return table(header, rows, raw=tuple(range(1, len(header))))


def _cell(share: float | None) -> str:
    """Returns a cell from red, none found, to green, all found."""
    if share is None:
        return ""
    look = f"background:hsl({round(120 * share)} 55% 62%);color:#111;padding:2px 12px;display:inline-block"
    return f"<span style='{look};min-width:44px;text-align:center'>{share:.0%}</span>"


def _figures(entry: Mapping[str, Any]) -> tuple[str, str, str]:
    nats = entry.get("nats")
    return f"{entry['share']:.1%}", f"{entry['error']:.1%}", f"{nats:.4f}" if isinstance(nats, int | float) else "-"


def compared_html(runs: Sequence[ScoresOfRun]) -> str:
    """Returns a page with the scores of several runs side by side."""
    alike = len({entry.get("tokenizer") for run in runs for entry in run.entries}) <= 1
    body = ["<h1>Scores of several runs</h1>"]
    if not alike:
        body.append(
            "<p class='note'>The models have different tokenizers: shares of right answers compare; nats do not, and "
            "are left out.</p>"
        )
    for task in tasks_of(runs):
        body += [f"<h2>{escape(task)}</h2>", _compared(task, runs, with_nats=alike)]
    return page("Scores of several runs", [*body, *heat_maps(runs)])


def _compared(task: str, runs: Sequence[ScoresOfRun], *, with_nats: bool) -> str:
    columns = [run.of_task(task) for run in runs]
    rows = []
    for length in sorted({length for column in columns for length in column}):
        cells = []
        for column in columns:
            entry = column.get(length)
            if entry is None:
                cells.append("-")
                continue
            share, error, nats = _figures(entry)
            cells.append(f"{share} +- {error}" + (f", {nats} nats" if with_nats else ""))
        rows.append((f"{length:,}", *cells))
    return table(("length", *(run.name for run in runs)), rows)


def compared_text(runs: Sequence[ScoresOfRun]) -> str:
    """Returns a line for each task, length and run."""
    width = max(len(run.name) for run in runs)
    lines = []
    for task in tasks_of(runs):
        for length in sorted({length for run in runs for length in run.of_task(task)}):
            for run in runs:
                if entry := run.of_task(task).get(length):
                    share, error, _ = _figures(entry)
                    lines.append(f"{task} at {length:,}  {run.name:<{width}}  {share:>6} +- {error}")
    return "\n".join(lines)
