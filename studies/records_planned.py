"""Compares this project's plans with the records of other systems, in the same settings, in bench/results/records.md.

    python -m studies.records_planned --write

Theirs are published figures of runs. Ours are plans: nothing was run on a GPU or TPU. The script needs no jax. It takes
up to twenty-five minutes, mostly for the longest sequences and their limits.
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

PAGE = Path(__file__).parents[1] / "bench" / "results" / "records.md"
# The planner's mean error on published throughput is about a tenth, so a smaller lead decides nothing.
CLOSE = 0.10
T = TypeVar("T")


def throughput_row(record: Record) -> str:
    """Plans a record's setting and writes its row."""
    found = quiet(lambda: search(record.config(), parse_cluster(record.cluster)))
    plan = found.plan
    devices = plan.mesh.num_devices
    ours = record.per_step * record.length / (devices * plan.predicted.step_s)
    chunks = f"{len(plan.chunk_lengths)} chunk{'s' if len(plan.chunk_lengths) > 1 else ''}"
    mesh = f"data {plan.mesh.data} x pipe {plan.mesh.pipe} x seq {plan.mesh.seq}, {chunks}"
    if not found.fits:
        return _row(record, f"{record.figure:.1f}", "no plan fits", f"{record.theirs}")
    return _row(record, f"{record.figure:.1f}", f"{ours:.1f} ({mesh})", leader(ours, record.figure, record.theirs))


def leader(ours: float, figure: float, theirs: str) -> str:
    """Returns in words which system is faster, and by how much.

    Args:
        ours: the planned figure.
        figure: the published one.
        theirs: the other system.
    """
    lead = ours / figure - 1
    if -CLOSE < lead < CLOSE:
        return f"too close to say (ours {lead:+.0%})"
    return f"ours by {lead:.0%} (predicted)" if lead > 0 else f"{theirs} by {1 / (lead + 1) - 1:.0%}"


def length_row(record: Record) -> str:
    """Searches the longest sequence of a record's setting and writes its row."""
    bound = quiet(lambda: max_length(record.config(), parse_cluster(record.cluster)))
    theirs = f"{record.figure / 1e6:.2f}M"
    if bound.best is None:
        return _row(record, theirs, "none fits", record.theirs)
    ours = bound.best.size
    words = f"ours, {ours / record.figure:.1f} times as long (predicted)"
    if ours < record.figure:
        words = f"{record.theirs}, {record.figure / ours:.1f} times as long"
    return _row(record, theirs, f"{ours / 1e6:.2f}M; {stopped_by(record, bound)}", words)


def stopped_by(record: Record, bound: Bound) -> str:
    """Returns in words the resource that limits a longer sequence: with twice as much of it, a longer one fits."""
    if bound.stopped is None:
        return "no tried length failed"
    config, cluster = record.config(), parse_cluster(record.cluster)
    longer = replace(config, sequence=replace(config.sequence, length=bound.stopped.size))
    more = {
        "HBM": replace(cluster, device=replace(cluster.device, hbm_bytes=2 * cluster.device.hbm_bytes)),
        "host memory": replace(cluster, host_bytes=2 * cluster.host_bytes),
    }
    helps = [name for name, larger in more.items() if quiet(lambda larger=larger: search(longer, larger)).fits]
    if not helps:
        return "limit: HBM and host memory"
    return f"limit: {helps[0]}" if len(helps) == 1 else "limit: either HBM or host memory"


def quiet(make: Callable[[], T]) -> T:
    """Returns what `make` returns, without warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a plan that does not fit is an answer here
        return make()


def _row(record: Record, theirs: str, ours: str, words: str) -> str:
    words += f"; {record.remark}" if record.remark else ""
    return f"| {record.cell} | {record.theirs} | {theirs} | {record.source} | {ours} | {words} |"


_HEAD = "| setting | their system | theirs, run | source | ours, planned, not run | who leads |\n" + "|---" * 6 + "|\n"


def report() -> str:
    """Returns the block."""
    return "\n".join(
        [
            "**Tokens per second per device**\n",
            _HEAD + "\n".join(map(throughput_row, THROUGHPUT)),
            "\n**Longest sequence, in millions of tokens**\n",
            _HEAD + "\n".join(map(length_row, LENGTHS)),
        ]
    )


def main(arguments: list[str] | None = None) -> int:
    """Prints the block, and writes it if asked to."""
    return print_block(PAGE, "records", report, __doc__, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
