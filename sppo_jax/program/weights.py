"""Weights of layers, tick by tick: resident, gathered group by group, or from the host. No jax here."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from sppo_jax.program.rows import Rows, zeros
from sppo_jax.program.share_transfers import ShareTransfers, share_transfers
from sppo_jax.schedule.table import Table, Unit
from sppo_jax.schedule.turns import Turns, turns_of

FLAGS = ("weights.gathers", "weights.scatters")
FIELDS = (
    "weights.slot",  # of the group's weights; the group itself where weights are resident
    "weights.sum_slot",  # of the sums of the group's gradients (B); the group itself where weights are resident
    "weights.gathers",  # 1 where a group's weights are gathered before the unit: the group, and the slot they come to
    "weights.gather_group",
    "weights.gather_slot",
    "weights.scatters",  # 1 where a group's sums are scattered after the unit: the group, and the slot that they leave
    "weights.scatter_group",
    "weights.scatter_slot",
    "weights.fetch_group",  # the part of weights that comes from the host in this tick, where parameters wait there
    "weights.fetch_part",
    "weights.come",  # how many parts of the weights to gather have come
    "weights.leave_group",  # the part of gradients that leaves for the host (B)
    "weights.leave_part",
    "weights.left_group",  # the group whose sums were scattered before, and how many of its parts have left
    "weights.left",
)


class WeightsSpec(NamedTuple):
    """What a tick does with weights, besides using them.

    Args:
        gathers: whether the weights of a group of layers are gathered first where the row says so. A tick that always
            gathers would have a body of its own, and would cut loops short.
        scatters: whether the gradient sums of a group of layers are scattered at the end where the row says so.
        streams: whether a part of a group's weights comes from the host, and (B) a part of gradients leaves for it.
    """

    gathers: bool = False
    scatters: bool = False
    streams: bool = False


@dataclass(frozen=True, eq=False)
class WeightTurns:
    """The weights of a table's ticks.

    Args:
        table: a whole table; an outline has no rows and no slots.
        place: what a device holds of its stage's layers, see `weights` of `plan.plan.Plan`.
        optimizer: where parameters wait, "device" or "host".
        kv: how keys and values reach the backward; see `StashPlan`.
        train: whether there are backwards.
    """

    table: Table
    place: str
    optimizer: str = "device"
    kv: str = "keep"
    train: bool = True

    @cached_property
    def turns(self) -> Turns | None:
        """When groups are gathered and scattered; None where weights are resident."""
        return turns_of(self.table, self.kv, train=self.train) if self.place == "gathered" else None

    @cached_property
    def transfers(self) -> ShareTransfers | None:
        """When parts come from the host and leave for it; None where parameters are on the device."""
        streams = self.train and self.turns is not None and self.optimizer == "host"
        return share_transfers(self.table, self.turns) if streams else None  # type: ignore[arg-type]

    @property
    def num_slots(self) -> int:
        """Groups of layers whose weights a stage holds."""
        return self.turns.num_weights if self.turns else self.table.num_groups

    @property
    def num_sum_slots(self) -> int:
        """Groups of layers whose gradient sums a stage holds."""
        return self.turns.num_sums if self.turns else self.table.num_groups

    @property
    def num_parts(self) -> int:
        """Parts in which a group's weights come from the host; 0 where parameters are on the device."""
        return self.transfers.num_parts if self.transfers else 0

    def slot(self, unit: Unit) -> int:
        """Returns where a unit finds the weights of its group."""
        group = unit.virtual_stage // self.table.num_stages
        return self.turns.weight_slot(unit, self.table) if self.turns else group

    def specs(self) -> list[WeightsSpec]:
        """Returns what each tick does."""
        if self.place == "resident":
            return [WeightsSpec()] * len(self.table.ticks)
        streams = self.train and self.optimizer == "host"
        spec = {op: WeightsSpec(gathers=op != "H", scatters=op == "B", streams=streams and op != "H") for op in "FBH"}
        return [spec[tick.op] for tick in self.table.ticks]

    def rows(self) -> Rows:
        """Returns the numbers of all ticks; see `FIELDS`."""
        table, rows = self.table, zeros(FIELDS, self.table)
        for index, tick in enumerate(table.ticks):
            for stage, unit in enumerate(tick.units):
                if unit is not None and tick.is_compute:
                    rows["weights.slot"][index, stage] = self.slot(unit)
                    group = unit.virtual_stage // table.num_stages
                    rows["weights.sum_slot"][index, stage] = self.turns.sum_slot(unit, table) if self.turns else group
        if self.turns is not None:
            _fill(rows, ("gather_group", "gather_slot"), self.turns.gathers)
            _fill(rows, ("scatter_group", "scatter_slot"), self.turns.scatters)
            rows["weights.gathers"][list(self.turns.gathers)] = 1
            rows["weights.scatters"][list(self.turns.scatters)] = 1
        if self.transfers is not None:
            _fill(rows, ("fetch_group", "fetch_part"), self.transfers.fetches)
            _fill(rows, ("leave_group", "leave_part"), self.transfers.writes)
            _fill(rows, ("left_group", "left"), self.transfers.left)
            _fill(rows, ("come",), {index: (count,) for index, count in self.transfers.come.items()})
        return rows


def _fill(rows: Rows, names: Sequence[str], of_tick: dict[int, tuple]) -> None:
    for index, values in of_tick.items():
        for name, value in zip(names, values, strict=True):
            rows[f"weights.{name}"][index] = value
