"""Writes the first lines of `sppo plan` into the README.

    python -m bench.readme     write the block `plan` of README.md

Nothing is compiled or run.
"""

from pathlib import Path

from bench.blocks import write_block
from sppo_jax.config import load_config
from sppo_jax.planner.search import search
from sppo_jax.report.plan.figures import figures_of
from sppo_jax.report.plan.text import brief_text

ROOT = Path(__file__).parents[1]
CONFIG, CLUSTER = "configs/llama3-8b-128k-8gpu.yaml", "h100:1x8"
# What is planned for, and the verdict.
_LINES = 6


def block() -> str:
    """Return the command and the first lines that it prints."""
    config = load_config(ROOT / CONFIG, [f"hardware.cluster={CLUSTER}"])
    lines = brief_text(figures_of(search(config), config)).splitlines()
    shown = "\n".join(lines[:_LINES])
    return f"```\n$ sppo plan {CONFIG} --cluster {CLUSTER}\n{shown}\n...\n```"


if __name__ == "__main__":
    write_block(ROOT / "README.md", "plan", block())
    print(block())
