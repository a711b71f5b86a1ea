"""TRL and this project train one folder on the same rows: losses, weights after 30 steps, and seconds by turns.

    python -m bench.peer_trl [--venv DIR] [--rounds 3] [--write]    half an hour on 2 shared cores

TRL has an environment of its own (`pip install trl`, 1 GB with PyTorch for CPUs), made in DIR unless it is there. The
model is a Llama of 4 layers, made by transformers; all is float32, on the CPU. TRL reads its rows in the order in which
this project reads them. `--write` writes results/peer_trl.json and the block of docs/from-trl.md. The exit code is 1 if
losses or weights are further apart than LOSS and WEIGHTS.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from bench.blocks import write_block
from sppo_jax.config import config_from_dict
from sppo_jax.data.open import open_data

HERE = Path(__file__).parent
RESULT, PAGE, BLOCK = HERE / "results" / "peer_trl.json", HERE.parent / "docs" / "from-trl.md", "peer_trl"
SIDE = HERE / "peer_trl_side.py"
PACKAGES = ("torch==2.13.0", "trl==1.16.0", "transformers==5.24.0")
# Largest differences: of a loss, and of weights as a share of their movement.
LOSS, WEIGHTS = 3e-5, 1e-3
LENGTH, PER_STEP, STEPS, WARMUP = 512, 2, 30, 5
# Tokens of a sequence, and steps of a round, the first of which does not count.
TIMED = ((1024, 4), (4096, 3), (16384, 2))


def trl_settings(length: int, per_step: int, steps: int, warmup: int) -> dict[str, Any]:
    """Returns the keys of SFTConfig: TRL's own defaults but for the cosine, the order, and float32 on a CPU."""
    return {
        "max_length": length,
        "per_device_train_batch_size": per_step,
        "max_steps": steps,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "cosine",
        "warmup_steps": warmup,
        "train_sampling_strategy": "sequential",
        "bf16": False,
        "gradient_checkpointing": False,
        "use_cpu": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
    }


def our_settings(folder: str, rows: str, length: int, per_step: int, steps: int, warmup: int) -> dict[str, Any]:
    """Returns the config that gives the same curve."""
    return {
        "model": {"hf": folder, "compute_dtype": "float32"},
        "data": {"source": rows, "pack": "none", "validation_fraction": 0},
        "sequence": {"length": length, "per_step": per_step},
        "optimizer": {
            "lr": 1e-3,
            "warmup_steps": warmup,
            "warmup": "from_zero",
            "min_lr_ratio": 0,
            "b2": 0.999,
            "weight_decay": 0,
        },
        "train": {"steps": steps},
    }


def environment(folder: Path) -> Path:
    """Returns the Python of TRL's environment, which is made unless it is there."""
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
    return python


def write_in_our_order(settings: Mapping[str, Any], path: Path) -> None:
    """Writes the rows that a run reads, in the order in which it reads them."""
    config = config_from_dict(settings)
    rows = open_data(config).training
    with path.open("w") as file:
        for index in range(config.train.steps * config.num_sequences):
            file.write(json.dumps({"input_ids": rows[index]["tokens"].tolist()}) + "\n")


def train_theirs(python: Path, folder: Path, rows: Path, out: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Trains with TRL in a process of its own; returns what peer_trl_side.py measured."""
    out.mkdir()
    given = out / "settings.json"
    given.write_text(json.dumps(settings))
    _run([python, SIDE, "train", folder, rows, out, given], out / "log.txt")
    return json.loads((out / "result.json").read_text())


def train_ours(run_dir: Path, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Trains with `sppo train` in a process of its own; returns the lines of metrics.jsonl."""
    words = ["sppo_jax.cli", "train", _written(settings, run_dir), "--run-dir", run_dir]
    _run([sys.executable, "-m", *words], run_dir.with_suffix(".txt"))
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def time_ours(run_dir: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Trains in a process of its own; returns what peer_trl_ours.py measured, and the peak of host memory."""
    words = ["bench.peer_trl_ours", _written(settings, run_dir), run_dir]
    _run([sys.executable, "-m", *words], run_dir.with_suffix(".txt"))
    last = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])
    return json.loads((run_dir / "result.json").read_text()) | {"peak_gib": last["host_peak_bytes"] / 2**30}


def _written(settings: Mapping[str, Any], run_dir: Path) -> Path:
    path = run_dir.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(dict(settings)))
    return path


def _run(command: Sequence[Any], log: Path) -> None:
    """Runs a process; its output goes to a file, whose end is shown if it fails."""
    kept = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "PYTHONPATH")}
    quiet = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1", "JAX_PLATFORMS": "cpu"}
    # Rounds compile once, and torch's threads do not spin while they wait for cores.
    quiet |= {"JAX_COMPILATION_CACHE_DIR": str(log.parent / "jax_cache"), "OMP_WAIT_POLICY": "PASSIVE"}
    with log.open("w") as file:
        done = subprocess.run([*map(str, command)], env=kept | quiet, cwd=HERE.parent, stdout=file, stderr=file)
    if done.returncode:
        raise RuntimeError(f"{command[1:4]} ended with exit code {done.returncode}:\n{log.read_text()[-3000:]}")


def largest_difference(ours: Iterable[float], theirs: Iterable[float]) -> float:
    """Returns the largest difference of two curves of one length."""
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))


def difference_over_movement(
    ours: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray], start: Mapping[str, np.ndarray]
) -> float:
    """Returns the mean difference of two sets of weights as a share of their mean movement from the start.

    Raises:
        ValueError: the sets have other tensors.
    """
    if not ours.keys() == theirs.keys() == start.keys():
        raise ValueError(f"all folders must have the same tensors, got others: {sorted(ours.keys() ^ theirs.keys())}")
    difference = sum(float(np.abs(ours[name] - theirs[name], dtype=np.float64).sum()) for name in start)
    return difference / sum(float(np.abs(theirs[name] - start[name], dtype=np.float64).sum()) for name in start)


def compare_curves(python: Path, folder: Path, place: Path) -> dict[str, Any]:
    """Trains 30 steps on each side, and once more with the other warm-up; returns losses and differences."""
    from safetensors.numpy import load_file

    ours = our_settings(str(folder), str(place / f"rows_{LENGTH}.jsonl"), LENGTH, PER_STEP, STEPS, WARMUP)
    theirs = trl_settings(LENGTH, PER_STEP, STEPS, WARMUP)
    write_in_our_order(ours, place / "ordered.jsonl")
    trl = train_theirs(python, folder, place / "ordered.jsonl", place / "trl", theirs)
    lines = train_ours(place / "ours", ours)
    other = train_ours(place / "first_step", ours | {"optimizer": ours["optimizer"] | {"warmup": "first_step"}})
    export = ["convert", "to-hf", place / "ours", place / "export"]
    _run([sys.executable, "-m", "sppo_jax.cli", *export], place / "export.txt")
    weights = [load_file(each / "model.safetensors") for each in (place / "export", place / "trl", folder)]
    losses = [line["loss"] for line in lines]
    rates = [line["learning_rate"] for line in lines]
    return {
        "trl": theirs,
        "sppo_jax": ours | {"model": ours["model"] | {"hf": "FOLDER"}, "data": ours["data"] | {"source": "rows.jsonl"}},
        "dtype": trl["dtype"],
        "losses": {"trl": trl["losses"], "sppo_jax": losses},
        "largest difference of losses": largest_difference(losses, trl["losses"]),
        "largest difference of learning rates": largest_difference(rates, trl["learning_rates"]),
        "mean difference over mean movement of weights": difference_over_movement(*weights),
        "largest difference of losses with warmup=first_step": largest_difference(
            [line["loss"] for line in other], trl["losses"]
        ),
        "versions": trl["versions"],
    }


def time_rounds(python: Path, folder: Path, place: Path, length: int, steps: int, num_rounds: int) -> dict[str, Any]:
    """Times one length: rounds in which both sides take turns, the other one first in every second round."""
    ours = our_settings(str(folder), str(place / f"rows_{length}.jsonl"), length, 1, steps, 0)
    ours["checkpoint"] = {"final": False, "every_s": 0}
    theirs = trl_settings(length, 1, steps, 0)
    found: dict[str, list[dict[str, Any]]] = {"trl": [], "sppo_jax": []}
    for number in range(num_rounds):
        for side in ("trl", "sppo_jax")[:: 1 if number % 2 else -1]:
            out = place / f"{side}_{length}_{number}"
            if side == "trl":
                one = train_theirs(python, folder, Path(ours["data"]["source"]), out, theirs)
            else:
                one = time_ours(out, ours)
            medians = {name: round(statistics.median(one[name]), 4) for name in ("step_s", "step_cpu_s")}
            found[side].append(medians | {"peak_gib": round(one["peak_gib"], 2)})
            print(f"{length:,} tokens, round {number}, {side}: {found[side][-1]}", flush=True)
    return {"length": length, "steps": steps, "rounds": found}


def table(result: Mapping[str, Any]) -> str:
    """Returns the figures as text for the page."""
    curve, versions, machine = result["curve"], result["versions"], result["machine"]
    rows = [_timed_row(each) for each in result["seconds"]]
    shared = f"; other programs shared the cores, load average {machine['load']:.0f}" if machine["load"] > 3 else ""
    return "\n".join(
        [
            f"* {len(curve['losses']['trl'])} losses differ by at most "
            f"{curve['largest difference of losses']:.0e} (with `warmup: first_step` by up to "
            f"{curve['largest difference of losses with warmup=first_step']:.1g}).",
            f"* The mean difference of the weights is {curve['mean difference over mean movement of weights']:.0e} of "
            "their mean movement.",
            "",
            "| tokens | s a step: TRL, ours | CPU s a step: TRL, ours | TRL / ours: s, CPU s | GiB: TRL, ours |",
            "|---|---|---|---|---|",
            *rows,
            "",
            f"Run on {result['date']}, {machine['cores']} CPU cores, float32, one sequence a step, "
            f"{len(result['seconds'][0]['rounds']['trl'])} alternating rounds{shared}. All are medians, "
            "and ratios those of rounds, with their range; memory is the peak of a process. "
            "Attention is the plain kernel for CPUs here, and a fused one in torch. "
            f"TRL {versions['trl']} (transformers {versions['transformers']}, torch {versions['torch']}) without "
            f"recomputation; jax {versions['jax']}. `bench/results/peer_trl.json` has all figures.",
        ]
    )


def _timed_row(timed: Mapping[str, Any]) -> str:
    rounds = timed["rounds"]
    cells, ratios = [], []
    for name in ("step_s", "step_cpu_s"):
        theirs, ours = ([each[name] for each in rounds[side]] for side in ("trl", "sppo_jax"))
        by_round = [a / b for a, b in zip(theirs, ours, strict=True)]
        cells.append(f"{statistics.median(theirs):.2f}, {statistics.median(ours):.2f}")
        ratios.append(f"{statistics.median(by_round):.2f} ({min(by_round):.2f} to {max(by_round):.2f})")
    peaks = [max(each["peak_gib"] for each in rounds[side]) for side in ("trl", "sppo_jax")]
    return f"| {timed['length']:,} | {' | '.join(cells)} | {', '.join(ratios)} | {peaks[0]:.1f}, {peaks[1]:.1f} |"


def is_equal(curve: Mapping[str, Any]) -> bool:
    """Returns whether losses and weights are as close as they must be."""
    return (
        curve["largest difference of losses"] <= LOSS
        and curve["mean difference over mean movement of weights"] <= WEIGHTS
    )


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--venv", type=Path, help="folder of TRL's environment; default: a temporary one")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        python, folder = environment((args.venv or place / "venv").absolute()), place / "llama"
        files = [(LENGTH, STEPS * PER_STEP), *TIMED]
        made = [word for length, count in files for word in (place / f"rows_{length}.jsonl", length, count)]
        _run([python, SIDE, "make", folder, *made], place / "make.txt")
        curve = compare_curves(python, folder, place)
        print({name: value for name, value in curve.items() if name.startswith(("largest", "mean"))}, flush=True)
        seconds = [time_rounds(python, folder, place, *timed, args.rounds) for timed in TIMED]
    result = {
        "date": f"{datetime.date.today()}",
        "machine": {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()}
        | {"load": round(os.getloadavg()[2], 1)},
        "versions": curve.pop("versions") | {name: version(name) for name in ("sppo_jax", "jax", "jaxlib")},
        "curve": curve,
        "seconds": seconds,
    }
    print(table(result))
    if args.write:
        RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="ascii")
        write_block(PAGE, BLOCK, table(result))
    return 0 if is_equal(curve) else 1


if __name__ == "__main__":
    sys.exit(main())
