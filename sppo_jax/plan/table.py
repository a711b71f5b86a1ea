"""The schedule table: which stage computes which unit in which lock-step tick."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, wraps
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

# Kinds of units: forward, backward, and head. All stages compute the units of SHARED_KINDS together.
KINDS = ("F", "B", "H")
SHARED_KINDS = ("H",)
Result = TypeVar("Result")


class Unit(NamedTuple):
    """One piece of work: forward (F), backward (B) or head (H) of one chunk on one virtual stage.

    Args:
        kind: "F", "B" or "H". An H unit is computed by all stages together.
        sequence: number of the sequence inside its pipeline.
        chunk: number of the chunk inside its sequence.
        virtual_stage: number of the group of layers, in the order in which a chunk meets them; an H unit
            carries the last one.
    """

    kind: str
    sequence: int
    chunk: int
    virtual_stage: int

    def __str__(self) -> str:
        return f"{self.kind}({self.sequence},{self.chunk},{self.virtual_stage})"


@dataclass(frozen=True)
class Tick:
    """One lock-step tick: a kind and, for each stage, a unit of that kind or None where the stage idles."""

    kind: str
    units: tuple[Unit | None, ...]

    @property
    def is_compute(self) -> bool:
        """Whether each stage computes a unit of its own, on its own layers."""
        return self.kind not in SHARED_KINDS


class Repeat(NamedTuple):
    """Ticks of a table that run several times, for the next sequences each time.

    Args:
        start: the first of the ticks.
        stop: the tick after the last of them.
        rounds: how often they run.
        sequences: sequences by which a round goes on.
    """

    start: int
    stop: int
    rounds: int
    sequences: int


@dataclass(frozen=True, kw_only=True)
class Table:
    """A whole training step as a table of ticks by stages; `check` says whether it can run.

    Virtual stage `k * num_stages + s` runs on stage `s`. If each virtual stage has `n` layers, it holds the
    layers from `(k * num_stages + s) * n` on.

    A table with repeats is an outline (`outline.make_outline`): enough to plan with, not to run. Its units have the
    sequence numbers of a first round, which go on where a round is over.

    Args:
        num_stages: number of pipeline stages, P.
        num_groups: number of virtual stages of each stage, v.
        num_sequences: number of sequences of one pipeline in a step, M.
        chunk_lengths: tokens of each chunk, over all devices of a stage; the same for every sequence.
        ticks: the ticks in the order in which they run.
        name: what the table is called in plans and pictures.
        repeats: which ticks run several times, in their order; none in a table that can run.
    """

    num_stages: int
    num_groups: int
    num_sequences: int
    chunk_lengths: tuple[int, ...]
    ticks: tuple[Tick, ...]
    name: str
    repeats: tuple[Repeat, ...] = ()
    _found: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def num_chunks(self) -> int:
        return len(self.chunk_lengths)

    @property
    def num_virtual_stages(self) -> int:
        return self.num_stages * self.num_groups

    @property
    def chunk_starts(self) -> tuple[int, ...]:
        """First token of each chunk, and behind them the length of a sequence."""
        return chunk_starts(self.chunk_lengths)


@lru_cache(maxsize=1024)
def chunk_starts(chunk_lengths: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the first token of each chunk, and behind them the length of a sequence."""
    return tuple(accumulate(chunk_lengths, initial=0))


def remembered(function: Callable[["Table"], Result]) -> Callable[["Table"], Result]:
    """Decorates a function of a table alone, so that the table keeps what it returned; callers must not change it."""

    @wraps(function)
    def call(table: Table) -> Result:
        name = f"{function.__module__}.{function.__qualname__}"
        if name not in table._found:
            table._found[name] = function(table)
        return table._found[name]

    return call


@remembered
def unit_ticks(table: Table) -> dict[Unit, int]:
    """Returns the tick in which each unit of the table runs (an index into `table.ticks`)."""
    return {unit: index for index, tick in enumerate(table.ticks) for unit in tick.units if unit is not None}
