"""Runs the notebook of docs/learn/from-256-to-2048-tokens.md at full size, and writes the figures of the page.

    python -m bench.learn --run     runs the notebook's cells, stores what they measured, and writes the page's figures
    python -m bench.learn           writes the page's figures again, from what is stored

The recipe and the pictures are those of examples/from-256-to-2048-tokens.ipynb: there is no second copy of them here.
The run leaves its checkpoints in runs/, and continues there if it was stopped. Results go to
bench/results/learn_cpu.json, with date and hardware.
"""

import argparse
import json
import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.blocks import ROOT, write_block
from bench.figures import write
from sppo_jax.report.draw.chart import Panel

NOTEBOOK = ROOT / "examples" / "from-256-to-2048-tokens.ipynb"
STORED = ROOT / "bench" / "results" / "learn_cpu.json"
PAGE = ROOT / "docs" / "learn" / "from-256-to-2048-tokens.md"
# Pictures by file, and the function of the notebook that makes each.
PICTURES = {"by_distance.svg": "by_distance", "while_training.svg": "while_training"}


def cells(*, shown: bool) -> list[str]:
    """Returns the notebook's cells of code: all, or without those that display."""
    found = [cell for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    texts = ["".join(cell["source"]) for cell in found]
    return [text for text in texts if shown or "IPython" not in text]


def run() -> dict[str, Any]:
    """Runs the notebook's cells in this process; returns its figures, with date and hardware."""
    names: dict[str, Any] = {}
    for text in cells(shown=False):
        exec(compile(text, str(NOTEBOOK), "exec"), names)
    machine = f"{os.cpu_count()} CPU cores ({platform.machine()}), Python {platform.python_version()}"
    return {"date": datetime.now(UTC).isoformat(timespec="seconds"), "machine": machine, **names["figures"]}


def panels(figures: dict[str, Any]) -> dict[str, Panel]:
    """Returns the charts of the page by file, drawn by the notebook's functions."""
    (text,) = [text for text in cells(shown=True) if "def by_distance" in text]
    names: dict[str, Any] = {}
    exec("from sppo_jax.report.draw.axis import Axis\nfrom sppo_jax.report.draw.chart import *", names)
    exec(compile(text, str(NOTEBOOK), "exec"), names)
    return {path: names[function](figures) for path, function in PICTURES.items()}


def error(share: float, count: int) -> float:
    """Returns the standard error of a share of `count` answers."""
    return (share * (1 - share) / count) ** 0.5


def table(figures: dict[str, Any]) -> str:
    """Returns the right answers by distance of each model, in Markdown."""
    right = figures["right"]
    head = ["tokens back", *right, "answers"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in zip(*right.values(), strict=True):
        shares = [f"{each['accuracy']:.0%} +- {error(each['accuracy'], each['num_targets']):.0%}" for each in row]
        lines.append(f"| {row[0]['distance']:,} | {' | '.join(shares)} | {row[0]['num_targets']} |")
    return "\n".join(lines)


def stages(figures: dict[str, Any]) -> str:
    """Returns steps, CPU time and the last training figure of each stage, in Markdown."""
    lines = ["| stage | steps | CPU seconds | right answers in training, at its end |", "|---|---|---|---|"]
    for name, points in figures["curves"].items():
        length = int(name.removeprefix("at-"))
        step, share = points[-1]
        lines.append(f"| {length:,} tokens | {step} | {figures['cpu_s'][name]:.0f} | {share:.0%} |")
    total_s = sum(figures["cpu_s"].values())
    lines += ["", f"{total_s / 60:.0f} minutes of CPU time in all, on {figures['machine']} ({figures['date'][:10]})."]
    return "\n".join(lines)


def write_page(figures: dict[str, Any]) -> None:
    """Writes the page's generated blocks and its pictures."""
    write_block(PAGE, "right", table(figures))
    write_block(PAGE, "stages", stages(figures))
    for path, panel in panels(figures).items():
        write(PAGE.parent / path, [panel])


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the notebook if asked, and writes the page's figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--run", action="store_true", help="measure first; about ten minutes of CPU time")
    if parser.parse_args(arguments).run:
        STORED.write_text(json.dumps(run(), indent=1) + "\n", encoding="utf-8")
    write_page(json.loads(Path(STORED).read_text(encoding="utf-8")))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
