"""From a Plan to a program: the static shape of every tick, and rows of numbers that say who does what in it.

Everything that a compiled tick depends on is its `TickSpec`; everything else (sequence, chunk, slots) is data, a row of
int32 per stage. Both have a part for each mechanism: `weights.py`, `stash.py`, `prefixes.py` and `waiting.py`. Ticks of
one spec share a scan body. No jax here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sppo_jax.plan.parts import StashPlan
from sppo_jax.plan.plan import Plan
from sppo_jax.program.counters import with_short_loops
from sppo_jax.program.fold import fold, num_segments
from sppo_jax.program.prefixes import PrefixesSpec, PrefixRows
from sppo_jax.program.ring import AttentionShape, MixedShape, Ring, RingPasses
from sppo_jax.program.rows import Rows
from sppo_jax.program.stash import StashRows, StashSpec
from sppo_jax.program.tick_rows import pattern_rows, unit_rows
from sppo_jax.program.waiting import Waiting, WaitingSpec
from sppo_jax.program.weights import WeightsSpec, WeightTurns
from sppo_jax.schedule.slots import head_slots, sequence_slots
from sppo_jax.schedule.table import Table


class Mechanisms(NamedTuple):
    """What goes on beside the units of a table's ticks: each says what ticks do, and in which slot or row."""

    weights: WeightTurns
    stash: StashRows
    prefixes: PrefixRows
    waiting: Waiting


def mechanisms_of(
    table: Table, stash: StashPlan, seq: int, weights: str, optimizer: str = "device", *, train: bool = True
) -> Mechanisms:
    """Returns the mechanisms of a table.

    Args:
        table: the schedule, or its outline.
        stash: the places, with alpha.
        seq: devices of a stage.
        weights: what a device holds of its stage's layers; see `plan.plan.Plan`.
        optimizer: where parameters wait.
        train: whether there are backwards.
    """
    held = WeightTurns(table, weights, optimizer, stash.kv, train)
    stashed = StashRows(table, stash, seq, train)
    waiting = Waiting(table, train and stash.waiting == "host")
    return Mechanisms(held, stashed, PrefixRows(table, stash.kv, stashed, held), waiting)


@dataclass(frozen=True)
class TickSpec:
    """The static shape of a tick.

    Args:
        op: "F", "B" or "H".
        tokens: of the tick on one device, padding included.
        passes: what travels on the ring.
        embeds: whether it looks up embeddings (F), or adds to the embedding's gradient (B).
        has_ends: where tables are gathered, whether it embeds (F), or gathers the head's dX (B); elsewhere whether it
            does any of these, so that few bodies differ.
        weights, stash, prefixes, waiting: what it does of each mechanism.
    """

    op: str
    tokens: int
    passes: RingPasses = RingPasses()
    embeds: bool = True
    has_ends: bool = True
    weights: WeightsSpec = WeightsSpec()
    stash: StashSpec = StashSpec()
    prefixes: PrefixesSpec = PrefixesSpec()
    waiting: WaitingSpec = WaitingSpec()

    @property
    def is_compute(self) -> bool:
        """Whether each stage computes a unit of its own, on its own layers."""
        return self.op != "H"


@dataclass(frozen=True)
class Program:
    """A Plan made executable.

    Args:
        items: nested loops of TickSpecs.
        rows: for each of `tick_rows.FIELDS` an int32 array [ticks, stages].
        weights, stash, prefixes, waiting: the mechanisms, with the numbers of their slots and rows.
        num_sequence_slots: sequences that a stage has in flight.
        num_head_slots: head gradients that wait at once.
        max_tokens: the most tokens any tick has on one device.
    """

    items: tuple
    rows: Rows
    weights: WeightTurns
    stash: StashRows
    prefixes: PrefixRows
    waiting: Waiting
    num_sequence_slots: int
    num_head_slots: int
    max_tokens: int


def lower(
    plan: Plan, shape: AttentionShape | MixedShape, patterns: Sequence[int] = (), *, train: bool = True
) -> Program:
    """Makes a plan executable.

    Args:
        plan: the plan, already checked.
        shape: of the attention on one device.
        patterns: number of the pattern of layers of each group of a stage; () where all groups are alike.
        train: with backward and stash; else only F and H ticks, which keep their order.

    Returns:
        The program.
    """
    table = plan.table()
    mechanisms = mechanisms_of(table, plan.stash, plan.mesh.seq, plan.weights, plan.optimizer, train=train)
    specs = _specs(table, ring_of(plan, shape), plan.mesh.seq, mechanisms)
    (num_sequences, sequences), (num_heads, heads) = sequence_slots(table), head_slots(table)
    rows = unit_rows(table, sequences, heads)
    for mechanism in mechanisms:
        rows |= mechanism.rows()
    rows |= pattern_rows(rows, patterns or [0] * table.num_groups)
    if not train:
        chosen = [index for index, tick in enumerate(table.ticks) if tick.op != "B"]
        specs, rows = [specs[i] for i in chosen], {name: value[chosen] for name, value in rows.items()}
    return Program(
        items=with_short_loops(fold(specs), rows),
        rows=rows,
        **mechanisms._asdict(),
        num_sequence_slots=num_sequences,
        num_head_slots=num_heads,
        max_tokens=max(spec.tokens for spec in specs),
    )


def num_bodies(table: Table, stash: StashPlan, ring: Ring, seq: int, weights: str) -> int:
    """Returns the number of bodies of ticks that a training step compiles.

    Args:
        table: the schedule, or its outline, whose repeats are counted once.
        stash: the places, with alpha.
        ring: what travels on the ring.
        seq: devices of a stage.
        weights: what a device holds of its stage's layers; see `plan.plan.Plan`.
    """
    return num_segments(fold(_specs(table, ring, seq, mechanisms_of(table, stash, seq, weights))))


def ring_of(plan: Plan, shape: AttentionShape | MixedShape) -> Ring:
    """Returns the ring of a plan."""
    return Ring(
        members=plan.ring,
        ulysses=plan.ulysses,
        length=plan.sequence_length,
        asked=plan.ring_pass,
        kernel=plan.kernel,
        shape=shape,
    )


def _specs(table: Table, ring: Ring, seq: int, mechanisms: Mechanisms) -> list[TickSpec]:
    specs, runs_again = [], mechanisms.stash.places.inputs == "period"
    of_mechanisms = zip(*(mechanism.specs() for mechanism in mechanisms), strict=True)
    for tick, shape, parts in zip(table.ticks, table.tick_shapes, of_mechanisms, strict=True):
        named, tokens = dict(zip(Mechanisms._fields, parts, strict=True)), shape.tokens // seq
        if not tick.is_compute:
            specs.append(TickSpec(tick.op, tokens, **named))
            continue
        embeds = has_ends = shape.has_ends
        if mechanisms.weights.place == "gathered":
            met = {unit.virtual_stage for unit in tick.units if unit is not None}
            embeds, has_ends = 0 in met, (0 if tick.op == "F" else table.num_virtual_stages - 1) in met
        passes = _performed(ring.passes(tokens, shape.reach), tick.op, named["stash"], runs_again)
        specs.append(TickSpec(tick.op, tokens, passes, embeds, has_ends, **named))
    return specs


def _performed(passes: RingPasses, op: str, stash: StashSpec, runs_again: bool) -> RingPasses:
    """Keeps only what a tick performs, so that ticks that differ in nothing else share a body."""
    again = runs_again or stash.attends or (stash.own is not None and stash.own.recomputes)
    forward = passes.forward if op == "F" or again else RingPasses.forward
    backward = passes.backward if op == "B" else RingPasses.backward
    return RingPasses(forward, backward, passes.bound if "kv" in (forward, backward) else 0)
