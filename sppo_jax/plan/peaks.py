"""How many stashes, prefixes and head gradients a table or an outline holds at once; `slots` says where each lies."""

from collections.abc import Hashable, Iterable, Sequence
from itertools import accumulate, chain
from typing import TypeVar

from sppo_jax.plan.diagonals import tick_groups
from sppo_jax.plan.table import Repeat, Table, remembered

Class = TypeVar("Class", bound=Hashable)
Change = tuple[int, int]  # a tick, and by how much what is held grows in it or shrinks behind it


@remembered
def kv_peak(table: Table) -> int:
    """Returns the number of sequences whose keys and values a stage holds at once, the most of any stage.

    A stage holds a sequence from the forward of its first chunk on the stage's first virtual stage to the backward.
    """
    changes: list[list[Change]] = [[] for _ in range(table.num_stages)]
    for index, tick in enumerate(table.ticks):
        for stage, unit in enumerate(tick.units):
            if unit is not None and unit.chunk == 0 and unit.virtual_stage == stage and unit.kind != "H":
                changes[stage].append((index, 1 if unit.kind == "F" else -1))
    return max(_peak(of_stage, table.repeats) for of_stage in changes)


@remembered
def head_peak(table: Table) -> int:
    """Returns the number of head gradients that wait at once, each from its H to the chunk's first B."""
    last = table.num_virtual_stages - 1
    changes = []
    for index, tick in enumerate(table.ticks):
        unit = tick.units[-1]
        if unit is not None and unit.kind != "F" and unit.virtual_stage == last:
            changes.append((index, 1 if unit.kind == "H" else -1))
    return _peak(changes, table.repeats)


def stash_peaks(table: Table, class_of_group: Sequence[Class]) -> dict[Class, int]:
    """Returns the number of stashes of each class that a stage holds at once, the most of any stage.

    Args:
        table: the schedule.
        class_of_group: the class of each diagonal group; only stashes of one class share a buffer.
    """
    stages: dict[Class, list[list[Iterable[Change]]]] = {}
    for group, changes in enumerate(_stash_changes(table)):
        of_class = stages.setdefault(class_of_group[group], [[] for _ in range(table.num_stages)])
        for stage, of_stage in enumerate(changes):
            of_class[stage].append(of_stage)
    return {
        name: max(_peak(chain(*of_stage), table.repeats) for of_stage in of_class) for name, of_class in stages.items()
    }


@remembered
def in_flight(table: Table) -> tuple[int, ...]:
    """Returns the greatest number of chunk stashes that each stage holds at once."""
    return tuple(_peak(chain(*groups), table.repeats) for groups in zip(*_stash_changes(table), strict=True))


@remembered
def _stash_changes(table: Table) -> list[list[list[Change]]]:
    """Returns for each diagonal group and stage how many stashes come and go, from F to B."""
    groups = tick_groups(table)
    num_groups = 1 + max(group for group in groups if group is not None)
    changes: list[list[list[Change]]] = [[[] for _ in range(table.num_stages)] for _ in range(num_groups)]
    for index, (tick, group) in enumerate(zip(table.ticks, groups, strict=True)):
        if group is None:
            continue
        change = index, 1 if tick.kind == "F" else -1
        for of_stage, unit in zip(changes[group], tick.units, strict=True):
            if unit is not None:
                of_stage.append(change)
    return changes


def _peak(changes: Iterable[Change], repeats: Sequence[Repeat]) -> int:
    """Returns the most that is held at once."""
    found = sorted(changes)
    for start, stop, rounds, _ in repeats:
        growth = (rounds - 1) * sum(change for tick, change in found if start <= tick < stop)
        if growth:
            # Most is held in the last round where it grows, in the first where it shrinks.
            found = sorted([*found, (start if growth > 0 else stop, growth)])
    return max(accumulate(change for _, change in found), default=0)
