"""Chunks that wait between two groups of layers, tick by tick: on the device, or on the host. No jax here."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from sppo_jax.program.rows import Rows, zeros
from sppo_jax.schedule.table import Table, Unit
from sppo_jax.schedule.waiting import Room, waiting_room, waiting_slots

HOST_ROWS = ("waiting.put_row", "waiting.take_row")
FIELDS = (
    "waiting.waits",  # 1 where the unit's input is in the waiting room, not in the register
    "waiting.slot",  # where the input waits on the device
    "waiting.arrive_slot",  # where what reaches the stage at the end of the tick waits on the device
    "waiting.put_row",  # row on the host where what came in the compute tick before waits from this tick on
    "waiting.take_row",  # row on the host whose chunk this tick fetches for the next compute tick, or head before it
)


class WaitingSpec(NamedTuple):
    """What a tick does with the waiting room on the host.

    Args:
        put: the op of the compute tick before, if what came in it is written there; else None.
        take: whether a chunk is fetched from there.
        waited: whether the compute tick before has fetched the input of some unit of this tick from there.
    """

    put: str | None = None
    take: bool = False
    waited: bool = False


@dataclass(frozen=True, eq=False)
class Waiting:
    """The chunks that wait in a table's ticks.

    Args:
        table: a whole table; an outline has no rows and no slots.
        on_host: whether they wait on the host. An evaluation has room on the device: no stash, and no gradients of
            keys and values.
    """

    table: Table
    on_host: bool

    @cached_property
    def room(self) -> Room:
        """The rows on the host."""
        return waiting_room(self.table) if self.on_host else Room(0, {}, {})

    @property
    def num_rows(self) -> int:
        """Rows on the host."""
        return self.room.num_rows

    @cached_property
    def _slots(self) -> tuple[int, dict[Unit, int]]:
        return (0, {}) if self.on_host else waiting_slots(self.table)

    @property
    def num_slots(self) -> int:
        """Chunks that wait at once on the device; the trash slot is the next one."""
        return self._slots[0]

    def specs(self) -> list[WaitingSpec]:
        """Returns what each tick does."""
        found, before, waited = [], None, False
        for index, tick in enumerate(self.table.ticks):
            puts, takes = tick.is_compute and index in self.room.puts, tick.is_compute and index in self.room.takes
            found.append(WaitingSpec(before if puts else None, takes, waited))
            if tick.is_compute:
                before, waited = tick.op, takes
        return found

    def rows(self) -> Rows:
        """Returns the numbers of all ticks; see `FIELDS`."""
        table, rows = self.table, zeros(FIELDS, self.table)
        rows["waiting.arrive_slot"][:] = self.num_slots
        for unit, (came, used) in table.waits.items():
            at = table.waits_at(unit)
            # A head runs on all stages.
            stages = slice(None) if unit.op == "H" and not self.on_host else at
            rows["waiting.waits"][used, stages] = 1
            if not self.on_host:
                rows["waiting.slot"][used, stages] = self._slots[1][unit]
                rows["waiting.arrive_slot"][came, at] = self._slots[1][unit]
        for name, of_tick in (("put_row", self.room.puts), ("take_row", self.room.takes)):
            for index, row in of_tick.items():
                rows[f"waiting.{name}"][index] = row
        return rows
