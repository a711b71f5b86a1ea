"""Scores as text: a line for each task and length, and the share of hits by depth and length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Entry = Mapping[str, Any]


def scores_text(entries: Sequence[Entry]) -> str:
    """Returns a table of entries, and of each task with depths another."""
    width = max([*(len(str(entry["task"])) for entry in entries), 4])
    lines = [
        f"{'task':<{width}}  {'length':>9}  {'right':>7}  {'error':>6}  {'samples':>7}  {'nats':>7}  {'seconds':>8}"
    ]
    for entry in entries:
        lines.append(
            f"{entry['task']:<{width}}  {entry['length']:9,}  {entry['share']:7.1%}  {entry['error']:6.1%}  "
            f"{entry['samples']:7,}  {_figure(entry['nats'])}  {entry['seconds']:8.1f}"
        )
        if "acc_norm" in entry:
            lines.append(
                f"{'  by nats a byte':<{width}}  {'':>9}  {entry['acc_norm']:7.1%}  {entry['acc_norm_error']:6.1%}"
            )
    alone = {entry["task"]: entry["samples"] - entry["joined"] for entry in entries}
    lines += [
        f"{task}: answers encoded without their prompts, whose last token they would change: {count}"
        for task, count in alone.items()
        if count
    ]
    for task in dict.fromkeys(entry["task"] for entry in entries if "depths" in entry):
        lines += ["", *_depths(task, [entry for entry in entries if entry["task"] == task])]
    return "\n".join(lines)


def _figure(nats: float | None) -> str:
    return f"{nats:7.4f}" if nats is not None else f"{'-':>7}"


def _depths(task: str, entries: Sequence[Entry]) -> list[str]:
    """Returns the share of hits by depth and length of a task."""
    ordered = sorted(entries, key=lambda entry: entry["length"])
    lines = [f"{task} by depth" + "".join(f"  {entry['length']:>9,}" for entry in ordered)]
    cells = [{cell["depth"]: cell for cell in entry["depths"]} for entry in ordered]
    for depth in sorted({depth for column in cells for depth in column}):
        shown = [
            f"{column[depth]['hits'] / column[depth]['samples']:9.0%}" if depth in column else f"{'-':>9}"
            for column in cells
        ]
        lines.append("  ".join([f"{f'{depth:.1f}':>{len(task) + 9}}", *shown]))
    return lines
