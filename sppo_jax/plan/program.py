"""From a Plan to a program: the static shape of every tick, and a table of numbers that says who does what in it.

Everything that a compiled tick depends on is its `TickSpec`; everything else (sequence, chunk, slots) is data, a row of
int32 per stage. Ticks of one spec share a scan body. No jax here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from sppo_jax.plan.fold import fold, num_segments
from sppo_jax.plan.host_rows import host_rows, refetching_tick
from sppo_jax.plan.plan import Plan, StashPlan
from sppo_jax.plan.ring import AttentionShape, Ring, RingPasses
from sppo_jax.plan.share_trips import ShareTrips, share_trips
from sppo_jax.plan.slots import PrefixSlots, head_slots, prefix_slots, sequence_slots, stash_slots, waiting_slots
from sppo_jax.plan.stash import StashClass, stash_classes
from sppo_jax.plan.table import Table, Unit
from sppo_jax.plan.turns import Turns, turns_of
from sppo_jax.plan.waiting import Room, waiting_room

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
    "put_row",  # row on the host where what came in the compute tick before waits from this tick on
    "take_row",  # row on the host whose chunk this tick fetches for the next compute tick, or the head before that one
)
STASH_ROWS = ("write_row", "fetch_row", "refetch_row")
HOST_ROWS = (*STASH_ROWS, "put_row", "take_row")
FLAGS = ("gathers", "scatters")  # the same for all stages


@dataclass(frozen=True)
class TickSpec:
    """The static shape of a tick.

    Args:
        kind: "F", "B" or "H".
        tokens: of the tick on one device, padding included.
        stash: class of the stash made (F) or used (B); None for H, or where nothing is stashed.
        write: class of the stash that is copied to the host meanwhile; None for none.
        fetch: class of the stash that is copied back meanwhile; None for none.
        passes: what travels on the ring.
        embeds: whether it looks up embeddings (F), or adds to the embedding's gradient (B).
        has_ends: where tables are gathered, whether it embeds (F), or gathers the head's dX (B); elsewhere whether it
            does any of these, so that few bodies differ.
        rebuild: class of the stash from which keys and values of the group before are written again (B); None for none.
        refetch: class of the stash whose inputs, or keys and values, are copied back for the next tick's rebuild; None
            for none.
        gathers: whether the weights of a group of layers are gathered first where the row says so. A tick that always
            gathers would have a body of its own, and would cut loops short.
        scatters: whether the gradient sums of a group of layers are scattered at the end where the row says so.
        streams: whether a part of a group's weights comes from the host, and (B) a part of gradients leaves for it.
        put: the kind of the compute tick before, if what came in it is written to the waiting room on the host; else
            None.
        take: whether a chunk is fetched from the waiting room on the host.
        waited: whether the compute tick before has fetched the input of some unit of this tick from there.
    """

    kind: str
    tokens: int
    stash: StashClass | None = None
    write: StashClass | None = None
    fetch: StashClass | None = None
    passes: RingPasses = RingPasses()
    embeds: bool = True
    has_ends: bool = True
    rebuild: StashClass | None = None
    refetch: StashClass | None = None
    gathers: bool = False
    scatters: bool = False
    streams: bool = False
    put: str | None = None
    take: bool = False
    waited: bool = False


@dataclass(frozen=True)
class Program:
    """A Plan made executable.

    Args:
        items: nested loops of TickSpecs.
        rows: for each of FIELDS an int32 array [ticks, stages].
        classes: number of slots of each stash class.
        host_rows: number of rows of each stash class on the host.
        num_sequence_slots: sequences that a stage has in flight.
        num_kv_slots: prefixes, each of a sequence on a virtual stage, whose keys and values a stage holds.
        num_grad_slots: prefixes whose dK and dV a stage holds.
        num_waiting_slots: chunks that wait at once between two groups of layers on the device.
        num_waiting_rows: rows on the host for chunks that wait between two groups of layers.
        num_head_slots: head gradients that wait at once.
        num_weight_slots: groups of layers whose weights a stage holds.
        num_sum_slots: groups of layers whose gradient sums a stage holds.
        num_parts: parts in which a group's weights come from the host; 0 where parameters are on the device.
        max_tokens: the most tokens any tick has on one device.
    """

    items: tuple
    rows: dict[str, np.ndarray]
    classes: dict[StashClass, int]
    host_rows: dict[StashClass, int]
    num_sequence_slots: int
    num_kv_slots: int
    num_grad_slots: int
    num_waiting_slots: int
    num_waiting_rows: int
    num_head_slots: int
    num_weight_slots: int
    num_sum_slots: int
    num_parts: int
    max_tokens: int


def lower(plan: Plan, shape: AttentionShape, *, train: bool = True) -> Program:
    """Makes a plan executable.

    Args:
        plan: the plan, already checked.
        shape: of the attention on one device.
        train: with backward and stash; else only F and H ticks, which keep their order.

    Returns:
        The program.
    """
    table = plan.table()
    ticks = _ticks_of(table, plan.stash, plan.mesh.seq, train=train)
    classes, of_tick, room, rebuilds, copies = ticks
    on_host = train and plan.stash.waiting == "host"
    slots = _Slots(
        stash=_stash_slots(table, classes) if train else {},
        host=host_rows(table, of_tick),
        sequences=sequence_slots(table),
        prefixes=prefix_slots(table, plan.stash.kv, train=train),
        # An evaluation has room on the device: no stash, and no gradients of keys and values.
        waiting=(0, {}) if on_host else waiting_slots(table),
        heads=head_slots(table),
        turns=turns_of(table, plan.stash.kv, train=train) if plan.weights == "gathered" else None,
    )
    trips = share_trips(table, slots.turns) if train and slots.turns and plan.optimizer == "host" else None
    specs = _specs(table, ring_of(plan, shape), plan.mesh.seq, plan.weights, ticks)
    if trips is not None:
        specs = [replace(spec, streams=spec.kind != "H") for spec in specs]
    rows = _rows(plan, table, of_tick, slots, copies)
    _add_trips(rows, trips)
    _add_room(rows, table, room)
    _add_rebuilds(rows, table, rebuilds, slots, of_tick)
    if not train:
        chosen = [index for index, tick in enumerate(table.ticks) if tick.kind != "B"]
        specs, rows = [specs[i] for i in chosen], {name: value[chosen] for name, value in rows.items()}
    return Program(
        items=fold(specs),
        rows=rows,
        classes={name: count for name, (count, _) in slots.stash.items()},
        host_rows=table.host_rows(classes) if train else {},
        num_sequence_slots=slots.sequences[0],
        num_kv_slots=slots.prefixes.num_kv,
        num_grad_slots=slots.prefixes.num_grads,
        num_waiting_slots=slots.waiting[0],
        num_waiting_rows=room.num_rows,
        num_head_slots=slots.heads[0],
        num_weight_slots=slots.turns.num_weights if slots.turns else table.num_groups,
        num_sum_slots=slots.turns.num_sums if slots.turns else table.num_groups,
        num_parts=trips.num_parts if trips is not None else 0,
        max_tokens=max(spec.tokens for spec in specs),
    )


def num_bodies(table: Table, stash: StashPlan, ring: Ring, seq: int, weights: str) -> int:
    """Returns the number of bodies of ticks that a training step compiles.

    Args:
        table: the schedule, or its outline, whose repeats are counted once.
        stash: the places, with alpha.
        ring: what travels on the ring.
        seq: devices of a stage.
        weights: what a device holds of its stage's layers; see `plan.Plan`.
    """
    return num_segments(fold(_specs(table, ring, seq, weights, _ticks_of(table, stash, seq, train=True))))


def ring_of(plan: Plan, shape: AttentionShape) -> Ring:
    """Returns the ring of a plan."""
    return Ring(
        members=plan.ring,
        ulysses=plan.ulysses,
        length=plan.sequence_length,
        asked=plan.ring_pass,
        kernel=plan.kernel,
        shape=shape,
    )


class _Copies(NamedTuple):
    """Of each tick that writes to or fetches from the host: the F tick written, fetched for a B, or for a rebuild."""

    writes: dict[int, int]
    fetches: dict[int, int]
    refetches: dict[int, int]


class _Ticks(NamedTuple):
    """The class of each diagonal group and of each tick, the waiting room, and what ticks rebuild and copy."""

    classes: tuple[StashClass, ...]
    of_tick: list[StashClass | None]
    room: Room
    rebuilds: dict[int, int]
    copies: _Copies


def _ticks_of(table: Table, stash: StashPlan, seq: int, *, train: bool) -> _Ticks:
    classes = stash_classes(table, stash, seq) if train else ()
    of_tick = [classes[group] if train and group is not None else None for group in table.tick_groups]
    room = waiting_room(table) if train and stash.waiting == "host" else Room(0, {}, {})
    rebuilds = _rebuilds(table) if train and stash.kv in ("rebuild", "host") else {}
    return _Ticks(classes, of_tick, room, rebuilds, _copies(table, of_tick, rebuilds, stash.kv))


class _Slots(NamedTuple):
    """The number of slots of each buffer, and which slot each thing has; see `plan.slots`."""

    stash: dict[StashClass, tuple[int, dict]]
    host: dict[int, int] | None
    sequences: tuple[int, dict]
    prefixes: PrefixSlots
    waiting: tuple[int, dict]
    heads: tuple[int, dict]
    turns: Turns | None


def _stash_slots(table: Table, classes: Sequence[StashClass]) -> dict[StashClass, tuple[int, dict]]:
    groups, diagonals = table.diagonal_groups, table.unit_diagonals
    return stash_slots(table, lambda unit: classes[groups[diagonals[unit.sequence, unit.chunk, unit.virtual_stage]]])


def _rebuilds(table: Table) -> dict[int, int]:
    """Returns of each B tick in which keys and values are made again the F tick that made them first.

    While a chunk passes a group backward, its keys and values in the group before are made again.
    """
    found = {}
    for index, tick in enumerate(table.ticks):
        units = [_rebuilt(unit, table) for unit in tick.units] if tick.kind == "B" else []
        sources = {table.unit_ticks[unit] for unit in units if unit is not None}
        if sources:
            (found[index],) = sources
    return found


def _rebuilt(unit: Unit | None, table: Table) -> Unit | None:
    """Returns the forward whose keys and values are made again in the tick of a backward."""
    if unit is None or unit.virtual_stage < table.num_stages:
        return None
    return unit._replace(kind="F", virtual_stage=unit.virtual_stage - table.num_stages)


def _copies(table: Table, of_tick: Sequence[StashClass | None], rebuilds: dict[int, int], kv: str) -> _Copies:
    """Writes a stash during the next compute tick, and fetches the stash during the tick before its backward."""
    compute = [index for index, tick in enumerate(table.ticks) if tick.is_compute]
    copies = _Copies({}, {}, {})
    for place, index in enumerate(compute):
        made = of_tick[index]
        source = of_tick[rebuilds[index]] if index in rebuilds else None
        if source is not None and (source.host_kv if kv == "host" else source.host_inputs):
            copies.refetches[refetching_tick(table, index)] = rebuilds[index]
        if made is None or not made.uses_host:
            continue
        # A stash that is written is read, and one that is read was written: there are neighbours.
        if table.ticks[index].kind == "F":
            copies.writes[compute[place + 1]] = index
        elif made.returns:
            copies.fetches[compute[place - 1]] = index
    return copies


def _specs(table: Table, ring: Ring, seq: int, weights: str, ticks: _Ticks) -> list[TickSpec]:
    specs = []
    _, of_tick, room, rebuilds, copies = ticks

    def class_of(index: int | None) -> StashClass | None:
        return None if index is None else of_tick[index]

    for index, (tick, shape) in enumerate(zip(table.ticks, table.tick_shapes, strict=True)):
        tokens = shape.tokens // seq
        if not tick.is_compute:
            specs.append(TickSpec(tick.kind, tokens, refetch=class_of(copies.refetches.get(index))))
            continue
        embeds = has_ends = shape.has_ends
        if weights == "gathered":
            met = {unit.virtual_stage for unit in tick.units if unit is not None}
            embeds, has_ends = 0 in met, (0 if tick.kind == "F" else table.num_virtual_stages - 1) in met
        specs.append(
            TickSpec(
                kind=tick.kind,
                tokens=tokens,
                stash=of_tick[index],
                write=class_of(copies.writes.get(index)),
                fetch=class_of(copies.fetches.get(index)),
                passes=_performed(ring.passes(tokens, shape.reach), tick.kind, of_tick[index]),
                embeds=embeds,
                has_ends=has_ends,
                rebuild=class_of(rebuilds.get(index)),
                refetch=class_of(copies.refetches.get(index)),
            )
        )
    if weights == "gathered":
        specs = [replace(spec, gathers=spec.kind != "H", scatters=spec.kind == "B") for spec in specs]
    return _with_room(specs, table, room)


def _with_room(specs: list[TickSpec], table: Table, room: Room) -> list[TickSpec]:
    """Adds what ticks do with the waiting room on the host."""
    if not room.num_rows:
        return specs
    found, before, waited = [], None, False
    for index, (spec, tick) in enumerate(zip(specs, table.ticks, strict=True)):
        if tick.is_compute:
            spec = replace(spec, put=before if index in room.puts else None, take=index in room.takes)
        found.append(replace(spec, waited=waited))
        if tick.is_compute:
            before, waited = tick.kind, spec.take
    return found


def _add_room(rows: dict[str, np.ndarray], table: Table, room: Room) -> None:
    """Fills in the rows of the waiting room on the host."""
    if not room.num_rows:
        return
    for unit, (_, used) in table.waits.items():
        rows["waits"][used, table.waits_at(unit)] = 1
    for name, of_tick in (("put_row", room.puts), ("take_row", room.takes)):
        for index, row in of_tick.items():
            rows[name][index] = row


def _add_trips(rows: dict[str, np.ndarray], trips: ShareTrips | None) -> None:
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


def _performed(passes: RingPasses, kind: str, stash: StashClass | None) -> RingPasses:
    """Keeps only what a tick performs, so that ticks that differ in nothing else share a body."""
    forward = passes.forward if kind == "F" or (stash is not None and stash.recomputes) else RingPasses.forward
    backward = passes.backward if kind == "B" else RingPasses.backward
    return RingPasses(forward, backward, passes.bound if "kv" in (forward, backward) else 0)


def _rows(
    plan: Plan, table: Table, of_tick: Sequence[StashClass | None], slots: _Slots, copies: _Copies
) -> dict[str, np.ndarray]:
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
    for name, others in zip(STASH_ROWS, copies, strict=True):
        for index, other in others.items():
            rows[name][index] = rows["stash_slot"][other] if slots.host is None else slots.host[other]
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


def _add_rebuilds(
    rows: dict[str, np.ndarray],
    table: Table,
    rebuilds: dict[int, int],
    slots: _Slots,
    of_tick: Sequence[StashClass | None],
) -> None:
    """Fills in the rows of keys and values that are made again."""
    for index, source in rebuilds.items():
        of_class = slots.stash[of_tick[source]][1]  # type: ignore[index]
        for stage, backward in enumerate(table.ticks[index].units):
            unit = _rebuilt(backward, table)
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
