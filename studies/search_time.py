"""Seconds of the planner's search in 16 settings, beside two older planners', in docs/plan.md.

    git worktree add ../waves e329ea3
    git worktree add ../groups e3df3e3
    python -m studies.search_time --before-waves ../waves --before-breadth-first ../groups --write

Each planner runs in a process of its own, one after another, on one CPU core: CPU time of the search alone, the best of
some runs. The planner of before waves is beside today's search of all schedules but breadth-first ones; the planner of
before breadth-first is beside today's whole search. No jax needed; takes four minutes on an otherwise idle machine.
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

from bench.blocks import write_block

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


def table(*columns: list[Measured]) -> str:
    """Returns the block: one row a setting, and the sums.

    Args:
        columns: of the planner before waves, today's without breadth-first, before breadth-first, today's.
    """
    lines = [
        f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, {date.today()}.",
        "",
        "| setting | before waves | without breadth-first | times before "
        "| before breadth-first | the whole search | times before |",
        "|---|---|---|---|---|---|---|",
    ]
    for one, *measured in zip(SETTINGS, *columns, strict=True):
        cells = [f"{found.seconds:.2f}" + ("" if found.fits else ", nothing fits") for found in measured]
        lines.append(_row(one.name, cells, [found.seconds for found in measured]))
    sums = [sum(found.seconds for found in column) for column in columns]
    lines.append(_row("together", [f"{total:.1f}" for total in sums], sums))
    return "\n".join(lines)


def _row(name: str, cells: list[str], seconds: list[float]) -> str:
    ratios = (f"{seconds[1] / seconds[0]:.2f}", f"{seconds[3] / seconds[2]:.2f}")
    return f"| {' | '.join((name, *cells[:2], ratios[0], *cells[2:], ratios[1]))} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for what in ("waves", "breadth-first"):
        parser.add_argument(f"--before-{what}", type=Path, help=f"a checkout of the planner before {what}")
    parser.add_argument("--write", action="store_true", help="write the block `search` of docs/plan.md")
    parser.add_argument("--measure", choices=("all", "others"), help="print one planner's seconds as JSON")
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(SETTINGS, args.measure == "all")))
        return 0
    for what, checkout in (("waves", args.before_waves), ("breadth-first", args.before_breadth_first)):
        if checkout is None or not (checkout / "sppo_jax").is_dir():
            rule = f"--before-{what} must be a checkout with sppo_jax/, got {checkout}"
            parser.error(f"{rule}; make one with git worktree add")
    found = (_in_process(args.before_waves, True), _in_process(_HERE, False))
    text = table(*found, _in_process(args.before_breadth_first, True), _in_process(_HERE, True))
    print(text)
    if args.write:
        write_block(PAGE, "search", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
