"""Stop a run on one mesh and go on with it on another: the losses must be those of a run that was never stopped.

    python -m bench.resume      # about 10 minutes on 2 cores; writes results/resume.json and ../docs/resume.svg

Every run is float64, so that the meshes' different orders of summing stay below 1e-9. The state of step 8 is saved on
the mesh on the left and loaded on the one on the right; steps 9 to 16 are compared with those of the undisturbed run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import yaml

from bench.figures import write
from sppo_jax.report.draw.axis import Axis
from sppo_jax.report.draw.chart import Marker, Panel, Series

HERE = Path(__file__).parent
RESULT, PICTURE = HERE / "results" / "resume.json", HERE.parent / "docs" / "resume.svg"
STEPS, SAVED = 16, 8
# Largest relative difference of a loss, and what a logarithmic axis shows for none.
ALLOWED, NO_DIFFERENCE = 1e-9, 1e-17
SETTINGS = {
    "model": {
        "vocab_size": 257,
        "hidden_size": 32,
        "num_layers": 8,
        "num_heads": 4,
        "mlp_size": 64,
        "compute_dtype": "float64",
    },
    "data": {"seed": 3},
    "sequence": {"length": 128, "chunks": 4, "per_step": 4},
    "stash": {"inputs": "host", "attention": "host"},
    "optimizer": {"lr": 0.01, "warmup_steps": 2},
    "train": {"steps": STEPS, "eval_sequences": 0},
    "checkpoint": {"every_steps": SAVED, "keep_last": 9},
}


@dataclass(frozen=True, kw_only=True)
class Setup:
    """How a run is spread: overrides of the config, over so many processes."""

    data: int = 1
    pipe: int = 1
    seq: int = 1
    processes: int = 1
    more: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        words = [f"data {self.data} x pipe {self.pipe} x seq {self.seq}", *self.more]
        return ", ".join([*words, f"{self.processes} process{'es' * (self.processes > 1)}"])

    @property
    def overrides(self) -> list[str]:
        mesh = [f"mesh.data={self.data}", f"mesh.pipe={self.pipe}", f"mesh.seq={self.seq}"]
        return [*mesh, f"train.devices=cpu:{self.data * self.pipe * self.seq}", *self.more]


FOUR = Setup(data=2, pipe=2)
PAIRS = [
    (FOUR, FOUR),
    (FOUR, Setup()),
    (FOUR, Setup(data=4)),
    (FOUR, Setup(pipe=4)),
    (FOUR, Setup(pipe=2, seq=2, more=("sequence.split=ring",))),
    (FOUR, Setup(seq=4, more=("sequence.split=ulysses",))),
    (FOUR, Setup(data=2, pipe=2, more=("sequence.chunks=8",))),
    (FOUR, Setup(data=2, pipe=2, more=("sequence.chunks=[64, 32, 16, 16]",))),
    (FOUR, Setup(pipe=2, more=("schedule.name=interleaved-seq1f1b", "schedule.interleave=2"))),
    (FOUR, Setup(data=2, pipe=2, processes=2)),
    (Setup(data=2, pipe=2, processes=2), Setup(pipe=2, seq=2, processes=4)),
    (Setup(pipe=2, seq=2, processes=4), Setup(pipe=2)),
]


def train(setup: Setup, config: Path, run_dir: Path) -> None:
    """Run `sppo train` on a set-up, in as many processes as it says.

    Raises:
        RuntimeError: it failed; with what it printed.
    """
    words = [sys.executable, "-m", "sppo_jax.cli", "train", str(config), "--run-dir", str(run_dir), *setup.overrides]
    if setup.processes > 1:
        words = [str(HERE.parent / "launch" / "local.sh"), str(setup.processes), "--", *words]
    path = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "JAX_ENABLE_X64": "1", "PYTHONPATH": path}
    done = subprocess.run(words, capture_output=True, text=True, env=env)
    if done.returncode:
        raise RuntimeError(f"{setup.name}: exit code {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")


def losses(run_dir: Path) -> list[float]:
    """Return the loss of every step."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    if [line["step"] for line in lines] != list(range(1, STEPS + 1)):
        raise RuntimeError(f"{run_dir} must hold every step once, got {[line['step'] for line in lines]}")
    return [line["loss"] for line in lines]


def compare(directory: Path, say=print) -> list[dict]:
    """Go through all pairs.

    Args:
        directory: an empty one.
        say: is told of each pair.

    Returns:
        Names, losses, and the largest relative difference from the undisturbed run, of each pair.
    """
    config = directory / "resume.yaml"
    config.write_text(yaml.safe_dump(SETTINGS))
    begun: dict[Setup, Path] = {}
    rows = []
    for number, (before, after) in enumerate(PAIRS):
        if before not in begun:
            begun[before] = directory / f"begun-{len(begun)}"
            train(before, config, begun[before])
        alone = losses(begun[FOUR])
        run_dir = shutil.copytree(begun[before], directory / f"pair-{number}")
        shutil.rmtree(run_dir / "checkpoints" / str(STEPS))
        train(after, config, run_dir)
        got = losses(run_dir)
        worst = max(abs(a - b) / abs(a) for a, b in zip(alone, got, strict=True))
        rows.append({"before": before.name, "after": after.name, "losses": got, "largest_difference": worst})
        say(f"{before.name:50} -> {after.name:80} {worst:.1e}")
    return rows


def picture(rows: list[dict]) -> list[Panel]:
    """Return plots of the losses of all runs, and of their differences from the run that kept its mesh."""
    steps, kept = tuple(range(1, STEPS + 1)), rows[0]["losses"]
    curves = [Series(name="saved and continued on the same mesh", x=steps, y=kept, color=5, width=8)]
    for number, row in enumerate(rows[1:]):
        name = "" if number else f"the other {len(rows) - 1} pairs of the table"
        curves.append(Series(name=name, x=steps, y=row["losses"], color=0, width=1.2, mark="circle"))
    apart = [
        Series(
            name="" if number else "loss of one run",
            x=steps,
            y=[max(abs(a - b) / abs(a), NO_DIFFERENCE) for a, b in zip(kept, row["losses"], strict=True)],
            line=False,
            mark="circle",
        )
        for number, row in enumerate(rows[1:])
    ]
    apart.append(Series(name="allowed", x=(0, STEPS), y=(ALLOWED, ALLOWED), color=1, dashed=True))
    title = f"Losses of {len(rows)} runs stopped after step {SAVED}"
    saved = (Marker(x=SAVED, title="saved and loaded"),)
    step, loss = Axis(label="step", whole=True, low=0), Axis(label="loss, nats a token")
    far = Axis(
        label=f"relative difference ({NO_DIFFERENCE:g}: none)", log=True, low=NO_DIFFERENCE / 3, high=ALLOWED * 10
    )
    return [
        Panel(title=title, x=step, y=loss, series=curves, rules=saved),
        Panel(title="Difference from the run on the same mesh", x=step, y=far, series=apart, rules=saved),
    ]


def main() -> int:
    """Run it, write results and picture; returns 1 if a pair differs by more than is allowed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        rows = compare(Path(directory))
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    result = {"date": time.strftime("%Y-%m-%d"), "machine": machine, "saved_at": SAVED, "pairs": rows}
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    write(PICTURE, picture(rows))
    return 0 if max(row["largest_difference"] for row in rows) < ALLOWED else 1


if __name__ == "__main__":
    sys.exit(main())
