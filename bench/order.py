"""What it costs on CPUs that collectives wait for their turn: the compiled step with and without, taking turns.

    python -m bench.order      # about 10 minutes on 2 quiet cores; writes results/order.json

`sppo_jax/collectives.py` says why they wait. The side without has a thread a device, with which the runtime happens to
keep an order; with more it might never end. Both sides must come to the same loss, to the bit.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

from bench.loop import CONFIG, bare, compare
from sppo_jax.config import Config
from sppo_jax.plan.plan import Plan

RESULT = Path(__file__).parent / "results" / "order.json"


def read_words(words: Sequence[str] | None, description: str, out: Path) -> argparse.Namespace:
    """Read the options of a benchmark that lets two forms of the compiled step take turns."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path, default=out)
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Run it and write the result; returns 1 if the losses differ."""
    args = read_words(words, __doc__, RESULT)
    losses = set()

    def ordered(config: Config, plan: Plan, run_dir: Path) -> float:
        seconds, loss = bare(config, plan, run_dir)
        losses.add(loss)
        return seconds

    def as_written(config: Config, plan: Plan, run_dir: Path) -> float:
        with mock.patch("sppo_jax.pipeline.api.keeps_order", lambda platform: True):
            return ordered(config, plan, run_dir)

    os.environ["PJRT_NPROC"] = "1"  # the runtime takes a thread a device at least
    sides = {"ordered_s": ordered, "as_written_s": as_written}
    result = compare(sides, args.config, [f"train.steps={args.steps}"], args.rounds, args.out)
    spread = f"{min(result['ratios']):.3f} to {max(result['ratios']):.3f}"
    print(f"in order a step takes {result['ratio']:.3f} of its time as written ({spread}); {len(losses)} loss")
    return 0 if len(losses) == 1 else 1


if __name__ == "__main__":
    sys.exit(main())
