"""From a Plan to a program: the static shape of every tick, and a table of numbers that says who does what in it.

Everything that a compiled tick depends on is its `TickSpec`; everything else (sequence, chunk, slots) is data, a row of
int32 per stage. Ticks of one spec share a scan body. No jax here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from sppo_jax.plan.fold import fold
from sppo_jax.plan.plan import Plan, StashPlan
from sppo_jax.plan.ring import AttentionShape, Ring, RingPasses
from sppo_jax.plan.slots import head_slots, kv_slots, stash_slots
from sppo_jax.plan.stash import StashClass, stash_classes
from sppo_jax.plan.table import Table

FIELDS = (
    "active",  # 1 where the stage has a unit in this tick
    "sequence",
    "start",  # first token of the chunk, over the whole seq axis
    "length",  # tokens of the chunk, over the whole seq axis
    "group",  # which of the stage's groups of layers
    "first",  # 1 where the virtual stage is the first one (takes the embedding)
    "last",  # 1 where it is the last one (gives to the head)
    "kv_slot",
    "stash_slot",
    "head_slot",
    "write_slot",  # host slot of the stash that this tick writes (made one compute tick before)
    "fetch_slot",  # host slot of the stash that this tick fetches (used one compute tick later)
)


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
        has_ends: whether it looks up embeddings (F), or gathers the head's dX and adds to the embedding's gradient (B).
    """

    kind: str
    tokens: int
    stash: StashClass | None = None
    write: StashClass | None = None
    fetch: StashClass | None = None
    passes: RingPasses = RingPasses()
    has_ends: bool = True


@dataclass(frozen=True)
class Program:
    """A Plan made executable.

    Args:
        items: nested loops of TickSpecs.
        rows: for each of FIELDS an int32 array [ticks, stages].
        classes: number of slots of each stash class.
        num_kv_slots: sequences whose keys and values a stage holds.
        num_head_slots: head gradients that wait at once.
        max_tokens: the most tokens any tick has on one device.
    """

    items: tuple
    rows: dict[str, np.ndarray]
    classes: dict[StashClass, int]
    num_kv_slots: int
    num_head_slots: int
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
    classes = stash_classes(table, plan.stash, plan.mesh.seq) if train else ()
    of_tick = [classes[group] if train and group is not None else None for group in table.tick_groups]
    slots = _stash_slots(table, classes) if train else {}
    copies = _copies(table, of_tick)
    specs = _specs(plan, table, ring_of(plan, shape), of_tick, copies)
    rows = _rows(plan, table, of_tick, slots, copies)
    if not train:
        chosen = [index for index, tick in enumerate(table.ticks) if tick.kind != "B"]
        specs, rows = [specs[i] for i in chosen], {name: value[chosen] for name, value in rows.items()}
    return Program(
        items=fold(specs),
        rows=rows,
        classes={name: count for name, (count, _) in slots.items()},
        num_kv_slots=kv_slots(table)[0],
        num_head_slots=head_slots(table)[0],
        max_tokens=max(spec.tokens for spec in specs),
    )


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
    """Of each tick that writes to or fetches from the host: the F tick written, the B tick fetched for."""

    writes: dict[int, int]
    fetches: dict[int, int]


def _stash_slots(table: Table, classes: Sequence[StashClass]) -> dict[StashClass, tuple[int, dict]]:
    groups, diagonals = table.diagonal_groups, table.unit_diagonals
    return stash_slots(table, lambda unit: classes[groups[diagonals[unit.sequence, unit.chunk, unit.virtual_stage]]])


def _copies(table: Table, of_tick: Sequence[StashClass | None]) -> _Copies:
    """Writes a stash during the next compute tick, and fetches the stash during the tick before its backward."""
    compute = [index for index, tick in enumerate(table.ticks) if tick.is_compute]
    copies = _Copies({}, {})
    for place, index in enumerate(compute):
        made = of_tick[index]
        if made is None or not made.uses_host:
            continue
        # A stash that is written is read, and one that is read was written: there are neighbours.
        if table.ticks[index].kind == "F":
            copies.writes[compute[place + 1]] = index
        else:
            copies.fetches[compute[place - 1]] = index
    return copies


def _specs(
    plan: Plan, table: Table, ring: Ring, of_tick: Sequence[StashClass | None], copies: _Copies
) -> list[TickSpec]:
    specs = []
    for index, (tick, shape) in enumerate(zip(table.ticks, table.tick_shapes, strict=True)):
        tokens = shape.tokens // plan.mesh.seq
        if not tick.is_compute:
            specs.append(TickSpec(tick.kind, tokens))
            continue
        written, fetched = copies.writes.get(index), copies.fetches.get(index)
        specs.append(
            TickSpec(
                kind=tick.kind,
                tokens=tokens,
                stash=of_tick[index],
                write=None if written is None else of_tick[written],
                fetch=None if fetched is None else of_tick[fetched],
                passes=_performed(ring.passes(tokens, shape.reach), tick.kind, plan.stash),
                has_ends=shape.has_ends,
            )
        )
    return specs


def _performed(passes: RingPasses, kind: str, stash: StashPlan) -> RingPasses:
    """Keeps only what a tick performs, so that ticks that differ in nothing else share a body."""
    forward = passes.forward if kind == "F" or stash.attention == "recompute" else RingPasses.forward
    backward = passes.backward if kind == "B" else RingPasses.backward
    return RingPasses(forward, backward, passes.bound if "kv" in (forward, backward) else 0)


def _rows(
    plan: Plan, table: Table, of_tick: Sequence[StashClass | None], slots: dict, copies: _Copies
) -> dict[str, np.ndarray]:
    rows = {name: np.zeros((len(table.ticks), table.num_stages), np.int32) for name in FIELDS}
    rows["start"][:] = plan.sequence_length  # an idle stage writes behind the sequence, where there is space for it
    kv, heads = kv_slots(table)[1], head_slots(table)[1]
    for index, tick in enumerate(table.ticks):
        made = of_tick[index]
        rows["stash_slot"][index] = slots[made][0] if made is not None else 0  # the trash slot
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
                "kv_slot": kv[stage, unit.sequence],
                "head_slot": heads[unit.sequence, unit.chunk],
            }
            if made is not None:
                values["stash_slot"] = slots[made][1][stage, unit.sequence, unit.chunk, unit.virtual_stage]
            for name, value in values.items():
                rows[name][index, stage] = value
    for name, others in zip(("write_slot", "fetch_slot"), copies, strict=True):
        for index, other in others.items():
            rows[name][index] = rows["stash_slot"][other]
    return rows
