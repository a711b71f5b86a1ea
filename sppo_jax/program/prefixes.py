"""Keys and values of the chunks before a chunk, tick by tick: where they lie, and when they are made again.

While a chunk passes a group of layers backward, its keys and values in the group before are written again: computed
from the layer inputs, or copied from the host. No jax here.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from sppo_jax.program.host_rows import refetching_tick
from sppo_jax.program.rows import Rows, zeros
from sppo_jax.program.stash import StashClass, StashRows
from sppo_jax.program.weights import WeightTurns
from sppo_jax.schedule.slots import PrefixSlots, prefix_slots
from sppo_jax.schedule.table import Table, Unit

HOST_ROWS = ("prefixes.refetch_row", "prefixes.refetch_short")
FIELDS = (
    "prefixes.slot",  # of the keys and values of the sequence on the virtual stage
    "prefixes.grad_slot",  # of their gradients (B)
    "prefixes.refetch_row",  # row on the host of the stash of which this tick fetches what keys and values are made of
    "prefixes.refetch_short",  # how many rows before are short
    "prefixes.again_start",  # as `start`, `length` and `group` of a unit, of the keys and values made again
    "prefixes.again_length",
    "prefixes.again_group",
    "prefixes.again_weights_slot",  # as `weights.slot`, `prefixes.slot` and `stash.slot`
    "prefixes.again_prefixes_slot",
    "prefixes.again_stash_slot",
)


class PrefixesSpec(NamedTuple):
    """What a tick does with keys and values, besides using them.

    Args:
        rebuild: class of the stash from which keys and values of the group before are written again (B); None for none.
        refetch: class of the stash whose inputs, or keys and values, are copied back for the next tick's rebuild; None
            for none.
    """

    rebuild: StashClass | None = None
    refetch: StashClass | None = None


@dataclass(frozen=True, eq=False)
class PrefixRows:
    """The keys and values of a table's ticks.

    Args:
        table: a whole table; an outline has no rows and no slots.
        kv: how they reach the backward; see `StashPlan`.
        stash: the stashes.
        weights: the weights.
    """

    table: Table
    kv: str
    stash: StashRows
    weights: WeightTurns

    @cached_property
    def _rebuilds(self) -> dict[int, int]:
        """Of each B tick in which keys and values are made again the F tick that made them first."""
        found: dict[int, int] = {}
        if not self.stash.train or self.kv not in ("rebuild", "host"):
            return found
        for index, tick in enumerate(self.table.ticks):
            units = [rebuilt_unit(unit, self.table) for unit in tick.units] if tick.op == "B" else []
            sources = {self.table.unit_ticks[unit] for unit in units if unit is not None}
            if sources:
                (found[index],) = sources
        return found

    @cached_property
    def _refetches(self) -> dict[int, int]:
        """Of each tick that fetches for a rebuild the F tick that made the keys and values first."""
        found = {}
        for index, source in self._rebuilds.items():
            made = self.stash.of_tick[source]
            if made is not None and (made.host_kv if self.kv == "host" else made.host_inputs):
                found[refetching_tick(self.table, index)] = source
        return found

    @cached_property
    def _slots(self) -> PrefixSlots:
        return prefix_slots(self.table, self.kv, train=self.stash.train)

    @property
    def num_slots(self) -> int:
        """Prefixes, each of a sequence on a virtual stage, whose keys and values a stage holds."""
        return self._slots.num_kv

    @property
    def num_grad_slots(self) -> int:
        """Prefixes whose dK and dV a stage holds."""
        return self._slots.num_grads

    def specs(self) -> list[PrefixesSpec]:
        """Returns what each tick does."""
        of_tick = self.stash.of_tick
        rebuilds, refetches = (
            {index: of_tick[source] for index, source in found.items()} for found in (self._rebuilds, self._refetches)
        )
        return [PrefixesSpec(rebuilds.get(index), refetches.get(index)) for index in range(len(self.table.ticks))]

    def rows(self) -> Rows:
        """Returns the numbers of all ticks; see `FIELDS`."""
        table, slots, rows = self.table, self._slots, zeros(FIELDS, self.table)
        # An idle stage writes behind the sequence, where there is space for it.
        rows["prefixes.again_start"][:] = sum(table.chunk_lengths)
        for index, tick in enumerate(table.ticks):
            of_pass = slots.backward if tick.op == "B" else slots.forward
            for stage, unit in enumerate(tick.units):
                if unit is not None and tick.is_compute:
                    key = unit.sequence, unit.virtual_stage
                    rows["prefixes.slot"][index, stage] = of_pass.get(key, 0)
                    rows["prefixes.grad_slot"][index, stage] = slots.grads.get(key, 0)
        for index, source in self._refetches.items():
            rows["prefixes.refetch_row"][index], rows["prefixes.refetch_short"][index] = self.stash.host_place(source)
        for index, source in self._rebuilds.items():
            for stage, backward in enumerate(table.ticks[index].units):
                unit = rebuilt_unit(backward, table)
                if unit is not None:
                    for name, value in self._of_rebuilt(unit, source, stage).items():
                        rows[f"prefixes.again_{name}"][index, stage] = value
        return rows

    def _of_rebuilt(self, unit: Unit, source: int, stage: int) -> dict[str, int]:
        return {
            "start": self.table.chunk_starts[unit.chunk],
            "length": self.table.chunk_lengths[unit.chunk],
            "group": unit.virtual_stage // self.table.num_stages,
            # The weights that the backward of this group will find.
            "weights_slot": self.weights.slot(unit._replace(op="B")),
            "prefixes_slot": self._slots.backward[unit.sequence, unit.virtual_stage],
            "stash_slot": self.stash.slot(source, stage, unit),
        }


def rebuilt_unit(unit: Unit | None, table: Table) -> Unit | None:
    """Returns the forward whose keys and values are made again in the tick of a backward."""
    if unit is None or unit.virtual_stage < table.num_stages:
        return None
    return unit._replace(op="F", virtual_stage=unit.virtual_stage - table.num_stages)
