"""Seconds of the planner's search in 16 settings, beside an older planner's, in docs/plan.md.

    git worktree add ../before e329ea3
    python benchmarks/search_time.py --before ../before --write

Each planner runs in a process of its own, one after another, on one CPU core: CPU time of the search alone, the best of
some runs. Without breadth-first, today's planner searches all other schedules only. No jax needed; takes two minutes on
an otherwise idle machine.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import NamedTuple

from blocks import write_block

K, M = 1024, 1024**2
PAGE = Path(__file__).parents[1] / "docs" / "plan.md"
_HERE = Path(__file__).parents[1]
# Runs of each search; of long ones fewer.
_RUNS, _LONG_RUNS, _LONG_S = 5, 3, 2.0
_A100, _H100 = "a100-80g", "h100"


class Setting(NamedTuple):
    """What is searched for."""

    name: str
    model: str
    cluster: str
    length: int
    sequences: int = 0
    mesh: tuple[tuple[str, int], ...] = ()


SETTINGS = (
    Setting("7B, 512K tokens, 4x8 A100", "llama2-7b", f"{_A100}:4x8", 512 * K),
    Setting("7B, 1M, 4x8 A100", "llama2-7b", f"{_A100}:4x8", M),
    Setting("13B, 512K, 8x8 A100", "gpt-13b", f"{_A100}:8x8", 512 * K),
    Setting("13B, 1.25M, 8x8 A100", "gpt-13b", f"{_A100}:8x8", 1280 * K),
    Setting("65B, 512K, 16x8 A100", "gpt-65b", f"{_A100}:16x8", 512 * K),
    Setting("65B, 600K, 16x8 A100", "gpt-65b", f"{_A100}:16x8", 600 * K),
    Setting(
        "65B, 640K, 16 stages of 8 A100",
        "gpt-65b",
        f"{_A100}:16x8",
        640 * K,
        mesh=(("pipe", 16), ("seq", 8), ("data", 1)),
    ),
    Setting("7B, 128K, 4 sequences, 8x8 A100", "llama2-7b", f"{_A100}:8x8", 128 * K, 4),
    Setting("7B, 32K, 16 sequences, 8x8 A100", "llama2-7b", f"{_A100}:8x8", 32 * K, 16),
    Setting("7B, 4M, 16x8 A100", "gpt-7b", f"{_A100}:16x8", 4 * M),
    Setting("Llama 3 8B, 1M, 8 H100", "llama3-8b", f"{_H100}:1x8", M),
    Setting("Llama 3 8B, 2M, 8 H100", "llama3-8b", f"{_H100}:1x8", 2 * M),
    Setting("Llama 3 8B, 5M, 8 H100", "llama3-8b", f"{_H100}:1x8", 5 * M),
    Setting("Llama 3 8B, 1,000,064 tokens, 2x8 H100", "llama3-8b", f"{_H100}:2x8", 1_000_064),
    Setting("Llama 3 8B, 6,999,936 tokens, 8 H100", "llama3-8b", f"{_H100}:1x8", 6_999_936),
    Setting("Llama 3 70B, 1M, 768 sequences, 12288 H100", "llama3-70b", f"{_H100}:1536x8", M, 768),
)


class Measured(NamedTuple):
    """CPU seconds of a search, and whether it found a plan that fits."""

    seconds: float
    fits: bool


def measure(settings: tuple[Setting, ...], breadth_first: bool) -> list[Measured]:
    """Returns the best CPU seconds of the searches of the planner that is imported."""
    from sppo_jax.config import config_from_dict
    from sppo_jax.hardware import parse_cluster
    from sppo_jax.planner import search as planner

    if not breadth_first and hasattr(planner, "_places"):
        planner._places = lambda request: (planner._best(request), None)
    found = []
    for one in settings:
        groups = {"sequence": {"length": one.length, "per_step": one.sequences}, "mesh": dict(one.mesh)}
        config = config_from_dict({"model": {"preset": one.model}, "train": {"steps": 1}, **groups})
        best_s = float("inf")
        for run in range(_RUNS):
            if run >= _LONG_RUNS and best_s > _LONG_S:
                break
            start_s = time.process_time()
            fits = planner.search(config, parse_cluster(one.cluster)).fits
            best_s = min(best_s, time.process_time() - start_s)
        found.append(Measured(best_s, fits))
    return found


def _in_process(checkout: Path, breadth_first: bool) -> list[Measured]:
    words = [sys.executable, __file__, "--measure", "all" if breadth_first else "others"]
    environment = {**os.environ, "PYTHONPATH": str(checkout.resolve())}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    return [Measured(*one) for one in json.loads(done.stdout.splitlines()[-1])]


def table(before: list[Measured], others: list[Measured], whole: list[Measured]) -> str:
    """Returns the block: one row a setting, and the sums."""
    lines = [
        f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, {date.today()}.",
        "",
        "| setting | before waves | without breadth-first | times before | the whole search |",
        "|---|---|---|---|---|",
    ]
    for one, *measured in zip(SETTINGS, before, others, whole, strict=True):
        cells = [f"{found.seconds:.2f}" + ("" if found.fits else ", nothing fits") for found in measured]
        ratio = measured[1].seconds / measured[0].seconds
        lines.append(f"| {one.name} | {cells[0]} | {cells[1]} | {ratio:.2f} | {cells[2]} |")
    sums = [sum(found.seconds for found in column) for column in (before, others, whole)]
    lines.append(f"| together | {sums[0]:.1f} | {sums[1]:.1f} | {sums[1] / sums[0]:.2f} | {sums[2]:.1f} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--before", type=Path, help="a checkout of the older planner")
    parser.add_argument("--write", action="store_true", help="write the block `search` of docs/plan.md")
    parser.add_argument("--measure", choices=("all", "others"), help="print one planner's seconds as JSON")
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(SETTINGS, args.measure == "all")))
        return 0
    if args.before is None or not (args.before / "sppo_jax").is_dir():
        parser.error(f"--before must be a checkout with sppo_jax/, got {args.before}; make one with git worktree add")
    text = table(_in_process(args.before, True), _in_process(_HERE, False), _in_process(_HERE, True))
    print(text)
    if args.write:
        write_block(PAGE, "search", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
