"""The quickstart with delta layers beside the dense one, and two more models that explain the gap between them.

    python -m bench.hybrid RUNS    train what is not in the folder RUNS yet, each run in a folder of its own

Runs are `sppo train configs/quickstart.yaml` with the settings of `MODELS`. A run that was stopped goes on. Results go
to results/hybrid_cpu.json and results/hybrid_cpu.md, and into docs/quickstart_hybrid.svg.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.figures import write
from sppo_jax.report.draw.axis import Axis
from sppo_jax.report.draw.chart import Panel, Series

ROOT = Path(__file__).parents[1]
CONFIG, RESULTS, PICTURE = (
    "configs/quickstart.yaml",
    ROOT / "bench" / "results",
    ROOT / "docs" / "quickstart_hybrid.svg",
)
_HYBRID = ("model.layers=2x(delta,full)", "model.mlp_size=250")
_WINDOWS = ("model.layers=2x(local,full)", "model.layer_types={local: {sliding_window: 8}}")
# Of each model its name in tables, its settings, and its seeds.
MODELS: dict[str, tuple[str, tuple[str, ...], tuple[int, ...]]] = {
    "dense": ("attention in all layers", (), (0, 1, 2)),
    "delta": ("2x(delta,full)", _HYBRID, (0, 1, 2)),
    "taps": ("2x(delta,full), no convolution", (*_HYBRID, "model.delta.taps=1"), (0,)),
    "local": (
        "2x(window of 8,full)",
        ("model.layers=2x(local,full)", "model.layer_types={local: {sliding_window: 8}}"),
        (0,),
    ),
}


def train(runs: Path, name: str, seed: int) -> None:
    """Train one model with a seed in a folder of `runs`; nothing where that is done."""
    folder = runs / f"{name}{seed}"
    if (folder / "finished").exists():
        return
    words = ["train", CONFIG, f"train.seed={seed}", *MODELS[name][1], "--run-dir", str(folder)]
    code = "import sys; from sppo_jax.cli import main; sys.exit(main(sys.argv[1:]))"
    subprocess.run([sys.executable, "-c", code, *words], cwd=ROOT, check=True)


def read(runs: Path) -> dict[str, Any]:
    """Return of each run its training losses by step and its validation loss."""
    found: dict[str, Any] = {}
    for name, (label, settings, seeds) in MODELS.items():
        of_seeds = []
        for seed in seeds:
            lines = (runs / f"{name}{seed}" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
            rows = [json.loads(line) for line in lines]
            losses = {row["step"]: round(row["loss"], 4) for row in rows if "loss" in row}
            validation = round(next(row["validation_loss"] for row in reversed(rows) if "validation_loss" in row), 4)
            of_seeds.append({"seed": seed, "losses": losses, "validation_loss": validation})
        found[name] = {"label": label, "settings": list(settings), "runs": of_seeds}
    return found


def picture(models: dict[str, Any]) -> list[Panel]:
    """Return a plot of training losses by step, one line a run; `models` is what the JSON holds."""
    series = []
    for color, model in enumerate(models.values()):
        for number, run in enumerate(model["runs"]):
            steps = [int(step) for step in run["losses"]]
            name = "" if number else model["label"]
            series.append(Series(name=name, x=steps, y=list(run["losses"].values()), color=color))
    x, y = Axis(label="step", low=0, whole=True), Axis(label="training loss, nats a byte")
    return [Panel(title="The quickstart's model, with and without delta layers", x=x, y=y, series=series)]


def table(report: dict[str, Any]) -> str:
    """Return the validation losses in Markdown."""
    lines = ["| layers | validation loss, nats a byte, by seed |", "|---|---|"]
    for model in report["models"].values():
        losses = (f"{run['validation_loss']:.3f}" for run in model["runs"])
        lines.append(f"| {model['label']} | {', '.join(losses)} |")
    return "\n".join([f"{report['date']}, {report['machine']}.", "", *lines, ""])


def write_results(models: dict[str, Any], out: Path, drawn: Path) -> None:
    """Write JSON, table and picture."""
    machine = f"{os.cpu_count()} CPU cores ({platform.machine()}), Python {platform.python_version()}"
    report = {"date": datetime.now(UTC).strftime("%Y-%m-%d"), "machine": machine, "models": models}
    out.mkdir(parents=True, exist_ok=True)
    (out / "hybrid_cpu.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    (out / "hybrid_cpu.md").write_text(table(report), encoding="utf-8")
    write(drawn, picture(models))


def main(words: Sequence[str]) -> int:
    """Train what is missing, and write what came out."""
    if len(words) != 1:
        print(__doc__)
        return 2
    runs = Path(words[0]).resolve()
    for name, (_, _, seeds) in MODELS.items():
        for seed in seeds:
            train(runs, name, seed)
    write_results(read(runs), RESULTS, PICTURE)
    print((RESULTS / "hybrid_cpu.md").read_text(encoding="utf-8"))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
