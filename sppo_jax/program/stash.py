"""The stash of a plan by classes: stashes of one shape, which take turns in the same buffers, and their bytes.

And what each tick makes, writes and fetches. No jax here.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from sppo_jax.plan.parts import StashPlan
from sppo_jax.program.host_rows import host_rows, short_rows_before
from sppo_jax.program.rows import Rows, zeros
from sppo_jax.schedule.slots import UnitKey, stash_slots
from sppo_jax.schedule.table import AlikeBundles, Table, Unit

FLAGS = ("stash.attends_again",)
# Places with which ticks of early chunks may have the bodies of late ones, see `merged_classes`.
MERGED = (("host", "host", "recompute"), ("period", "host", "recompute"))
HOST_ROWS = ("stash.write_row", "stash.fetch_row", "stash.write_short", "stash.fetch_short")
FIELDS = (
    "stash.slot",
    "stash.write_row",  # row on the host of the stash that this tick writes (made one compute tick before)
    "stash.fetch_row",  # row on the host of the stash that this tick fetches (used one compute tick later)
    "stash.write_short",  # of the rows before each of these two, how many are short: see `merged_classes`
    "stash.fetch_short",
    "stash.attends_again",  # 1 where backward computes attention again, in a tick that may or may not
)


@dataclass(frozen=True, order=True)
class StashClass:
    """Stashes of one shape: tokens of a tick on one device, and how many of them go to the host.

    Where a class `recomputes`, its stashes hold no attention outputs, and backward computes attention again. Where
    keys and values are stashed, those of all tokens go to the host (`host_kv`), or those of none.
    """

    tokens: int
    host_inputs: int = 0
    host_attention: int = 0
    host_rest: bool = False
    recomputes: bool = False
    host_kv: int = 0

    @property
    def uses_host(self) -> bool:
        """Whether anything goes to the host."""
        return self.returns or bool(self.host_kv)

    @property
    def returns(self) -> bool:
        """Whether anything comes back for the backward of the same chunk, as keys and values do not."""
        return bool(self.host_inputs or self.host_attention or self.host_rest)


@dataclass(frozen=True, kw_only=True)
class TokenBytes:
    """Bytes that a virtual stage stashes of a token.

    Args:
        kept: of what always stays on the device.
        shared: of layer inputs and attention outputs whose place is the host, where alpha says how many tokens go.
        rest: of the rest where its place is the host, where all tokens go or none.
        kv: of keys and values where their place is the host, where all tokens go or none.
        kept_attention: of attention outputs, which are a part of `kept`, or 0.
        shared_attention: of attention outputs, which are a part of `shared`, or 0.
        states: of a stash and not of a token: states before a chunk, which stay on the device.
        tails: of a stash and not of a token: the tails of layers with a window, which go where the inputs go.
    """

    kept: int
    shared: int
    rest: int
    kv: int = 0
    kept_attention: int = 0
    shared_attention: int = 0
    states: int = 0
    tails: int = 0

    @property
    def away(self) -> int:
        """Bytes whose place is the host."""
        return self.shared + self.rest + self.kv

    def stashed(self, recomputes: bool) -> "TokenBytes":
        """Returns the bytes of a token in the stashes of a class, which may have no attention outputs."""
        if not recomputes:
            return self
        kept, shared = self.kept - self.kept_attention, self.shared - self.shared_attention
        return replace(self, kept=kept, shared=shared, kept_attention=0, shared_attention=0)


@dataclass(frozen=True, eq=False)
class StashClasses:
    """The class of each bundle of diagonals; many bundles have few classes.

    Args:
        distinct: the classes.
        of_bundle: the number of each bundle's class.
    """

    distinct: tuple[StashClass, ...]
    of_bundle: np.ndarray

    def renamed(self, names: dict[StashClass, StashClass]) -> "StashClasses":
        """Returns the classes with other names, of which some may be equal."""
        numbers: dict[StashClass, int] = {}
        renamed = [numbers.setdefault(names.get(one, one), len(numbers)) for one in self.distinct]
        return StashClasses(tuple(numbers), np.array(renamed, int)[self.of_bundle])

    def __iter__(self) -> Iterator[StashClass]:
        """Yields the class of each bundle."""
        return (self.distinct[number] for number in self.of_bundle.tolist())


def stash_classes(table: Table, stash: StashPlan, seq: int) -> StashClasses:
    """Returns the class of each bundle of diagonals.

    Args:
        table: the schedule, or its outline.
        stash: the places, with alpha.
        seq: devices of a stage, which share the tokens of a chunk.
    """
    alike, alike_B = table.alike_bundles
    alpha_B = np.zeros(len(alike_B))
    alpha_B[np.asarray(table.diagonal_bundles)] = stash.alpha
    shares, share_B = np.unique(alpha_B, return_inverse=True)
    codes, code_B = np.unique(alike_B * len(shares) + share_B, return_inverse=True)

    def make(of: AlikeBundles, alpha: float) -> StashClass:
        tokens, recomputes = -(-of.tokens // seq), recomputes_attention(stash, of.last_chunk)
        count = round(alpha * tokens) if of.hides else 0
        return StashClass(
            tokens=tokens,
            host_inputs=count if stash.inputs in ("host", "period") else 0,
            host_attention=count if stash.attention == "host" and not recomputes else 0,
            host_rest=of.hides and stash.rest == "host",
            recomputes=recomputes,
            host_kv=tokens if of.hides and stash.kv == "host" else 0,
        )

    numbers: dict[StashClass, int] = {}
    places = [divmod(code, len(shares)) for code in codes.tolist()]
    number_of = [numbers.setdefault(make(alike[one], float(shares[share])), len(numbers)) for one, share in places]
    return StashClasses(tuple(numbers), np.array(number_of)[code_B])


def recomputes_attention(stash: StashPlan, last_chunk: int) -> bool:
    """Returns whether the backward of a bundle with this last chunk computes attention again."""
    return stash.attention == "recompute" or last_chunk < stash.attention_from


def merged_classes(table: Table, stash: StashPlan, classes: StashClasses) -> dict[StashClass, StashClass]:
    """Returns for each class whose ticks move as those of another one that other class.

    Where attention outputs of late chunks go to the host, the ticks of early chunks have the bodies of late ones: their
    attention outputs move too, and no backward reads them. So a pass of a group of layers is one loop, whose counter
    tells the row on the host. A row of an early chunk ends where its attention outputs begin: the next row overwrites
    them, as all forwards of a wave come before its first backward.

    Args:
        table: the schedule, or its outline.
        stash: the places, with alpha.
        classes: of the bundles of diagonals, from `stash_classes`.
    """
    places = stash.inputs, stash.attention, stash.rest
    if not table.passes_groups_in_turn or places not in MERGED:
        return {}
    known, merged = set(classes.distinct), {}
    for one in known:
        late = replace(one, recomputes=False, host_attention=one.host_inputs)
        if one.recomputes and one.host_inputs == one.tokens and late in known:
            merged[one] = late
    return merged


def short_rows(table: Table, classes: StashClasses, merged: dict[StashClass, StashClass]) -> dict[StashClass, int]:
    """Returns of each class how many of its rows on the host are short, besides the last one, which never is.

    Args:
        table: the schedule, or its outline.
        classes: of the bundles of diagonals, from `stash_classes`.
        merged: from `merged_classes`.
    """
    if not merged:
        return {}
    # The next wave has the same rows.
    bundles_T, targets = table.forwards_before_backwards, classes.renamed(merged)
    target_T = targets.of_bundle[bundles_T]
    is_short_T = np.array([one in merged for one in classes.distinct])[classes.of_bundle[bundles_T]]
    return {one: int(is_short_T[target_T == number][:-1].sum()) for number, one in enumerate(targets.distinct)}


def slot_bytes(of: StashClass, token: TokenBytes) -> tuple[int, int]:
    """Returns the bytes of one stash of a class: on the device, and on the host."""
    token = token.stashed(of.recomputes)
    away = max(of.host_inputs, of.host_attention) * token.shared + of.tokens * token.rest * of.host_rest
    away += of.host_kv * token.kv + token.tails * (of.host_inputs > 0)
    return of.tokens * (token.kept + token.away) + token.states + token.tails - away, away


class StashSpec(NamedTuple):
    """What a tick does with stashes.

    Args:
        own: class of the stash made (F) or used (B); None for H, or where nothing is stashed.
        write: class of the stash that is copied to the host meanwhile; None for none.
        fetch: class of the stash that is copied back meanwhile; None for none.
        attends: whether attention is computed again where the row says so (B).
    """

    own: StashClass | None = None
    write: StashClass | None = None
    fetch: StashClass | None = None
    attends: bool = False


@dataclass(frozen=True, eq=False)
class StashRows:
    """The stashes of a table's ticks.

    Args:
        table: a whole table; an outline has no rows and no slots.
        places: with alpha.
        seq: devices of a stage.
        train: whether there are backwards; else nothing is stashed.
    """

    table: Table
    places: StashPlan
    seq: int
    train: bool = True

    @cached_property
    def _alone(self) -> StashClasses:
        return stash_classes(self.table, self.places, self.seq) if self.train else StashClasses((), np.zeros(0, int))

    @cached_property
    def _merged(self) -> dict[StashClass, StashClass]:
        return merged_classes(self.table, self.places, self._alone)

    @cached_property
    def _classes(self) -> StashClasses:
        return self._alone.renamed(self._merged)

    @cached_property
    def of_bundle(self) -> tuple[StashClass, ...]:
        """The class of each bundle of diagonals."""
        return tuple(self._classes)

    @cached_property
    def of_tick(self) -> list[StashClass | None]:
        """The class that each tick makes or uses."""
        return [
            self.of_bundle[bundle] if self.train and bundle is not None else None for bundle in self.table.tick_bundles
        ]

    @cached_property
    def _is_short(self) -> list[bool]:
        """Whether the row of each tick's stash on the host is short."""
        bundles = self.table.tick_bundles
        is_short = [one in self._merged for one in self._alone]
        return [self.train and bundle is not None and is_short[bundle] for bundle in bundles]

    @cached_property
    def _copies(self) -> tuple[dict[int, int], dict[int, int]]:
        """Of each tick that writes the F tick written, and of each that fetches the B tick it fetches for.

        A stash is written during the next compute tick, and fetched during the one before its backward.
        """
        compute = [index for index, tick in enumerate(self.table.ticks) if tick.is_compute]
        writes, fetches = {}, {}
        for place, index in enumerate(compute):
            made = self.of_tick[index]
            if made is None or not made.uses_host:
                continue
            # A stash that is written is read, and one that is read was written: there are neighbours.
            if self.table.ticks[index].op == "F":
                writes[compute[place + 1]] = index
            elif made.returns:
                fetches[compute[place - 1]] = index
        return writes, fetches

    @cached_property
    def _slots(self) -> dict[StashClass, tuple[int, dict[UnitKey, int]]]:
        if not self.train:
            return {}
        bundles, diagonals = self.table.diagonal_bundles, self.table.unit_diagonals

        def of_unit(unit: Unit) -> StashClass:
            return self.of_bundle[bundles[diagonals[unit.sequence, unit.chunk, unit.virtual_stage]]]

        return stash_slots(self.table, of_unit)

    @property
    def classes(self) -> dict[StashClass, int]:
        """The number of slots of each class."""
        return {name: count for name, (count, _) in self._slots.items()}

    @cached_property
    def num_rows(self) -> dict[StashClass, int]:
        """The number of rows of each class on the host."""
        if not self.train:
            return {}
        return dict(zip(self._classes.distinct, self.table.host_rows(self._classes.of_bundle), strict=True))

    @cached_property
    def num_short(self) -> dict[StashClass, int]:
        """How many of these, before the last one, are short."""
        return short_rows(self.table, self._alone, self._merged)

    def slot(self, tick: int, stage: int, unit: Unit | None) -> int:
        """Returns the slot of a unit's stash on the device: in a tick's class, the trash slot without a unit."""
        of_class = self.of_tick[tick]
        if of_class is None:
            return 0
        count, slots = self._slots[of_class]
        return count if unit is None else slots[(stage, *unit[1:])]

    def specs(self) -> list[StashSpec]:
        """Returns what each tick does."""
        mixed = {of for of, is_short in zip(self.of_tick, self._is_short, strict=True) if is_short}
        writes, fetches = ({at: self.of_tick[other] for at, other in copies.items()} for copies in self._copies)
        return [
            StashSpec(own, writes.get(index), fetches.get(index), tick.op == "B" and own in mixed)
            for index, (tick, own) in enumerate(zip(self.table.ticks, self.of_tick, strict=True))
        ]

    def rows(self) -> Rows:
        """Returns the numbers of all ticks; see `FIELDS`."""
        rows = zeros(FIELDS, self.table)
        for index, tick in enumerate(self.table.ticks):
            for stage, unit in enumerate(tick.units):
                rows["stash.slot"][index, stage] = self.slot(index, stage, unit)
        for name, copies in zip(("write", "fetch"), self._copies, strict=True):
            for index, other in copies.items():
                rows[f"stash.{name}_row"][index], rows[f"stash.{name}_short"][index] = self.host_place(other)
        again = [spec.attends and is_short for spec, is_short in zip(self.specs(), self._is_short, strict=True)]
        rows["stash.attends_again"][again] = 1
        return rows

    @cached_property
    def _host_rows(self) -> tuple[dict[int, int] | None, dict[int, int]]:
        rows = host_rows(self.table, self.of_tick)
        return rows, short_rows_before(rows or {}, self.of_tick, self._is_short)

    def host_place(self, tick: int) -> tuple[int | list[int], int]:
        """Returns the row on the host of a tick's stash, or that of each stage; and how many before it are short."""
        rows, before = self._host_rows
        if rows is not None:
            return rows[tick], before.get(tick, 0)
        return [self.slot(tick, stage, unit) for stage, unit in enumerate(self.table.ticks[tick].units)], 0
