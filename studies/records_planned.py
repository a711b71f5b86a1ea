"""Compares this project's plans with the records of other systems, on their own cells, in docs/records.md.

    python -m studies.records_planned --write

Theirs are published figures of runs. Ours are plans: nothing was run on a GPU or TPU. No jax needed; takes twenty-five
minutes, most of them for the longest sequences and for what stops them.
"""

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from bench.blocks import print_block
from sppo_jax.hardware import parse_cluster
from sppo_jax.search.limits import Bound, max_length
from sppo_jax.search.search import search
from studies.record_cells import LENGTHS, THROUGHPUT, Record

PAGE = Path(__file__).parents[1] / "docs" / "records.md"
# The planner's mean error on published throughput is about a tenth, so a smaller lead decides nothing.
CLOSE = 0.10
T = TypeVar("T")


def throughput_row(record: Record) -> str:
    """Plans a record's setting and writes its row."""
    found = quiet(lambda: search(record.config(), parse_cluster(record.cluster)))
    plan = found.plan
    devices = plan.mesh.num_devices
    ours = record.per_step * record.length / (devices * plan.predicted.step_s)
    mesh = f"data {plan.mesh.data} x pipe {plan.mesh.pipe} x seq {plan.mesh.seq}, {len(plan.chunk_lengths)} chunks"
    if not found.fits:
        return _row(record, f"{record.figure:.1f}", "no plan fits", f"{record.theirs}")
    return _row(record, f"{record.figure:.1f}", f"{ours:.1f} ({mesh})", leader(ours, record.figure, record.theirs))


def leader(ours: float, figure: float, theirs: str) -> str:
    """Returns in words who is faster, and by how much.

    Args:
        ours: the planned figure.
        figure: the published one.
        theirs: the other system.
    """
    lead = ours / figure - 1
    if -CLOSE < lead < CLOSE:
        return f"too close to say (ours {lead:+.0%})"
    return f"ours by {lead:.0%}, if the plan holds" if lead > 0 else f"{theirs} by {1 / (lead + 1) - 1:.0%}"


def length_row(record: Record) -> str:
    """Searches the longest sequence of a record's setting and writes its row."""
    bound = quiet(lambda: max_length(record.config(), parse_cluster(record.cluster), budget_s=600))
    theirs = f"{record.figure / 1e6:.2f}M"
    if bound.best is None:
        return _row(record, theirs, "none fits", record.theirs)
    ours = bound.best.size
    words = f"ours, {ours / record.figure:.1f} times as long, if the plan holds"
    if ours < record.figure:
        words = f"{record.theirs}, {record.figure / ours:.1f} times as long"
    return _row(record, theirs, f"{ours / 1e6:.2f}M, then {stopped_by(record, bound)}", words)


def stopped_by(record: Record, bound: Bound) -> str:
    """Returns in words what a longer sequence has too little of: what helps if there is twice as much of it."""
    if bound.stopped is None:
        return "nothing that was tried"
    config, cluster = record.config(), parse_cluster(record.cluster)
    longer = replace(config, sequence=replace(config.sequence, length=bound.stopped.size))
    more = {
        "HBM": replace(cluster, device=replace(cluster.device, hbm_bytes=2 * cluster.device.hbm_bytes)),
        "host memory": replace(cluster, host_bytes=2 * cluster.host_bytes),
    }
    helps = [name for name, larger in more.items() if quiet(lambda larger=larger: search(longer, larger)).fits]
    if not helps:
        return "HBM and host memory are full"
    return f"{helps[0]} is full" if len(helps) == 1 else "more HBM or more host memory would help"


def quiet(make: Callable[[], T]) -> T:
    """Returns what `make` returns, without warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a plan that does not fit is an answer here
        return make()


def _row(record: Record, theirs: str, ours: str, words: str) -> str:
    words += f"; {record.remark}" if record.remark else ""
    return f"| {record.cell} | {record.theirs} | {theirs} | {record.source} | {ours} | {words} |"


_HEAD = "| setting | their system | {theirs} | source | ours, planned, not run | leads |\n|---|---|---|---|---|---|\n"


def report() -> str:
    """Writes the block."""
    return "\n".join(
        [
            "**Tokens a second a device**\n",
            _HEAD.format(theirs="theirs, run") + "\n".join(map(throughput_row, THROUGHPUT)),
            "\n**Longest sequence, in millions of tokens**\n",
            _HEAD.format(theirs="theirs, run") + "\n".join(map(length_row, LENGTHS)),
        ]
    )


def main(arguments: list[str] | None = None) -> int:
    """Prints the block, and writes it if asked to."""
    return print_block(PAGE, "records", report, __doc__, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
