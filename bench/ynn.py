"""What it costs on CPUs to do without the fusions that add wrongly: the compiled step without and with, taking turns.

    python -m bench.ynn      # about 10 minutes on 2 quiet cores; writes results/ynn.json

`sppo_jax/environment.py` says which versions of jaxlib add wrongly, and turns the fusions off for a whole process. Here
they are on in the process, and one side turns them off for its own program.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

from bench.loop import bare_seconds, compare
from bench.order import read_words
from sppo_jax.config import Config
from sppo_jax.environment import YNN_FLAG
from sppo_jax.plan.plan import Plan

RESULT = Path(__file__).parent / "results" / "ynn.json"
OFF = {YNN_FLAG.removeprefix("--"): ""}


def without(config: Config, plan: Plan, run_dir: Path) -> float:
    """Return seconds a step without the fusions."""
    with mock.patch("sppo_jax.pipeline.api.compiler_options", lambda *_: OFF):
        return bare_seconds(config, plan, run_dir)


def main(words: Sequence[str] | None = None) -> int:
    """Run it and write the result."""
    args = read_words(words, __doc__, RESULT)
    flags = os.environ.get("XLA_FLAGS", "").split()
    os.environ["XLA_FLAGS"] = " ".join(flag for flag in flags if not flag.startswith(YNN_FLAG))
    sides = {"without_s": without, "with_s": bare_seconds}
    result = compare(sides, args.config, [f"train.steps={args.steps}"], args.rounds, args.out)
    spread = f"{min(result['ratios']):.3f} to {max(result['ratios']):.3f}"
    print(f"without the fusions a step takes {result['ratio']:.3f} of its time with them ({spread})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
