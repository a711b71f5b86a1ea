"""The order of forward, backward and weight-gradient units on each stage, for the schedules of two papers.

"Zero Bubble Pipeline Parallelism" (arXiv 2401.10241) splits a backward into B, the gradients of inputs, and W, the
gradients of weights, which nothing else waits for. "Pipeline Parallelism with Controllable Memory" (arXiv 2405.15362)
repeats a building block: one sequence goes forward and back through two virtual stages a stage, laid out as a V.
Sequences are whole in these schedules.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, product

from sppo_jax.plan.table import Table, Tick, Unit

Costs = Callable[[Unit], float]
# Stages that a pass of the building block is behind the stage before, in slots: F and B down the first and up the
# second virtual stage. V-Min, V-Half and V-ZB differ in nothing else.
OFFSETS = {"V-Min": (1, 1, 1, 1), "V-Half": (2, 1, 2, 1), "V-ZB": (5, 1, 5, 1)}
# A sequence has so many units on a stage: F, B and W of two virtual stages. Each takes one slot.
_PERIOD = 6


@dataclass(frozen=True, kw_only=True)
class Orders:
    """What each stage runs, in order.

    Args:
        stages: the units of each stage; B is the whole backward where there are no W units.
        num_virtual: virtual stages of all stages.
        num_chunks: chunks of a sequence.
    """

    stages: tuple[tuple[Unit, ...], ...]
    num_virtual: int
    num_chunks: int = 1

    @property
    def num_groups(self) -> int:
        return self.num_virtual // len(self.stages)

    @cached_property
    def splits(self) -> bool:
        """Whether the gradients of weights are units of their own."""
        return any(unit.kind == "W" for unit in self.stages[0])

    def growth(self, unit: Unit) -> int:
        """Returns by how many activations a stage holds more after a unit."""
        return {"F": 1, "B": 0 if self.splits else -1, "W": -1}[unit.kind]

    def needed(self, unit: Unit) -> Unit | None:
        """Returns the unit that must be done before a unit can start, apart from those before it on its stage."""
        kind, sequence, chunk, virtual = unit
        if kind == "F":
            return Unit("F", sequence, chunk, virtual - 1) if virtual else None
        if kind == "W":
            return Unit("B", sequence, chunk, virtual)
        if virtual == self.num_virtual - 1:
            return Unit("F", sequence, chunk, virtual)
        return Unit("B", sequence, chunk, virtual + 1)


def one_f_one_b(num_stages: int, num_sequences: int) -> Orders:
    """Returns 1F1B as Megatron runs it: stage s holds at most P - s sequences."""
    stages = []
    for stage in range(num_stages):
        warm = min(num_stages - stage - 1, num_sequences)
        order = [Unit("F", number, 0, stage) for number in range(warm)]
        for number in range(num_sequences):
            order += [Unit("F", warm + number, 0, stage)] if warm + number < num_sequences else []
            order.append(Unit("B", number, 0, stage))
        stages.append(tuple(order))
    return Orders(stages=tuple(stages), num_virtual=num_stages)


def zb1p(num_stages: int, num_sequences: int) -> Orders:
    """Returns ZB1P (ZB-H1): the order of 1F1B, in which the W of stage s come s sequences after their B.

    So every stage holds P sequences, as many as the first one of 1F1B, and the W fill the wait for the last B.
    """
    stages = []
    for stage, order in enumerate(one_f_one_b(num_stages, num_sequences).stages):
        units: list[Unit] = []
        for unit in order:
            units.append(unit)
            if unit.kind == "B" and unit.sequence >= stage:
                units.append(Unit("W", unit.sequence - stage, 0, stage))
        late = range(max(num_sequences - stage, 0), num_sequences)
        stages.append(tuple(units + [Unit("W", number, 0, stage) for number in late]))
    return Orders(stages=tuple(stages), num_virtual=num_stages)


def of_ticks(table: Table, ticks: Sequence[Tick]) -> Orders:
    """Returns the order in which each stage runs the units of a table's ticks, given with or without ticks of W."""
    stages = [tuple(unit for tick in ticks if (unit := tick.units[stage])) for stage in range(table.num_stages)]
    return Orders(stages=tuple(stages), num_virtual=table.num_virtual_stages, num_chunks=table.num_chunks)


def compute_ticks(table: Table) -> list[Tick]:
    """Returns a table's ticks without heads, which stages compute together."""
    return [tick for tick in table.ticks if tick.is_compute]


def with_weight_ticks(table: Table) -> list[Tick]:
    """Returns a table's ticks with W in ticks of their own, each as soon as every stage has a W to run."""
    waiting: list[deque[Unit]] = [deque() for _ in range(table.num_stages)]
    ticks: list[Tick] = []
    for tick in compute_ticks(table):
        ticks.append(tick)
        if tick.kind == "B":
            for queue, unit in zip(waiting, tick.units, strict=True):
                if unit is not None:
                    queue.append(unit._replace(kind="W"))
            if all(waiting):
                ticks.append(Tick("W", tuple(queue.popleft() for queue in waiting)))
    while all(waiting):
        ticks.append(Tick("W", tuple(queue.popleft() for queue in waiting)))
    return ticks


def building_block(num_stages: int, offsets: Sequence[int]) -> list[list[tuple[int, str, int]]]:
    """Returns what a sequence does on each stage of a V: slots with kinds and virtual stages, in order.

    A pass starts on each stage some slots after the stage before, and turns at the ends of the V. The turns are the
    ones that hold activations for the fewest slots of those for which no two passes of the repeated block meet on a
    stage. A W takes the next free slot after its B.

    Args:
        num_stages: pipeline stages, P; virtual stage k >= P lies on stage 2 P - 1 - k.
        offsets: slots from stage to stage of F down, F up, B down and B up.
    """
    blocks = []
    for turns in product(range(1, _PERIOD + 1), repeat=3):
        passes = [_passes(num_stages, stage, offsets, turns) for stage in range(num_stages)]
        if all(len({slot % _PERIOD for slot, *_ in of_stage}) == 4 for of_stage in passes):
            blocks.append([_with_weights(of_stage) for of_stage in passes])
    if not blocks:
        raise ValueError(f"offsets must leave each pass a slot on every stage, got {tuple(offsets)}; change an offset")
    return min(blocks, key=lambda block: (max(map(_held, block)), block[0][-1]))


def _held(block: list[tuple[int, str, int]]) -> int:
    """Returns for how many slots a stage holds the activations of a sequence, those of both virtual stages added."""
    return sum({"F": -slot, "B": 0, "W": slot}[kind] for slot, kind, _ in block)


def _passes(num_stages: int, stage: int, offsets: Sequence[int], turns: Sequence[int]) -> list[tuple[int, str, int]]:
    above, below = num_stages - 1 - stage, stage
    steps = [(below, "F", stage), (above, "F", 2 * num_stages - 1 - stage)]
    steps += [(below, "B", 2 * num_stages - 1 - stage), (above, "B", stage)]
    starts = accumulate(
        ((num_stages - 1) * offset + turn for offset, turn in zip(offsets, turns, strict=False)), initial=0
    )
    return [
        (start + far * offset, kind, virtual)
        for start, offset, (far, kind, virtual) in zip(starts, offsets, steps, strict=True)
    ]


def _with_weights(passes: list[tuple[int, str, int]]) -> list[tuple[int, str, int]]:
    block = list(passes)
    for slot, kind, virtual in passes:
        if kind == "B":
            taken = {other % _PERIOD for other, *_ in block}
            free = next(later for later in range(slot + 1, slot + _PERIOD) if later % _PERIOD not in taken)
            block.append((free, "W", virtual))
    return sorted(block)


def v_schedule(name: str, num_stages: int, num_sequences: int) -> Orders:
    """Returns the building block of V-Min, V-Half or V-ZB (a key of OFFSETS), repeated for each sequence."""
    repeated = []
    for block in building_block(num_stages, OFFSETS[name]):
        slots = [
            (slot + _PERIOD * number, Unit(kind, number, 0, virtual))
            for slot, kind, virtual in block
            for number in range(num_sequences)
        ]
        repeated.append(tuple(unit for _, unit in sorted(slots)))
    return Orders(stages=tuple(repeated), num_virtual=2 * num_stages)


def reorder(orders: Orders, costs: Costs, weights_last: bool = False) -> Orders:
    """Returns the order in which stages that would wait take a later unit that can start, if memory allows.

    A stage holds a unit's activations from its F to its W. No stage may hold more than the fullest stage of the given
    order. A later F must leave room for each F that it overtakes.

    Args:
        orders: the order, in which every unit can start.
        costs: the costs of units.
        weights_last: whether a W also waits for later units that can start.
    """
    stages = [_Stage(orders, order) for order in orders.stages]
    room = _most_held(orders)
    ends: dict[Unit, float] = {}
    free = [0.0] * len(stages)
    now = 0.0
    while any(stage.left for stage in stages):
        for number, stage in enumerate(stages):
            if free[number] <= now and stage.left:
                ready = stage.ready(room, ends, now)
                if ready:
                    kind = min(ready, key=lambda kind: weights_last and kind == "W")
                    unit = stage.take(ready[kind])
                    free[number] = ends[unit] = now + costs(unit)
        now = min((time for time in free if time > now), default=now)
    return _reordered(orders, stages)


def reorder_in_ticks(orders: Orders) -> Orders:
    """Returns the order in which each tick is of the kind that most stages can run, within the memory of the given one.

    A tick of W waits until no other kind has more stages.
    """
    stages = [_Stage(orders, order) for order in orders.stages]
    room = _most_held(orders)
    ends: dict[Unit, float] = {}
    tick = 0
    while any(stage.left for stage in stages):
        ready = [stage.ready(room, ends, tick) for stage in stages]
        kind = max("BFW", key=lambda kind: sum(kind in units for units in ready))
        tick += 1
        for stage, units in zip(stages, ready, strict=True):
            if kind in units:
                ends[stage.take(units[kind])] = tick
    return _reordered(orders, stages)


class _Stage:
    """The units of a stage that are left, those that it has run, and how many activations it holds."""

    def __init__(self, orders: Orders, order: Sequence[Unit]) -> None:
        self.orders, self.left, self.run, self.held = orders, list(order), [], 0

    def ready(self, room: int, ends: Mapping[Unit, float], now: float) -> dict[str, Unit]:
        """Returns the first unit of each kind that can start now and leaves room for the units before it."""
        free = least = room - self.held
        found: dict[str, Unit] = {}
        seen = set()
        for unit in self.left:
            stream = unit.kind, unit.virtual_stage
            if stream not in seen:
                seen.add(stream)
                needed = self.orders.needed(unit)
                if (needed is None or ends.get(needed, math.inf) <= now) and (unit.kind != "F" or least > 0):
                    found.setdefault(unit.kind, unit)
                if len(seen) == _PERIOD:
                    break
            free -= self.orders.growth(unit)
            least = min(least, free)
        return found

    def take(self, unit: Unit) -> Unit:
        self.left.remove(unit)
        self.run.append(unit)
        self.held += self.orders.growth(unit)
        return unit


def _most_held(orders: Orders) -> int:
    return max(max(accumulate(orders.growth(unit) for unit in order)) for order in orders.stages)


def _reordered(orders: Orders, stages: Sequence[_Stage]) -> Orders:
    return replace(orders, stages=tuple(tuple(stage.run) for stage in stages))
