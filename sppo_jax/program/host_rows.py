"""Rows of the stash on the host: one for each forward tick whose stash is there, the same on all stages.

A GPU copies a row with its DMA engines only where the compiler can say the row of every iteration of a loop. A row that
depends on the stage is unknown to the compiler, which then writes a kernel for the copy. So a row is of a tick. It is
held from the forward tick that fills it to the backward tick that uses it, and a stage that is idle in this tick leaves
it unused. Where a backward tick has units of several forward ticks, as where Seq1F1B mixes sequences, rows are the
slots of each stage, and an idle stage uses one row more.

A row may be short: the next row begins before its end, see `stash.merged_classes`.
"""

from collections.abc import Hashable, Sequence
from itertools import accumulate
from typing import TypeVar

from sppo_jax.schedule.slots import color_intervals
from sppo_jax.schedule.table import Table

Class = TypeVar("Class", bound=Hashable)


def host_rows(table: Table, class_of_tick: Sequence[Class | None]) -> dict[int, int] | None:
    """Returns the row of each compute tick's stash.

    Args:
        table: a whole table.
        class_of_tick: class of the stash that each tick makes or uses; None for none.

    Returns:
        For each compute tick with a class its row in the buffer of the class; None where rows depend on the stage.
    """
    if not table.ticks_share_diagonals:
        return None
    ticks = table.unit_ticks
    spans: dict[Class, dict[Hashable, tuple[int, int]]] = {}
    for index, tick in enumerate(table.ticks):
        made = class_of_tick[index]
        if tick.op == "F" and made is not None:
            unit = next(unit for unit in tick.units if unit is not None)
            spans.setdefault(made, {})[index] = (index, ticks[unit._replace(op="B")])
    rows: dict[int, int] = {}
    for of_class in spans.values():
        for forward, row in color_intervals(of_class)[1].items():
            rows[forward] = rows[of_class[forward][1]] = row
    return rows


def short_rows_before(
    rows: dict[int, int], class_of_tick: Sequence[Class | None], short: Sequence[bool]
) -> dict[int, int]:
    """Returns of each compute tick with a row how many rows before its own are short, in the buffer of its class.

    Args:
        rows: from `host_rows`.
        class_of_tick: as for `host_rows`.
        short: of each tick whether the row of its stash is short: the next row begins before its end.
    """
    of_class: dict[Class | None, dict[int, bool]] = {}
    for index, row in rows.items():
        of_class.setdefault(class_of_tick[index], {})[row] = short[index]
    before: dict[Class | None, list[int]] = {
        name: list(accumulate((found[row] for row in range(len(found))), initial=0)) for name, found in of_class.items()
    }
    return {index: before[class_of_tick[index]][row] for index, row in rows.items()}


def refetching_tick(table: Table, backward: int) -> int:
    """Returns the tick beside which comes back what a backward tick needs to make keys and values again.

    It is the compute tick before. Where that one is a forward and heads follow, it is the last head: the forward writes
    to the host, and two copies of one buffer are not under way at once.
    """
    before = next(index for index in range(backward - 1, -1, -1) if table.ticks[index].is_compute)
    return backward - 1 if table.ticks[before].op == "F" else before
