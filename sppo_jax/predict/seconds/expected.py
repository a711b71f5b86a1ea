"""The seconds of a step whose sequences hold documents, in the mean over steps drawn from the sequences of a run."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from sppo_jax.plan.parts import StashPlan
from sppo_jax.predict.seconds.copies import tick_copies
from sppo_jax.predict.seconds.costs import CostModel
from sppo_jax.predict.seconds.documents import NUM_ROWS, Documents
from sppo_jax.predict.seconds.simulate import simulate
from sppo_jax.predict.shape import MemoryShape
from sppo_jax.schedule.table import Table, TickShape, Unit

Seconds = Callable[[Unit, TickShape], float]


def expected_seconds(
    table: Table, costs: CostModel, shape: MemoryShape, stash: StashPlan, documents: Documents
) -> float:
    """Returns the seconds of the ticks of a step in the mean over NUM_ROWS drawn steps.

    Each sequence of a pipeline has each of the groups `Documents.rows` in one of these steps. A tick lasts as long as
    its slowest unit, so the mean is above the seconds of the mean sequence.

    Args:
        table: the schedule, or its outline.
        costs: seconds of units; which documents they are for is of no interest.
        shape: what memory depends on besides table and stash.
        stash: the places of activations.
        documents: how documents lie in the sequences of the pipeline that counts; see `Documents.of_slowest`.
    """
    of_rows = [replace(costs, attended=row) for row in documents.rows]
    seconds = [one.of_chunks(table.chunk_lengths) for one in of_rows]
    copies = tick_copies(table, shape, stash, costs)
    steps = [simulate(table, _drawn(seconds, step), *copies).step_s for step in range(NUM_ROWS)]
    return sum(steps) / NUM_ROWS


def row_of(step: int, sequence: int) -> int:
    """Returns the group of a sequence of a pipeline in a drawn step; over all steps a sequence has each group once."""
    # An odd factor and a shift: a permutation, and another one for nearly every sequence.
    return ((1 + 2 * (sequence % 4)) * step + sequence * 5 // 4) % NUM_ROWS


def _drawn(seconds: Sequence[Seconds], step: int) -> Seconds:
    def of_unit(unit: Unit, tick: TickShape) -> float:
        return seconds[row_of(step, unit.sequence)](unit, tick)

    return of_unit
