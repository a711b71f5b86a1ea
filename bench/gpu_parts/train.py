"""Part `train`: `sppo train` itself, as a user runs it: its check of the kernels, its lines, its saves, and a resume.

A small model trains on the Python standard library. One run goes straight on; one stops after half of the steps and is
resumed; one keeps its stash on the device; one keeps its optimizer on the host. All four see the same batches, so their
losses differ by rounding alone.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.gpu_parts.case import Case, Emit
from bench.gpu_parts.program import Program, Target

STEPS = 6
# Rounding moves the losses of the first steps by this share at most.
MOST_DIFFERENCE = 2e-3
_KEPT = ["stash.inputs=keep", "stash.attention=keep", "stash.rest=recompute"]
_RUNS = {
    "straight on": [],
    "stash kept": _KEPT,
    "optimizer on the host, breadth-first": ["optimizer.place=host", "schedule.name=breadth-first"],
}
_SIZES = {
    True: {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "mlp_size": 48},
    False: {"hidden_size": 1024, "num_layers": 8, "num_heads": 8, "num_kv_heads": 2, "head_dim": 128, "mlp_size": 4096},
}


def cases(*, tiny: bool) -> list[Case]:
    """List the case."""
    settings = {"model": _SIZES[tiny], "length": 512 if tiny else 32 * 1024, "devices": "cpu:1" if tiny else "auto"}
    needs = {} if tiny else {"hbm_gib": 40.0, "host_gib": 40.0}
    packages = ("grain",)
    return [
        Case(
            part="train",
            name="save and resume",
            settings=settings,
            expected_s=60 if tiny else 110,
            limit_s=400,
            packages=packages,
            **needs,
        )
    ]


def programs(settings: dict, target: Target) -> Iterator[Program]:
    """List no program: the runs compile their own."""
    yield from ()


def run(settings: dict, device: str, emit: Emit) -> None:
    """Train; a row for each run beside the first."""
    with tempfile.TemporaryDirectory() as folder:
        ready = Path(folder)
        config = ready / "config.yaml"
        config.write_text(json.dumps(_config(settings)), encoding="utf-8")  # JSON is YAML
        losses = {
            name: _train(config, ready / f"run{n}", STEPS, words) for n, (name, words) in enumerate(_RUNS.items())
        }
        _train(config, ready / "stopped", STEPS // 2, [])
        losses["stopped and resumed"] = _train(config, ready / "stopped", STEPS, [])
    first = losses.pop("straight on")
    emit({"what": "straight on", "ok": _falls(first), "losses": first})
    for name, found in losses.items():
        error = max(abs(a - b) / b for a, b in zip(found, first, strict=True))
        emit({"what": f"{name} against straight on", "ok": error <= MOST_DIFFERENCE, "losses": found, "error": error})


def _falls(losses: list[float]) -> bool:
    return len(losses) == STEPS and all(loss == loss for loss in losses) and losses[-1] < losses[0]


def _config(settings: dict) -> dict:
    return {
        "model": settings["model"] | {"vocab_size": 257},
        "data": {"source": "stdlib"},
        "sequence": {"length": settings["length"], "chunks": 8 if settings["length"] > 512 else 2},
        "stash": {"inputs": "host", "attention": "host"},
        "optimizer": {"warmup_steps": 2, "min_lr_ratio": 1.0},  # so that the rates of a shorter run are the same
        "train": {"steps": STEPS, "log_every": 1, "eval_sequences": 0, "devices": settings["devices"]},
        "checkpoint": {"every_steps": STEPS // 2},
    }


def _train(config: Path, run_dir: Path, steps: int, words: list[str]) -> list[float]:
    """Run `sppo train`; return the losses of all steps so far."""
    command = ["train", str(config), f"train.steps={steps}", *words, "--run-dir", str(run_dir)]
    code = f"import sys; from sppo_jax.cli import main; sys.exit(main({command!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr)
    if done.returncode:
        last = (done.stdout + done.stderr).strip().splitlines()[-1:]
        raise RuntimeError(f"sppo train must end well, got exit code {done.returncode}: {' '.join(last)}")
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["loss"] for line in lines]
