"""From a Plan to a program: the static shape of every tick, and a table of numbers that says who does what in it.

Everything that a compiled tick depends on is its `TickSpec`; everything else (sequence, chunk, slots) is data, a row of
int32 per stage. Ticks of one spec share a scan body. No jax here.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from sppo_jax.plan.diagonals import MIN_HOST_GAP, diagonal_groups, group_gaps, tick_tokens, unit_diagonals
from sppo_jax.plan.fold import fold
from sppo_jax.plan.plan import Plan
from sppo_jax.plan.slots import head_slots, kv_slots, stash_slots
from sppo_jax.plan.table import Table, Tick, Unit

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


@dataclass(frozen=True, order=True)
class StashClass:
    """Stashes of one shape: tokens of a chunk on one device, and how many of them go to the host."""

    tokens: int
    host_inputs: int = 0
    host_attention: int = 0
    host_rest: bool = False

    @property
    def uses_host(self) -> bool:
        return bool(self.host_inputs or self.host_attention or self.host_rest)


@dataclass(frozen=True)
class TickSpec:
    """The static shape of a tick.

    Args:
        kind: "F", "B" or "H".
        tokens: of the tick on one device, padding included.
        stash: class of the stash made (F) or used (B); None for H, or where nothing is stashed.
        write: class of the stash that is copied to the host meanwhile; None for none.
        fetch: class of the stash that is copied back meanwhile; None for none.
        forward_pass: what travels on the ring in a forward: "kv" or "q".
        backward_pass: the same in a backward.
        bound: keys of a ring member's buffer that travel where "kv" does.
    """

    kind: str
    tokens: int
    stash: StashClass | None = None
    write: StashClass | None = None
    fetch: StashClass | None = None
    forward_pass: str = "q"
    backward_pass: str = "q"
    bound: int = 0


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


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """Heads of one device after the all-to-all, and bytes of an element; decides what travels on the ring."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    itemsize: int


def lower(plan: Plan, shape: AttentionShape, *, train: bool = True) -> Program:
    """Make a plan executable.

    Args:
        plan: the plan, already checked.
        shape: of the attention on one device.
        train: with backward and stash; else only F and H ticks, which keep their order.

    Returns:
        The program.
    """
    table = plan.table()
    class_of = _class_of(plan, table) if train else {}
    slots = stash_slots(table, lambda unit: class_of[_key(unit)]) if train else {}
    specs = _specs(plan, table, shape, class_of)
    rows = _rows(plan, table, class_of, slots)
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


def _key(unit: Unit) -> tuple[int, int, int]:
    return unit.sequence, unit.chunk, unit.virtual_stage


def _class_of(plan: Plan, table: Table) -> dict[tuple[int, int, int], StashClass]:
    """Give every unit the stash class of its diagonal group."""
    groups, gaps, diagonals = diagonal_groups(table), group_gaps(table), unit_diagonals(table)
    tokens = {}
    for tick, count in zip(table.ticks, tick_tokens(table), strict=True):
        if tick.kind == "F":
            tokens.update({_key(unit): count // plan.mesh.seq for unit in tick.units if unit is not None})

    def make(unit_key: tuple[int, int, int], diagonal: int) -> StashClass:
        away = gaps[groups[diagonal]] >= MIN_HOST_GAP
        alpha = plan.stash.alpha[diagonal] if away else 0.0
        count = round(alpha * tokens[unit_key])
        return StashClass(
            tokens=tokens[unit_key],
            host_inputs=count if plan.stash.inputs == "host" else 0,
            host_attention=count if plan.stash.attention == "host" else 0,
            host_rest=away and plan.stash.rest == "host",
        )

    return {unit_key: make(unit_key, diagonal) for unit_key, diagonal in diagonals.items()}


def _first_class(tick: Tick, class_of: dict) -> StashClass | None:
    """The class of a tick's units; they share a diagonal group, hence a class."""
    return next((class_of.get(_key(unit)) for unit in tick.units if unit is not None), None)


def _neighbour(table: Table, index: int, step: int) -> int | None:
    """The next compute tick (F or B) in the direction of `step`."""
    index += step
    while 0 <= index < len(table.ticks):
        if table.ticks[index].kind != "H":
            return index
        index += step
    return None


def _copies(table: Table, class_of: dict) -> tuple[dict[int, int], dict[int, int]]:
    """For each tick that writes to or fetches from the host: the F tick written, the B tick fetched for."""
    writes: dict[int, int] = {}
    fetches: dict[int, int] = {}
    for index, tick in enumerate(table.ticks):
        made = _first_class(tick, class_of) if tick.kind != "H" else None
        if made is None or not made.uses_host:
            continue
        step, copies = (1, writes) if tick.kind == "F" else (-1, fetches)
        other = _neighbour(table, index, step)
        assert other is not None, "a stash that is written is read, and one that is read was written"
        copies[other] = index
    return writes, fetches


def _specs(plan: Plan, table: Table, shape: AttentionShape, class_of: dict) -> list[TickSpec]:
    writes, fetches = _copies(table, class_of)
    specs = []
    for index, (tick, tokens) in enumerate(zip(table.ticks, tick_tokens(table), strict=True)):
        local = tokens // plan.mesh.seq
        if tick.kind == "H":
            specs.append(TickSpec("H", local))
            continue
        specs.append(
            TickSpec(
                kind=tick.kind,
                tokens=local,
                stash=_first_class(tick, class_of),
                write=_first_class(table.ticks[writes[index]], class_of) if index in writes else None,
                fetch=_first_class(table.ticks[fetches[index]], class_of) if index in fetches else None,
                **_ring_passes(plan, table, tick, local, shape),
            )
        )
    return specs


def _ring_passes(plan: Plan, table: Table, tick: Tick, tokens: int, shape: AttentionShape) -> dict:
    """Choose by bytes what travels: the prefix, rounded up to a power-of-two share of the sequence, or the queries.

    The queries travel with their output and LSE in float32, and back with dQ; dK and dV travel with the prefix.
    """
    if plan.ring == 1:
        return {}
    reach = max(sum(table.chunk_lengths[: unit.chunk + 1]) for unit in tick.units if unit is not None)
    bound = plan.sequence_length
    while bound % 2 == 0 and bound // 2 >= reach and bound // 2 % plan.mesh.seq == 0:
        bound //= 2
    bound //= plan.ring
    queries = tokens * plan.ulysses * shape.num_heads
    keys = bound * shape.num_kv_heads * shape.head_dim
    size, dim = shape.itemsize, shape.head_dim
    forward = _cheaper(plan.ring_pass, keys * 2 * size, queries * (dim * size + 4 * dim + 4))
    backward = _cheaper(plan.ring_pass, keys * (2 * size + 8), queries * (dim * (2 * size + 4) + 8))
    used = bound if "kv" in (forward, backward) else 0
    return {"forward_pass": forward, "backward_pass": backward, "bound": used}


def _cheaper(wish: str, kv_bytes: int, q_bytes: int) -> str:
    if wish != "auto":
        return wish
    return "kv" if kv_bytes <= q_bytes else "q"


def _rows(plan: Plan, table: Table, class_of: dict, slots: dict) -> dict[str, np.ndarray]:
    rows = {name: np.zeros((len(table.ticks), table.num_stages), np.int32) for name in FIELDS}
    rows["start"][:] = plan.sequence_length  # an idle stage writes into the room behind the sequence
    kv, heads = kv_slots(table)[1], head_slots(table)[1]
    stash = _stash_of(class_of, slots)
    for index, tick in enumerate(table.ticks):
        made = _first_class(tick, class_of)
        rows["stash_slot"][index] = slots[made][0] if made is not None else 0  # the trash slot
        for stage, unit in enumerate(tick.units):
            if unit is None:
                continue
            values = {
                "active": 1,
                "sequence": unit.sequence,
                "start": sum(table.chunk_lengths[: unit.chunk]),
                "length": table.chunk_lengths[unit.chunk],
                "group": unit.virtual_stage // table.num_stages,
                "first": unit.virtual_stage == 0,
                "last": unit.virtual_stage == table.num_virtual_stages - 1,
                "kv_slot": kv[stage, unit.sequence],
                "head_slot": heads[unit.sequence, unit.chunk],
            }
            if tick.kind != "H" and made is not None:
                values["stash_slot"] = stash(unit, stage)
            for name, value in values.items():
                rows[name][index, stage] = value
    for name, copies in zip(("write_slot", "fetch_slot"), _copies(table, class_of), strict=True):
        for index, other in copies.items():
            rows[name][index] = rows["stash_slot"][other]
    return rows


def _stash_of(class_of: dict, slots: dict) -> Callable[[Unit, int], int]:
    """Return the lookup of a unit's stash slot on its stage."""
    return lambda unit, stage: slots[class_of[_key(unit)]][1][stage, *_key(unit)]
