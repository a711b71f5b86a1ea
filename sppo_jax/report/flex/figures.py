"""Everything that a report on flexible teams shows, computed once for all formats."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from sppo_jax.config import Config, ModelConfig
from sppo_jax.flex.baselines import Baseline, baselines
from sppo_jax.flex.cells import TODAY, today
from sppo_jax.flex.choose import LEAST_GAIN
from sppo_jax.flex.of_plan import window_shape
from sppo_jax.flex.placement import Pieces, Placement
from sppo_jax.flex.shape import WindowShape
from sppo_jax.flex.step_cost import step_cost, tick_levels
from sppo_jax.hardware import Cluster
from sppo_jax.plan.plan import Plan
from sppo_jax.predict.seconds.costs import CostModel
from sppo_jax.report.flex.sent import Sent, sent_bytes
from sppo_jax.search.make import costs_of
from sppo_jax.search.space.request import resolve_cluster

# Documents that fill rows so far leave no slots in which teams could be arranged.
_FULL = 0.995
NAMES = ("static", "packed", "per_batch", "flex")


@dataclass(frozen=True, kw_only=True)
class TeamFigures:
    """Figures of some windows of documents; all seconds are simulated.

    Args:
        plan: the plan.
        model: the model's shape.
        cluster: the devices.
        costs: the planner's seconds of the plan's units.
        shape: a window on the mesh.
        source: where the documents come from, in words.
        windows: the documents of each window, at least one window.
        placed: the baselines of each window, by name.
    """

    plan: Plan
    model: ModelConfig
    cluster: Cluster
    costs: CostModel
    shape: WindowShape
    source: str
    windows: tuple[Pieces, ...]
    placed: tuple[dict[str, Baseline], ...]

    @property
    def first(self) -> Placement:
        """The chosen placement of the first window."""
        return self.placed[0]["flex"].windows[0]

    @cached_property
    def seconds(self) -> dict[str, float]:
        """Seconds of the ticks of a step, by baseline: the mean of the windows."""
        unit_s = self.shape.weights.unit_s / len(self.placed)
        return {name: unit_s * sum(found[name].cost for found in self.placed) for name in NAMES}

    @cached_property
    def rows(self) -> dict[str, float]:
        """Rows that the documents of a window take, by baseline: the mean of the windows."""
        return {name: sum(found[name].rows for found in self.placed) / len(self.placed) for name in NAMES}

    @property
    def gain(self) -> dict[str, float]:
        """How many times longer each baseline takes than flex."""
        flex = self.seconds["flex"]
        return {name: value / flex if flex else 1.0 for name, value in self.seconds.items()}

    @property
    def helps(self) -> bool:
        """Whether `sequence.groups=auto` would take teams."""
        return self.gain[TODAY] >= LEAST_GAIN

    @cached_property
    def sent(self) -> Sent:
        """Bytes that a device sends in one layer for the first window."""
        return sent_bytes(self.plan, self.costs, self.first)

    @cached_property
    def exchange_share(self) -> float:
        """The share of a step of packed rows in which members exchange data for attention."""
        weights = self.shape.weights
        silent = dataclasses.replace(
            weights,
            forward=dataclasses.replace(weights.forward, stream=(0,) * self.shape.num_chunks),
            backward=dataclasses.replace(weights.backward, stream=(0,) * self.shape.num_chunks),
        )
        return self._saved(dataclasses.replace(self.shape, weights=silent), even=False)

    @cached_property
    def uneven_share(self) -> float:
        """The share of a step of packed rows that would be saved if all members of all cells had equal attention."""
        return self._saved(self.shape, even=True)

    def _saved(self, shape: WindowShape, *, even: bool) -> float:
        cost = saved = 0
        for pieces in self.windows:
            placement = today(pieces, shape)
            cells = placement.cells
            if even:
                cells = cells._replace(top=np.full_like(cells.top, round(float(placement.attention.mean()))))
            cost += today(pieces, self.shape).cost
            saved += step_cost(cells, shape)
        return 1 - saved / cost if cost else 0.0

    @cached_property
    def fill(self) -> float:
        """The share of the windows' places that hold tokens."""
        places = len(self.windows) * self.shape.rows * self.shape.length
        return sum(int(pieces.size.sum()) for pieces in self.windows) / places

    @cached_property
    def stream_share(self) -> float:
        """The share of the tokens that the chosen placements leave to all members."""
        placed = [found["flex"].windows[0] for found in self.placed]
        kept = sum(int(one.tokens()[one.cells.far].sum()) for one in placed)
        return kept / max(1, sum(int(pieces.size.sum()) for pieces in self.windows))

    @cached_property
    def long_share(self) -> float:
        """The share of the tokens in documents that are too long for half of the members."""
        most = int(self.shape.slots.max()) * (self.shape.members // 2)
        kept = sum(int(pieces.size[pieces.size > most].sum()) for pieces in self.windows)
        return kept / max(1, sum(int(pieces.size.sum()) for pieces in self.windows))

    def levels(self) -> list[tuple[str, str]]:
        """Returns the op and the level of each tick of the first window: "0", "1", ..., "S" for stream, "M" for both.

        Ticks of the head, which have no attention, are left out.
        """
        shape, cells = self.shape, self.first.cells
        near = tick_levels(cells._replace(far=np.zeros_like(cells.far)), shape)
        far = (tick_levels(cells, shape) == shape.levels) & (shape.levels > 0)
        padded = np.append((~cells.far).reshape(shape.data, -1).any(0), False)
        has_near = padded[shape.units].any(1)
        found = []
        for tick, op in enumerate(shape.ops.tolist()):
            if op != "H":
                found.append((op, _level_name(int(near[tick]), bool(far[tick]), bool(has_near[tick]))))
        return found

    def why(self) -> str:
        """Returns the reason of the gain."""
        if self.shape.members == 1:
            return "mesh.seq is 1, so every document has one device already"
        spent = (
            f"with packed rows, members spend {self.exchange_share:.1%} of a step on exchanges and "
            f"{self.uneven_share:.1%} on waiting for uneven attention, so teams can save little more than these shares"
        )
        if self.helps:
            return spent
        if self.exchange_share + self.uneven_share < LEAST_GAIN - 1:
            return spent
        if self.long_share > 0.5:
            return (
                f"{self.long_share:.0%} of the tokens are in documents that are too long for half of the "
                f"{self.shape.members} members of a chunk; {spent}"
            )
        if self.fill > _FULL and self.stream_share > 0.5:
            return (
                f"documents fill {self.fill:.2%} of the rows, which leaves no free slots for teams, so "
                f"{self.stream_share:.0%} of the tokens stay on all members (data.fill=0.98 leaves some padding); "
                f"{spent}"
            )
        return f"{self.stream_share:.0%} of the tokens stay on all members; {spent}"


def _level_name(level: int, far: bool, near: bool) -> str:
    if far:
        return "M" if near else "S"
    return f"{level:x}"


def figures_of_teams(
    config: Config, plan: Plan, windows: Sequence[Pieces], source: str, cluster: Cluster | None = None
) -> TeamFigures:
    """Places the documents of some windows in all ways that are compared.

    Args:
        config: the settings.
        plan: the plan of the settings.
        windows: the documents of each window, at least one window.
        source: where the documents come from, in words.
        cluster: as for `make_plan`.

    Raises:
        ValueError: the seq axis is no power of two.
    """
    costs = costs_of(plan, config, cluster)
    shape = window_shape(plan, costs)
    return TeamFigures(
        plan=plan,
        model=config.model,
        cluster=resolve_cluster(config, cluster),
        costs=costs,
        shape=shape,
        source=source,
        windows=tuple(windows),
        placed=tuple(baselines(pieces, shape) for pieces in windows),
    )
