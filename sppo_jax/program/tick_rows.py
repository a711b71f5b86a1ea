"""The table of numbers of a program: for each tick and stage, who does what, and in which slot or row.

No jax here.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sppo_jax.plan.plan import Plan
from sppo_jax.program.share_trips import ShareTrips
from sppo_jax.program.stash import StashClass
from sppo_jax.schedule.slots import PrefixSlots
from sppo_jax.schedule.table import Table, Unit
from sppo_jax.schedule.turns import Turns
from sppo_jax.schedule.waiting import Room

FIELDS = (
    "active",  # 1 where the stage has a unit in this tick
    "sequence",
    "start",  # first token of the chunk, over the whole seq axis
    "length",  # tokens of the chunk, over the whole seq axis
    "group",  # which of the stage's groups of layers
    "weight_slot",  # of the group's weights; the group itself where weights are resident
    "sum_slot",  # of the sums of the group's gradients (B); the group itself where weights are resident
    "gathers",  # 1 where a group's weights are gathered before the unit: the group, and the slot that they come to
    "gather_group",
    "gather_slot",
    "scatters",  # 1 where a group's sums are scattered after the unit: the group, and the slot that they leave
    "scatter_group",
    "scatter_slot",
    "fetch_group",  # the part of weights that comes from the host in this tick, where parameters wait there
    "fetch_part",
    "come",  # how many parts of the weights to gather have come
    "leave_group",  # the part of gradients that leaves for the host (B)
    "leave_part",
    "left_group",  # the group whose sums were scattered before, and how many of its parts have left
    "left",
    "first",  # 1 where the virtual stage is the first one (takes the embedding)
    "last",  # 1 where it is the last one (gives to the head)
    "sequence_slot",  # of what a sequence in flight has once: its tags
    "kv_slot",  # of the keys and values of the sequence on the virtual stage
    "grad_slot",  # of their gradients (B)
    "waits",  # 1 where the unit's input is in the waiting room, not in the register
    "wait_slot",  # where the input waits
    "arrive_slot",  # where what reaches the stage at the end of the tick waits
    "rebuild_start",  # as `start`, `length`, `group`, `kv_slot` and `stash_slot`, of the keys and values made again
    "rebuild_length",
    "rebuild_group",
    "rebuild_weight_slot",
    "rebuild_kv_slot",
    "rebuild_stash_slot",
    "stash_slot",
    "head_slot",
    "write_row",  # row on the host of the stash that this tick writes (made one compute tick before)
    "fetch_row",  # row on the host of the stash that this tick fetches (used one compute tick later)
    "refetch_row",  # the same of the stash whose inputs this tick fetches (to rebuild keys and values)
    "write_short",  # of the rows before each of these three, how many are short: see `stash.merged_classes`
    "fetch_short",
    "refetch_short",
    "attends_again",  # 1 where backward computes attention again, in a tick that may or may not
    "put_row",  # row on the host where what came in the compute tick before waits from this tick on
    "take_row",  # row on the host whose chunk this tick fetches for the next compute tick, or the head before that one
)
STASH_ROWS = ("write_row", "fetch_row", "refetch_row")
SHORT_ROWS = ("write_short", "fetch_short", "refetch_short")
HOST_ROWS = (*STASH_ROWS, *SHORT_ROWS, "put_row", "take_row")
FLAGS = ("gathers", "scatters", "attends_again")  # the same for all stages


class Copies(NamedTuple):
    """Of each tick that writes to or fetches from the host: the F tick written, fetched for a B, or for a rebuild."""

    writes: dict[int, int]
    fetches: dict[int, int]
    refetches: dict[int, int]


class Slots(NamedTuple):
    """The number of slots of each buffer, and which slot each thing has; see `plan.slots`.

    `host` has the row on the host of each tick, `short` how many rows before it are short; see `plan.host_rows`.
    """

    stash: dict[StashClass, tuple[int, dict]]
    host: dict[int, int] | None
    short: dict[int, int]
    sequences: tuple[int, dict]
    prefixes: PrefixSlots
    waiting: tuple[int, dict]
    heads: tuple[int, dict]
    turns: Turns | None


def make_rows(
    plan: Plan, table: Table, of_tick: Sequence[StashClass | None], slots: Slots, copies: Copies
) -> dict[str, np.ndarray]:
    """Makes the rows of a program, but for what the other functions fill in.

    Args:
        plan: the plan.
        table: its table.
        of_tick: class of the stash that each tick makes or uses.
        slots: where each thing lies.
        copies: what each tick copies.

    Returns:
        For each of FIELDS an int32 array [ticks, stages].
    """
    rows = {name: np.zeros((len(table.ticks), table.num_stages), np.int32) for name in FIELDS}
    # An idle stage writes behind the sequence, where there is space for it.
    rows["start"][:] = rows["rebuild_start"][:] = plan.sequence_length
    rows["arrive_slot"][:] = slots.waiting[0]  # the trash slot
    prefixes = slots.prefixes
    for index, tick in enumerate(table.ticks):
        made = of_tick[index]
        rows["stash_slot"][index] = slots.stash[made][0] if made is not None else 0  # the trash slot
        for stage, unit in enumerate(tick.units):
            if unit is None:
                continue
            values = {
                "active": 1,
                "sequence": unit.sequence,
                "start": table.chunk_starts[unit.chunk],
                "length": table.chunk_lengths[unit.chunk],
                "group": unit.virtual_stage // table.num_stages,
                "first": unit.virtual_stage == 0,
                "last": unit.virtual_stage == table.num_virtual_stages - 1,
                "sequence_slot": slots.sequences[1][stage, unit.sequence],
                "head_slot": slots.heads[1][unit.sequence, unit.chunk],
            }
            if tick.is_compute:
                of_pass, key = (
                    (prefixes.forward, prefixes.backward)[tick.kind == "B"],
                    (unit.sequence, unit.virtual_stage),
                )
                values |= {"kv_slot": of_pass.get(key, 0), "grad_slot": prefixes.grads.get(key, 0)}
                values |= _turn_slots(unit, table, slots.turns)
            if unit in slots.waiting[1]:
                values |= {"waits": 1, "wait_slot": slots.waiting[1][unit]}
            if made is not None:
                values["stash_slot"] = slots.stash[made][1][stage, unit.sequence, unit.chunk, unit.virtual_stage]
            for name, value in values.items():
                rows[name][index, stage] = value
    for unit, slot in slots.waiting[1].items():
        rows["arrive_slot"][table.waits[unit][0], table.waits_at(unit)] = slot
    for name, shorter, others in zip(STASH_ROWS, SHORT_ROWS, copies, strict=True):
        for index, other in others.items():
            rows[name][index] = rows["stash_slot"][other] if slots.host is None else slots.host[other]
            rows[shorter][index] = slots.short.get(other, 0)
    changes = {"gather": slots.turns.gathers, "scatter": slots.turns.scatters} if slots.turns else {}
    for name, of_change in changes.items():
        for index, (group, slot) in of_change.items():
            rows[f"{name}s"][index], rows[f"{name}_group"][index], rows[f"{name}_slot"][index] = 1, group, slot
    return rows


def _turn_slots(unit: Unit, table: Table, turns: Turns | None) -> dict[str, int]:
    """Returns where a unit finds the weights of its group, and where a backward adds its gradients."""
    group = unit.virtual_stage // table.num_stages
    if turns is None:
        return {"weight_slot": group, "sum_slot": group}
    return {"weight_slot": turns.weight_slot(unit, table), "sum_slot": turns.sum_slot(unit, table)}


def add_rebuilds(
    rows: dict[str, np.ndarray],
    table: Table,
    rebuilds: dict[int, int],
    slots: Slots,
    of_tick: Sequence[StashClass | None],
) -> None:
    """Fills in the rows of keys and values that are made again."""
    for index, source in rebuilds.items():
        of_class = slots.stash[of_tick[source]][1]  # type: ignore[index]
        for stage, backward in enumerate(table.ticks[index].units):
            unit = rebuilt_unit(backward, table)
            if unit is None:
                continue
            values = {
                "rebuild_start": table.chunk_starts[unit.chunk],
                "rebuild_length": table.chunk_lengths[unit.chunk],
                "rebuild_group": unit.virtual_stage // table.num_stages,
                # The weights that the backward of this group will find.
                "rebuild_weight_slot": _turn_slots(unit._replace(kind="B"), table, slots.turns)["weight_slot"],
                "rebuild_kv_slot": slots.prefixes.backward[unit.sequence, unit.virtual_stage],
                "rebuild_stash_slot": of_class[(stage, *unit[1:])],
            }
            for name, value in values.items():
                rows[name][index, stage] = value


def add_room(rows: dict[str, np.ndarray], table: Table, room: Room) -> None:
    """Fills in the rows of the waiting room on the host."""
    if not room.num_rows:
        return
    for unit, (_, used) in table.waits.items():
        rows["waits"][used, table.waits_at(unit)] = 1
    for name, of_tick in (("put_row", room.puts), ("take_row", room.takes)):
        for index, row in of_tick.items():
            rows[name][index] = row


def add_trips(rows: dict[str, np.ndarray], trips: ShareTrips | None) -> None:
    """Fills in what comes from the host and leaves for it where parameters wait there."""
    if trips is None:
        return
    for names, of_tick in (
        (("fetch_group", "fetch_part"), trips.fetches),
        (("leave_group", "leave_part"), trips.writes),
        (("left_group", "left"), trips.left),
    ):
        for index, values in of_tick.items():
            for name, value in zip(names, values, strict=True):
                rows[name][index] = value
    for index, count in trips.come.items():
        rows["come"][index] = count


def rebuilt_unit(unit: Unit | None, table: Table) -> Unit | None:
    """Returns the forward whose keys and values are made again in the tick of a backward."""
    if unit is None or unit.virtual_stage < table.num_stages:
        return None
    return unit._replace(kind="F", virtual_stage=unit.virtual_stage - table.num_stages)
