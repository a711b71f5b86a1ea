"""From a Plan to a program: the static shape of every tick, and a table of numbers that says who does what in it.

Everything that a compiled tick depends on is its `TickSpec`; everything else (sequence, chunk, slots) is data, a row of
int32 per stage (`tick_rows.py`). Ticks of one spec share a scan body. No jax here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from sppo_jax.plan.parts import StashPlan
from sppo_jax.plan.plan import Plan
from sppo_jax.program.counters import with_short_loops
from sppo_jax.program.fold import fold, num_segments
from sppo_jax.program.host_rows import host_rows, refetching_tick, short_rows_before
from sppo_jax.program.ring import AttentionShape, Ring, RingPasses
from sppo_jax.program.share_trips import share_trips
from sppo_jax.program.stash import StashClass, merged_classes, short_rows, stash_classes
from sppo_jax.program.tick_rows import Copies, Slots, add_rebuilds, add_room, add_trips, make_rows, rebuilt_unit
from sppo_jax.schedule.slots import head_slots, prefix_slots, sequence_slots, stash_slots, waiting_slots
from sppo_jax.schedule.table import Table
from sppo_jax.schedule.turns import turns_of
from sppo_jax.schedule.waiting import Room, waiting_room


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
        attends: whether attention is computed again where the row says so (B).
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
    attends: bool = False
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
        rows: for each of `tick_rows.FIELDS` an int32 array [ticks, stages].
        classes: number of slots of each stash class.
        host_rows: number of rows of each stash class on the host.
        short_rows: how many of them, before the last one, are short.
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
    short_rows: dict[StashClass, int]
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
    classes, of_tick, short, num_short, room, rebuilds, copies = ticks
    on_host = train and plan.stash.waiting == "host"
    host = host_rows(table, of_tick)
    slots = Slots(
        stash=_stash_slots(table, classes) if train else {},
        host=host,
        short=short_rows_before(host or {}, of_tick, short),
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
    rows = make_rows(plan, table, of_tick, slots, copies)
    rows["attends_again"][[spec.attends and again for spec, again in zip(specs, short, strict=True)]] = 1
    add_trips(rows, trips)
    add_room(rows, table, room)
    add_rebuilds(rows, table, rebuilds, slots, of_tick)
    if not train:
        chosen = [index for index, tick in enumerate(table.ticks) if tick.kind != "B"]
        specs, rows = [specs[i] for i in chosen], {name: value[chosen] for name, value in rows.items()}
    return Program(
        items=with_short_loops(fold(specs), rows),
        rows=rows,
        classes={name: count for name, (count, _) in slots.stash.items()},
        host_rows=table.host_rows(classes) if train else {},
        short_rows=num_short,
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


class _Ticks(NamedTuple):
    """The class of each diagonal group and of each tick, the waiting room, and what ticks rebuild and copy.

    `short` says of each tick whether the row of its stash on the host is short, `num_short` how many are of each class.
    """

    classes: tuple[StashClass, ...]
    of_tick: list[StashClass | None]
    short: list[bool]
    num_short: dict[StashClass, int]
    room: Room
    rebuilds: dict[int, int]
    copies: Copies


def _ticks_of(table: Table, stash: StashPlan, seq: int, *, train: bool) -> _Ticks:
    alone = stash_classes(table, stash, seq) if train else ()
    merged = merged_classes(table, stash, alone)
    classes = tuple(merged.get(one, one) for one in alone)
    of_tick = [classes[group] if train and group is not None else None for group in table.tick_groups]
    short = [train and group is not None and alone[group] in merged for group in table.tick_groups]
    room = waiting_room(table) if train and stash.waiting == "host" else Room(0, {}, {})
    rebuilds = _rebuilds(table) if train and stash.kv in ("rebuild", "host") else {}
    num_short = short_rows(table, alone, merged)
    return _Ticks(classes, of_tick, short, num_short, room, rebuilds, _copies(table, of_tick, rebuilds, stash.kv))


def _stash_slots(table: Table, classes: Sequence[StashClass]) -> dict[StashClass, tuple[int, dict]]:
    groups, diagonals = table.diagonal_groups, table.unit_diagonals
    return stash_slots(table, lambda unit: classes[groups[diagonals[unit.sequence, unit.chunk, unit.virtual_stage]]])


def _rebuilds(table: Table) -> dict[int, int]:
    """Returns of each B tick in which keys and values are made again the F tick that made them first.

    While a chunk passes a group backward, its keys and values in the group before are made again.
    """
    found = {}
    for index, tick in enumerate(table.ticks):
        units = [rebuilt_unit(unit, table) for unit in tick.units] if tick.kind == "B" else []
        sources = {table.unit_ticks[unit] for unit in units if unit is not None}
        if sources:
            (found[index],) = sources
    return found


def _copies(table: Table, of_tick: Sequence[StashClass | None], rebuilds: dict[int, int], kv: str) -> Copies:
    """Writes a stash during the next compute tick, and fetches the stash during the tick before its backward."""
    compute = [index for index, tick in enumerate(table.ticks) if tick.is_compute]
    copies = Copies({}, {}, {})
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
    _, of_tick, short, _, room, rebuilds, copies = ticks
    mixed = {of_tick[index] for index, is_short in enumerate(short) if is_short}

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
        attends = tick.kind == "B" and of_tick[index] in mixed
        specs.append(
            TickSpec(
                kind=tick.kind,
                tokens=tokens,
                stash=of_tick[index],
                write=class_of(copies.writes.get(index)),
                fetch=class_of(copies.fetches.get(index)),
                attends=attends,
                passes=_performed(ring.passes(tokens, shape.reach), tick.kind, of_tick[index], attends),
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


def _performed(passes: RingPasses, kind: str, stash: StashClass | None, attends: bool) -> RingPasses:
    """Keeps only what a tick performs, so that ticks that differ in nothing else share a body."""
    again = attends or (stash is not None and stash.recomputes)
    forward = passes.forward if kind == "F" or again else RingPasses.forward
    backward = passes.backward if kind == "B" else RingPasses.backward
    return RingPasses(forward, backward, passes.bound if "kv" in (forward, backward) else 0)
