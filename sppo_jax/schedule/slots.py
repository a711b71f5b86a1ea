"""Buffer slots of a table: which stashes, prefixes and head gradients can share storage."""

from collections.abc import Callable, Hashable, Iterable
from heapq import heappop, heappush
from itertools import product
from typing import NamedTuple, TypeVar

from sppo_jax.schedule.table import Table, Unit

UnitKey = tuple[int, int, int, int]  # stage, sequence, chunk, virtual stage
Stay = tuple[UnitKey, tuple[int, int]]  # of a stash: first and last tick
Class = TypeVar("Class", bound=Hashable)
Key = TypeVar("Key", bound=Hashable)


def color_intervals(intervals: dict[Hashable, tuple[int, int]]) -> tuple[int, dict]:
    """Gives each interval the lowest slot that is free for its whole length.

    Args:
        intervals: first and last tick of each key, both inclusive.

    Returns:
        The number of slots, which is the greatest number of intervals open at once, and the slot of each key.
    """
    return _color_sorted(sorted(intervals.items(), key=lambda item: item[1]))


def _color_sorted(intervals: Iterable[tuple[Key, tuple[int, int]]]) -> tuple[int, dict[Key, int]]:
    slots: dict[Key, int] = {}
    free: list[int] = []
    taken: list[tuple[int, int]] = []  # last tick and slot
    count = 0
    for key, (start, end) in intervals:
        while taken and taken[0][0] < start:
            heappush(free, heappop(taken)[1])
        if not free:
            free.append(count)
            count += 1
        slots[key] = heappop(free)
        heappush(taken, (end, slots[key]))
    return count, slots


def sequence_slots(table: Table) -> tuple[int, dict[tuple[int, int], int]]:
    """Returns the number of sequences that a stage has in flight at once, and a slot for each.

    A sequence holds its slot at a stage from its first forward tick there to its last backward tick there.

    Returns:
        The number of slots, the most any stage needs, and the slot of each (stage, sequence).
    """
    ticks = table.unit_ticks
    spans: dict[int, dict[Hashable, tuple[int, int]]] = {stage: {} for stage in range(table.num_stages)}
    for unit, tick in ticks.items():
        if unit.op == "H":
            continue
        stage = unit.virtual_stage % table.num_stages
        start, end = spans[stage].get((stage, unit.sequence), (tick, tick))
        spans[stage][stage, unit.sequence] = (min(start, tick), max(end, tick))
    return color_stages(spans)


class PrefixSlots(NamedTuple):
    """Slots for the keys and values of prefixes, each of one sequence on one virtual stage, and for their gradients.

    Args:
        num_kv: slots of keys and values, the most that any stage needs.
        num_grads: slots of dK and dV.
        forward: slot of each (sequence, virtual stage) in its forward.
        backward: slot in its backward.
        grads: slot of its dK and dV.
    """

    num_kv: int
    num_grads: int
    forward: dict[tuple[int, int], int]
    backward: dict[tuple[int, int], int]
    grads: dict[tuple[int, int], int]


def prefix_slots(table: Table, kv: str, *, train: bool = True) -> PrefixSlots:
    """Returns slots for the keys and values of prefixes; see `table.PrefixPeaks` for how long each is held.

    Args:
        table: a whole table.
        kv: where keys and values are; see `StashPlan`.
        train: whether there are backwards.
    """
    ticks, last = table.unit_ticks, table.num_chunks - 1
    kv_spans: dict[int, dict[Hashable, tuple[int, int]]] = {stage: {} for stage in range(table.num_stages)}
    grad_spans: dict[int, dict[Hashable, tuple[int, int]]] = {stage: {} for stage in range(table.num_stages)}
    for sequence, virtual_stage in product(range(table.num_sequences), range(table.num_virtual_stages)):
        key, stage = (sequence, virtual_stage), virtual_stage % table.num_stages
        first, end = (ticks[Unit("F", sequence, chunk, virtual_stage)] for chunk in (0, last))
        if not train:
            kv_spans[stage]["F", key] = first, end
            continue
        begin, done = (ticks[Unit("B", sequence, chunk, virtual_stage)] for chunk in (last, 0))
        grad_spans[stage][key] = (begin if table.passes_groups_in_turn else first), done
        behind = Unit("B", sequence, last, virtual_stage + table.num_stages)
        if kv == "keep" or (behind not in ticks and kv != "recompute"):
            kv_spans[stage]["FB", key] = first, done
        else:
            kv_spans[stage]["F", key] = first, end
            kv_spans[stage]["B", key] = begin if kv == "recompute" else ticks[behind], done
    (num_kv, slots), (num_grads, grads) = color_stages(kv_spans), color_stages(grad_spans)
    forward, backward = ({key: slot for (passes, key), slot in slots.items() if op in passes} for op in "FB")
    return PrefixSlots(num_kv, num_grads, forward, backward, grads)


def head_slots(table: Table) -> tuple[int, dict[tuple[int, int], int]]:
    """Returns the number of head gradients that wait at once, from H to the chunk's first B, and a slot for each.

    Returns:
        The number of slots and the slot of each (sequence, chunk).
    """
    ticks = table.unit_ticks
    spans: dict[Hashable, tuple[int, int]] = {
        (unit.sequence, unit.chunk): (tick, ticks[Unit("B", unit.sequence, unit.chunk, unit.virtual_stage)])
        for unit, tick in ticks.items()
        if unit.op == "H"
    }
    return color_intervals(spans)


def stash_slots(table: Table, key: Callable[[Unit], Class]) -> dict[Class, tuple[int, dict[UnitKey, int]]]:
    """Returns slots for the stashes of each class of units, held from the unit's F tick to its B tick.

    Args:
        key: the class of an F unit; only stashes of one class share a buffer.

    Returns:
        For each class, the number of slots, the most any stage needs, and the slot of each
        (stage, sequence, chunk, virtual stage).
    """
    classes: dict[Class, dict[int, list[Stay]]] = {}
    for unit, stay in _stays(table):
        classes.setdefault(key(unit), {}).setdefault(stay[0][0], []).append(stay)
    return {name: _most_slots(stages.values()) for name, stages in classes.items()}


def _stays(table: Table) -> list[tuple[Unit, Stay]]:
    """Returns for each F unit how long its stash stays, by the tick in which it comes."""
    ticks = table.unit_ticks
    stays = []
    for unit, tick in ticks.items():
        if unit.op == "F":
            _, sequence, chunk, virtual_stage = unit
            end = ticks[Unit("B", sequence, chunk, virtual_stage)]
            stays.append((unit, ((virtual_stage % table.num_stages, sequence, chunk, virtual_stage), (tick, end))))
    return stays


def _most_slots(stages: Iterable[list[Stay]]) -> tuple[int, dict[UnitKey, int]]:
    colored = [_color_sorted(stays) for stays in stages]
    slots = {key: slot for _, found in colored for key, slot in found.items()}
    return max(count for count, _ in colored), slots


def color_stages(stages: dict[int, dict[Hashable, tuple[int, int]]]) -> tuple[int, dict]:
    """Gives the intervals of each stage slots; returns the most slots of any stage, and the slot of each key."""
    colored = [color_intervals(spans) for spans in stages.values()]
    slots = {key: slot for _, found in colored for key, slot in found.items()}
    return max(count for count, _ in colored), slots
