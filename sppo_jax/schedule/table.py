"""The schedule table: which stage computes which unit in which lock-step tick, and what follows from that.

What follows: the anti-diagonals, whose units share a tick's static shape and its share of offloaded tokens; and how
many stashes, prefixes and head gradients a stage holds at once (`slots` says where each lies).
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from sppo_jax.rules import BREADTH_FIRST
from sppo_jax.schedule.peaks import Change, Repeat, peak, peaks
from sppo_jax.schedule.shapes import rounded_up

# What a unit computes: forward, backward, and head. All stages compute the units of SHARED_OPS together.
OPS = ("F", "B", "H")
SHARED_OPS = ("H",)
# The schedule in which all chunks of a wave pass a group of layers before any of them passes the next.
# Compute ticks that must lie between writing a stash and reading it back, so that compute overlaps the copies.
MIN_HOST_GAP = 3
Value = TypeVar("Value")


class Unit(NamedTuple):
    """One piece of work: forward (F), backward (B) or head (H) of one chunk on one virtual stage.

    Args:
        op: "F", "B" or "H". An H unit is computed by all stages together.
        sequence: number of the sequence inside its pipeline.
        chunk: number of the chunk inside its sequence.
        virtual_stage: number of the group of layers, in the order in which a chunk meets them; an H unit
            carries the last one.
    """

    op: str
    sequence: int
    chunk: int
    virtual_stage: int

    def __str__(self) -> str:
        return f"{self.op}({self.sequence},{self.chunk},{self.virtual_stage})"


@dataclass(frozen=True)
class Tick:
    """One lock-step tick: an op and, for each stage, a unit of that op or None where the stage idles."""

    op: str
    units: tuple[Unit | None, ...]

    @property
    def is_compute(self) -> bool:
        """Whether each stage computes a unit of its own, on its own layers."""
        return self.op not in SHARED_OPS


class TickShape(NamedTuple):
    """What all stages' units of a tick have in common.

    Args:
        tokens: the tokens of the tick, padding included, over all devices of a stage.
        reach: tokens of the sequence up to the end of the tick's furthest chunk.
        has_ends: whether a chunk may be on the first or the last virtual stage, where it meets the vocabulary.
    """

    tokens: int
    reach: int
    has_ends: bool = True


class AlikeBundles(NamedTuple):
    """What the class of a bundle's stashes depends on, besides the share that goes to the host.

    Args:
        tokens: as `Table.bundle_tokens`.
        hides: as `Table.overlaps_copies`.
        last_chunk: as `Table.bundle_last_chunks`.
    """

    tokens: int
    hides: bool
    last_chunk: int


class PrefixPeaks(NamedTuple):
    """How many prefixes, each of one sequence and one group of layers, a stage holds at once; the most of any stage.

    Args:
        kept: whose keys and values stay from the forward of the first chunk to the backward of the first chunk.
        rebuilt: whose keys and values leave after the forward, but for the last group, and are made again while the
            group behind goes backward. Where a sequence is one chunk, its own backward makes them again.
        grads: whose dK and dV have a buffer. Where groups pass in turn, from the backward of the last chunk to that of
            the first; else as long as `kept`.
    """

    kept: int
    rebuilt: int
    grads: int


class property_of_ticks(Generic[Value]):  # noqa: N801
    """A property that follows from ticks and waves alone; tables of the same ticks with other chunks share it."""

    def __init__(self, work_out: Callable[[Any], Value]) -> None:
        self._work_out = work_out
        self.__doc__ = work_out.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, table: "Table", owner: type) -> Value:
        if self._name not in table.known_of_ticks:
            table.known_of_ticks[self._name] = self._work_out(table)
        return table.known_of_ticks[self._name]


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
        wave: sequences that run as one, k: those from k q on are wave q (`waves.make_in_waves`).
        shapes: the tokens that a tick may have over all devices of a stage, rising; a tick has the least of them that
            holds its chunks. None: it has those of its longest chunk.
    """

    num_stages: int
    num_groups: int
    num_sequences: int
    chunk_lengths: tuple[int, ...]
    ticks: tuple[Tick, ...]
    name: str
    repeats: tuple[Repeat, ...] = ()
    wave: int = 1
    shapes: tuple[int, ...] = ()
    known_of_ticks: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def with_chunks(self, chunk_lengths: tuple[int, ...], shapes: tuple[int, ...] = ()) -> "Table":
        """Returns the table with as many chunks of other lengths; what follows from the ticks is worked out once."""
        table = replace(self, chunk_lengths=chunk_lengths, shapes=shapes)
        object.__setattr__(table, "known_of_ticks", self.known_of_ticks)
        return table

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

    @property_of_ticks
    def unit_ticks(self) -> dict[Unit, int]:
        """Returns the tick in which each unit of the table runs (an index into `self.ticks`)."""
        return {unit: index for index, tick in enumerate(self.ticks) for unit in tick.units if unit is not None}

    @property_of_ticks
    def unit_diagonals(self) -> dict[tuple[int, int, int], int]:
        """Returns the diagonal of each (sequence, chunk, virtual stage).

        The diagonal is the number of forward ticks from the first one of the wave to that of the unit; its backward
        lies on the same diagonal. In a generated table of one group and waves of one sequence, it is chunk + stage.
        """
        first: dict[int, int] = {}
        diagonals: dict[tuple[int, int, int], int] = {}
        for number, tick in enumerate(tick for tick in self.ticks if tick.op == "F"):
            for unit in tick.units:
                if unit is not None:
                    # Counted from each sequence's own first, the diagonals of a wave would all share ticks.
                    start = first.setdefault(unit.sequence // self.wave, number)
                    diagonals[unit[1:]] = number - start
        return diagonals

    @property_of_ticks
    def diagonal_bundles(self) -> tuple[int, ...]:
        """Returns the bundle of each diagonal; bundles are numbered from 0 in the order of their first diagonal.

        Diagonals whose units stand in one tick, forward or backward, share that tick's shape, so they are one
        bundle. With one wave at a time every diagonal is a bundle; with several in a stream of N chunks each,
        diagonals that differ by a multiple of N are.
        """
        diagonals = self.unit_diagonals
        parent = list(range(max(diagonals.values()) + 1))

        def root(diagonal: int) -> int:
            while parent[diagonal] != diagonal:
                diagonal = parent[diagonal]
            return diagonal

        for tick in self.ticks:
            if not tick.is_compute:
                continue
            first, *others = {diagonals[unit[1:]] for unit in tick.units if unit is not None}
            for other in others:
                # The smaller root wins, so that numbering by roots follows the first diagonals.
                low, high = sorted((root(first), root(other)))
                parent[high] = low
        roots = [root(diagonal) for diagonal in range(len(parent))]
        numbers = {value: number for number, value in enumerate(sorted(set(roots)))}
        return tuple(numbers[value] for value in roots)

    @property_of_ticks
    def bundle_gaps(self) -> tuple[int, ...]:
        """Returns, for each bundle, the fewest compute ticks (F and B, counted together) from a unit's F to its B."""
        bundles, diagonals = self.diagonal_bundles, self.unit_diagonals
        compute = [tick for tick in self.ticks if tick.is_compute]
        forward: dict[tuple[int, int, int], int] = {}
        gaps = [len(compute)] * (max(bundles) + 1)
        for number, tick in enumerate(compute):
            keys = [unit[1:] for unit in tick.units if unit is not None]
            if tick.op == "F":
                forward.update(dict.fromkeys(keys, number))
                continue
            # All units of a tick are in one bundle.
            bundle = bundles[diagonals[keys[0]]]
            gaps[bundle] = min(gaps[bundle], number - max(map(forward.__getitem__, keys)))
        return tuple(gaps)

    @property_of_ticks
    def overlaps_copies(self) -> tuple[bool, ...]:
        """Returns, for each bundle, whether compute can overlap the copies of its stashes to the host and back."""
        return tuple(gap >= MIN_HOST_GAP for gap in self.bundle_gaps)

    @cached_property
    def bundle_tokens(self) -> tuple[int, ...]:
        """Returns the tokens of the ticks of each bundle: of its longest chunk, rounded up to a shape."""
        return tuple(rounded_up(longest, self.shapes) for longest in self._longest_chunks)

    @property
    def most_tokens(self) -> int:
        """The most tokens that any tick has, over all devices of a stage."""
        return max(self.bundle_tokens)

    @cached_property
    def _longest_chunks(self) -> tuple[int, ...]:
        """Returns the longest chunk of each bundle of diagonals, in tokens over all devices of a stage."""
        lengths, members = self.chunk_lengths, self.bundle_chunks
        longest = {chunks: max(lengths[chunk] for chunk in chunks) for chunks in set(members)}
        return tuple(longest[chunks] for chunks in members)

    @property_of_ticks
    def bundle_chunks(self) -> tuple[tuple[int, ...], ...]:
        """Returns the numbers of the chunks of each bundle, rising; many bundles have the same chunks."""
        bundles = self.diagonal_bundles
        members: list[set[int]] = [set() for _ in range(max(bundles) + 1)]
        for (_, chunk, _), diagonal in self.unit_diagonals.items():
            members[bundles[diagonal]].add(chunk)
        return tuple(tuple(sorted(chunks)) for chunks in members)

    @property_of_ticks
    def bundle_last_chunks(self) -> tuple[int, ...]:
        """Returns the number of the last chunk, in the order of the sequence, of each bundle."""
        return tuple(chunks[-1] for chunks in self.bundle_chunks)

    @cached_property
    def alike_bundles(self) -> tuple[list[AlikeBundles], np.ndarray]:
        """Returns what many bundles have in common, and for each bundle the number of what it has."""
        numbers: dict[AlikeBundles, int] = {}
        found = zip(self.bundle_tokens, self.overlaps_copies, self.bundle_last_chunks, strict=True)
        of_bundle = [numbers.setdefault(AlikeBundles(*one), len(numbers)) for one in found]
        return list(numbers), np.array(of_bundle)

    @property_of_ticks
    def tick_bundles(self) -> tuple[int | None, ...]:
        """Returns the bundle of diagonals of each tick; None for a head tick."""
        bundles, diagonals = self.diagonal_bundles, self.unit_diagonals
        # All units of a tick are in one bundle, by construction of the bundles.
        return tuple(
            bundles[diagonals[next(unit for unit in tick.units if unit is not None)[1:]]] if tick.is_compute else None
            for tick in self.ticks
        )

    @cached_property
    def tick_tokens(self) -> tuple[int, ...]:
        """Returns the static token count of each tick: that of its bundle of diagonals.

        It depends on the bundle alone, so the forward, the head and the backward tick of a unit have one shape.
        """
        of_bundle, bundles, diagonals = self.bundle_tokens, self.diagonal_bundles, self.unit_diagonals

        def bundle_of(tick: Tick) -> int:
            # All units of a tick are in one bundle, by construction of the bundles.
            return bundles[diagonals[next(unit for unit in tick.units if unit is not None)[1:]]]

        return tuple(of_bundle[bundle_of(tick)] for tick in self.ticks)

    @cached_property
    def tick_shapes(self) -> tuple[TickShape, ...]:
        """Returns the shape of each tick."""
        ends = self.chunk_starts[1:]
        return tuple(
            TickShape(tokens, max(ends[unit.chunk] for unit in tick.units if unit is not None), self._has_ends(tick))
            for tick, tokens in zip(self.ticks, self.tick_tokens, strict=True)
        )

    def _has_ends(self, tick: Tick) -> bool:
        # With one group the few ticks without ends fill or drain the pipeline, and share bodies with the others.
        ends = 0, self.num_virtual_stages - 1
        return self.num_groups == 1 or any(unit is not None and unit.virtual_stage in ends for unit in tick.units)

    @property_of_ticks
    def tick_rounds(self) -> tuple[int, ...]:
        """Returns how often each tick that is written runs."""
        rounds = [1] * len(self.ticks)
        for start, stop, count, _ in self.repeats:
            rounds[start:stop] = [count] * (stop - start)
        return tuple(rounds)

    @property_of_ticks
    def waits(self) -> dict[Unit, tuple[int, int]]:
        """Returns, for each unit whose input waits, the ticks in which the input comes and is used.

        An input is in the register until the next tick of the op that it comes from is over.
        """
        before: dict[str, list[int]] = {"F": [], "B": []}  # of each tick the ticks of an op before it
        for tick in self.ticks:
            for op, numbers in before.items():
                numbers.append((numbers[-1] if numbers else 0) + (tick.op == op))
        found: dict[Unit, tuple[int, int]] = {}
        unit_ticks = self.unit_ticks
        for unit, index in unit_ticks.items():
            op, sequence, chunk, virtual_stage = unit
            # The unit whose output is the input; none of this name for the first.
            of_op, step = {"F": ("F", -1), "B": ("B", 1), "H": ("F", 0)}[op]
            came = unit_ticks.get((of_op, sequence, chunk, virtual_stage + step), index)  # type: ignore[call-overload]
            if came != index and before[of_op][index - 1] != before[of_op][came]:
                found[unit] = came, index
        return found

    def waits_at(self, unit: Unit) -> int:
        """Returns the stage where the input of a unit waits; the last stage's output has travelled on to the first."""
        return 0 if unit.op == "H" else unit.virtual_stage % self.num_stages

    @property_of_ticks
    def waiting_peak(self) -> int:
        """Returns the number of chunks that wait at once between two groups of layers, the most of any stage."""
        changes: dict[int, list[Change]] = {}
        for unit, (came, tick) in self.waits.items():
            changes.setdefault(self.waits_at(unit), []).extend([(came + 1, 1), (tick, -1)])
        return max((peak(of_stage, self.repeats) for of_stage in changes.values()), default=0)

    @property_of_ticks
    def kv_peak(self) -> int:
        """Returns the number of sequences that a stage has in flight at once, the most of any stage.

        A stage holds a sequence from the forward of its first chunk on the stage's first virtual stage to the backward.
        """
        changes: list[list[Change]] = [[] for _ in range(self.num_stages)]
        for index, tick in enumerate(self.ticks):
            for stage, unit in enumerate(tick.units):
                if unit is not None and unit.chunk == 0 and unit.virtual_stage == stage and unit.op != "H":
                    changes[stage].append((index, 1 if unit.op == "F" else -1))
        return max(peak(of_stage, self.repeats) for of_stage in changes)

    @property_of_ticks
    def prefix_peaks(self) -> PrefixPeaks:
        """Returns how many prefixes a stage holds at once."""
        changes: tuple[list[list[Change]], ...] = tuple(
            [[] for _ in range(self.num_stages)] for _ in PrefixPeaks._fields
        )
        ends = 0, self.num_chunks - 1
        for index, tick in enumerate(self.ticks):
            for stage, unit in enumerate(tick.units):
                if unit is not None and unit[2] in ends and tick.is_compute:
                    for of_stage, change in zip(changes, self._prefix_changes(unit), strict=True):
                        of_stage[stage] += [(index, one) for one in change]
        kept, rebuilt, grads = (max(peak(one, self.repeats) for one in of_op) for of_op in changes)
        return PrefixPeaks(kept, rebuilt, grads if self.passes_groups_in_turn else kept)

    def _prefix_changes(self, unit: Unit) -> tuple[list[int], list[int], list[int]]:
        """Returns how a unit changes the prefixes of `PrefixPeaks`, field by field."""
        begins, ends = unit.chunk == 0, unit.chunk == self.num_chunks - 1
        own_tick = [1, -1] if begins and ends else []
        is_last = unit.virtual_stage // self.num_stages == self.num_groups - 1
        if unit.op == "F":
            return [1] * begins, own_tick or [1] * begins + [-1] * (ends and not is_last), []
        # The first backward of a group begins to rebuild the group before.
        rebuilds = ends and unit.virtual_stage >= self.num_stages
        return [-1] * begins, own_tick or [1] * rebuilds + [-1] * begins, [1] * ends + [-1] * begins

    @property
    def passes_groups_in_turn(self) -> bool:
        """Whether in each stage all backwards of a group of layers come before any of the group before it."""
        return self.name == BREADTH_FIRST

    @property_of_ticks
    def head_peak(self) -> int:
        """Returns the number of head gradients that wait at once, each from its H to the chunk's first B."""
        last = self.num_virtual_stages - 1
        changes = []
        for index, tick in enumerate(self.ticks):
            unit = tick.units[-1]
            if unit is not None and unit.op != "F" and unit.virtual_stage == last:
                changes.append((index, 1 if unit.op == "H" else -1))
        return peak(changes, self.repeats)

    @property_of_ticks
    def in_flight(self) -> tuple[int, ...]:
        """Returns the greatest number of chunk stashes that each stage holds at once."""
        held_S = peaks(np.arange(len(self.ticks) + 1), self._stash_changes, self.repeats)
        return tuple(held_S.tolist())

    def stash_peaks(self, class_of_bundle: npt.ArrayLike) -> list[int]:
        """Returns the number of stashes of each class that a stage holds at once, the most of any stage.

        Args:
            class_of_bundle: the class of each bundle of diagonals, from 0 on; only stashes of one class share a buffer.
        """
        return self._by_class("stash_peaks", self._stash_changes, class_of_bundle)

    def _by_class(self, name: str, changes_TS: np.ndarray, class_of_bundle: npt.ArrayLike) -> list[int]:
        """Returns the most that a stage holds of each class, which follows from the ticks and the bundles' classes."""
        classes_B = np.asarray(class_of_bundle, np.int32)
        known, key = self.known_of_ticks.setdefault(name, {}), classes_B.tobytes()
        if key not in known:
            bundles_T = self._bundles
            class_of_tick_T = np.where(bundles_T < 0, -1, classes_B[bundles_T])
            edges = [edge for repeat in self.repeats for edge in (repeat.start, repeat.stop)]
            known[key] = []
            for number in range(classes_B.max() + 1):
                is_of_class_T = class_of_tick_T == number
                counts_T = is_of_class_T.copy()
                counts_T[edges] = True
                ticks = np.flatnonzero(counts_T)
                changes = changes_TS[ticks] * is_of_class_T[ticks, None]
                known[key].append(int(peaks(ticks, changes, self.repeats).max()))
        return known[key]

    @property_of_ticks
    def ticks_share_diagonals(self) -> bool:
        """Returns whether all units of a compute tick are of one wave and one diagonal."""
        diagonals = self.unit_diagonals
        return all(
            len({(unit.sequence // self.wave, diagonals[unit[1:]]) for unit in tick.units if unit is not None}) == 1
            for tick in self.ticks
            if tick.is_compute
        )

    def host_rows(self, class_of_bundle: npt.ArrayLike) -> list[int]:
        """Returns the rows of each class in a stage's buffer on the host; see `program.host_rows`.

        They are two at least: compilers know the only row, and drop what its number depends on.

        Args:
            class_of_bundle: as in `stash_peaks`.
        """
        if not self.ticks_share_diagonals:
            return [count + 1 for count in self.stash_peaks(class_of_bundle)]
        return [max(2, count) for count in self._by_class("host_rows", self._row_changes, class_of_bundle)]

    @property_of_ticks
    def _bundles(self) -> np.ndarray:
        """Returns the bundle of diagonals of each tick, and behind the last tick: -1 where there is none."""
        return np.array([*(-1 if bundle is None else bundle for bundle in self.tick_bundles), -1])

    @property_of_ticks
    def forwards_before_backwards(self) -> np.ndarray:
        """Returns the bundle of each forward tick before the first backward one."""
        first = next((index for index, tick in enumerate(self.ticks) if tick.op == "B"), len(self.ticks))
        bundles_T = self._bundles[:first]
        return bundles_T[bundles_T >= 0]

    @property_of_ticks
    def _stash_changes(self) -> np.ndarray:
        """Returns by how many stashes each tick changes what each stage holds, from F to B; none behind the last."""
        sign = {"F": 1, "B": -1}
        changes = [[sign.get(tick.op, 0) * (unit is not None) for unit in tick.units] for tick in self.ticks]
        return np.array([*changes, [0] * self.num_stages])

    @property_of_ticks
    def _row_changes(self) -> np.ndarray:
        """Returns the same for a row on the host, which a tick has for all stages."""
        return np.sign(self._stash_changes.sum(axis=1, keepdims=True))

    @property_of_ticks
    def heads_among_backwards(self) -> bool:
        """Returns whether a head comes after a backward, be it in the next round."""
        return self._comes_among_backwards("H")

    @property
    def has_forwards_among_backwards(self) -> bool:
        """Returns whether a forward comes after a backward, be it in the next round."""
        return self._comes_among_backwards("F")

    def _comes_among_backwards(self, op: str) -> bool:
        ops = [tick.op for tick in self.ticks]
        rounds = any({"B", op} <= set(ops[repeat.start : repeat.stop]) for repeat in self.repeats)
        return rounds or ("B" in ops and op in ops[ops.index("B") :])


@lru_cache(maxsize=1024)
def chunk_starts(chunk_lengths: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the first token of each chunk, and behind them the length of a sequence."""
    return tuple(accumulate(chunk_lengths, initial=0))
