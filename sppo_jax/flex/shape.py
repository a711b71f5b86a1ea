"""The shape of a window of rows, and the integer costs with which placements of its documents are compared.

A window is `rows` consecutive rows. Row d * per_pipeline + j is sequence j of pipeline d, as
`pipeline/params/layout.py` shards a batch. Costs are integers, so that every process that plans a window makes the same
placement.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from sppo_jax.plan.plan import Plan
from sppo_jax.schedule.table import Table, chunk_starts


@dataclass(frozen=True, kw_only=True)
class UnitWeights:
    """The integer costs of the units of one op, all in the same unit of time.

    Args:
        fixed: of any unit.
        slot: of the linear layers for one token of a device, padding included.
        pair: of one (query, key) pair of attention on one device.
        sent: of the keys and values that travel in a team cell, for each slot of the tick, by level 0..log2(R) - 1;
            level 0 costs nothing.
        stream: of what a stream cell sends, by chunk.
        ends: what a tick with ends takes more (`schedule.table.TickShape`), and what each of its slots does.
    """

    fixed: int
    slot: int
    pair: int
    sent: tuple[int, ...]
    stream: tuple[int, ...]
    ends: tuple[int, int] = (0, 0)


@dataclass(frozen=True, kw_only=True)
class IntegerCosts:
    """The integer costs of a training step.

    Args:
        forward: of an F unit.
        backward: of a B unit.
        head: of an H unit.
        unit_s: seconds of one unit of cost; 0 where costs are not seconds.
    """

    forward: UnitWeights
    backward: UnitWeights
    head: UnitWeights
    unit_s: float = 0.0

    def of(self, op: str) -> UnitWeights:
        """Returns the costs of a unit of op "F", "B" or "H"."""
        return {"F": self.forward, "B": self.backward, "H": self.head}[op]


@dataclass(frozen=True, kw_only=True)
class WindowShape:
    """A window of rows on a mesh.

    Args:
        rows: rows of the window, data * table.num_sequences.
        data: rows of the window that run side by side.
        ring: outer factor of the `seq` axis.
        ulysses: inner factor of the `seq` axis; ring * ulysses is a power of two.
        chunk_lengths: tokens of each chunk over all members, each a multiple of ring * ulysses.
        table: the schedule table of one pipeline; its sequences are the window's rows of this pipeline.
        weights: the integer costs.

    Raises:
        ValueError: the fields do not fit together.
    """

    rows: int
    data: int
    ring: int
    ulysses: int
    chunk_lengths: tuple[int, ...]
    table: Table = field(repr=False)
    weights: IntegerCosts = field(repr=False)

    def __post_init__(self) -> None:
        members = self.ring * self.ulysses
        if members < 1 or members & (members - 1):
            raise ValueError(f"the members of a window must be a power of two, got {members}; change mesh.seq")
        uneven = [length for length in self.chunk_lengths if length < 1 or length % members]
        if uneven:
            raise ValueError(
                f"chunk lengths of a window must be positive multiples of its {members} members, got {uneven}; change "
                "sequence.chunks"
            )
        if self.table.chunk_lengths != self.chunk_lengths or self.table.repeats:
            raise ValueError(
                f"the schedule table of a window must be whole and have its chunks {self.chunk_lengths}, got "
                f"{self.table.chunk_lengths} and {len(self.table.repeats)} repeats; use Plan.table()"
            )
        if self.rows != self.data * self.table.num_sequences:
            raise ValueError(
                f"a window must have data * sequences of the schedule table = {self.data} * {self.table.num_sequences} "
                f"rows, got {self.rows}; change the window"
            )

    @property
    def members(self) -> int:
        """Devices that share a row's tokens."""
        return self.ring * self.ulysses

    @property
    def levels(self) -> int:
        """The level of a team of all members, log2(members)."""
        return self.members.bit_length() - 1

    @property
    def length(self) -> int:
        """Tokens of a row."""
        return sum(self.chunk_lengths)

    @property
    def num_chunks(self) -> int:
        """Chunks of a row."""
        return len(self.chunk_lengths)

    @cached_property
    def starts(self) -> np.ndarray:
        """First index of each chunk of a row, and behind them the length of a row: int64 [chunks + 1]."""
        return np.array(chunk_starts(self.chunk_lengths), np.int64)

    @cached_property
    def slots(self) -> np.ndarray:
        """Tokens of each chunk on one member: int64 [chunks]."""
        return np.array(self.chunk_lengths, np.int64) // self.members

    @cached_property
    def columns(self) -> np.ndarray:
        """The column of each member: int64 [members].

        Index i * members + columns[m] of a row is slot i of member m. Member r * ulysses + u has column u * ring + r.
        """
        return np.arange(self.members).reshape(self.ulysses, self.ring).T.ravel()

    @cached_property
    def member_of(self) -> np.ndarray:
        """The member of each column: int64 [members]."""
        return np.argsort(self.columns)

    def row_of(self, order: int) -> int:
        """Returns the row that runs at a place: places 0..data-1 are the first rows of all pipelines, and so on."""
        return order % self.data * self.table.num_sequences + order // self.data

    @cached_property
    def units(self) -> np.ndarray:
        """The cell of each stage's unit in each tick, sequence * chunks + chunk, or -1: int64 [ticks, stages]."""
        cells = [
            [-1 if unit is None else unit.sequence * self.num_chunks + unit.chunk for unit in tick.units]
            for tick in self.table.ticks
        ]
        return np.array(cells, np.int64).reshape(len(cells), self.table.num_stages)

    @cached_property
    def ops(self) -> np.ndarray:
        """The op of each tick, "F", "B" or "H": [ticks]."""
        return np.array([tick.op for tick in self.table.ticks])

    @cached_property
    def tick_slots(self) -> np.ndarray:
        """Tokens of each tick on one device, padding included: int64 [ticks]."""
        return np.array(self.table.tick_tokens, np.int64) // self.members

    @cached_property
    def tick_ends(self) -> np.ndarray:
        """Whether each tick has ends: bool [ticks]."""
        return np.array([tick.has_ends for tick in self.table.tick_shapes], bool)


def simple_weights(chunk_lengths: Sequence[int], members: int, *, hidden: int = 4096) -> IntegerCosts:
    """Returns costs in units of one forward pair, of a decoder on accelerators with fast links.

    Assumed: a linear layer takes 6 * hidden pairs a token and twice that backward; a pair takes 2.5 times as long
    backward; a key and value from another member takes 500 pairs forward and 1500 backward; all-to-all takes 2500
    pairs a token forward and twice that backward. Doubled, so that all are integers.

    Args:
        chunk_lengths: tokens of each chunk.
        members: devices that share a row.
        hidden: hidden size of the model.
    """
    levels = max(1, members.bit_length() - 1)

    def unit(scale: int, pair: int, sent: int, exchange: int) -> UnitWeights:
        return UnitWeights(
            fixed=0,
            slot=12 * hidden * scale,
            pair=pair,
            sent=tuple(sent * (2**level - 1) for level in range(levels)),
            stream=tuple(exchange * (members - 1) * length // members**2 for length in chunk_lengths),
        )

    return IntegerCosts(forward=unit(1, 2, 1000, 5000), backward=unit(2, 5, 3000, 10000), head=unit(0, 0, 0, 0))


def plan_shape(plan: Plan) -> WindowShape:
    """Returns a step's rows as a window with simple costs, for checks of rows: these read no costs."""
    return WindowShape(
        rows=plan.num_sequences,
        data=plan.mesh.data,
        ring=plan.ring,
        ulysses=plan.ulysses,
        chunk_lengths=plan.chunk_lengths,
        table=plan.table(),
        weights=simple_weights(plan.chunk_lengths, plan.mesh.seq),
    )
