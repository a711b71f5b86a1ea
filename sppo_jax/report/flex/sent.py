"""Bytes that a device sends in one layer for attention of a step: over all members, and within teams.

With teams of g members a device sends the keys and values of its T tokens to g - 1 others, forward and again backward,
and returns as many gradients in float32: 2 K H T (g - 1) * (2 * size + 4) bytes, or 16 K H T (g - 1) for bfloat16. A
ring over all members without a prefix would send the same bytes, with g = R.

Letters: T tokens of a tick on one member, K key/value heads, H head dim, R members.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sppo_jax.flex.placement import Placement
from sppo_jax.flex.shape import WindowShape
from sppo_jax.flex.step_cost import tick_levels
from sppo_jax.plan.plan import Plan
from sppo_jax.predict.seconds.costs import CostModel

_FLOAT32 = 4


@dataclass(frozen=True, kw_only=True)
class Sent:
    """Bytes of one device and one layer in the ticks of a window, forward and backward.

    Args:
        ring: a ring over all members sends the keys and values of each tick's chunk.
        today: packed rows with the plan's split (Ulysses, ring or both), prefixes included.
        grouped: the chosen placement's exchanges within teams.
        stream: the chosen placement's stream cells, with the plan's split.
    """

    ring: float
    today: float
    grouped: float
    stream: float

    @property
    def flex(self) -> float:
        """All bytes of the chosen placement."""
        return self.grouped + self.stream


def sent_bytes(plan: Plan, costs: CostModel, chosen: Placement) -> Sent:
    """Counts the bytes of a window's ticks.

    Args:
        plan: the plan; its split sends what stream cells send.
        costs: the planner's costs of the plan.
        chosen: the placement of the window's documents.
    """
    shape = chosen.shape
    cells = chosen.cells
    level = tick_levels(cells._replace(far=np.zeros_like(cells.far)), shape)
    is_stream = tick_levels(cells, shape) == shape.levels
    per_slot = near_bytes(plan, costs, 1)
    ring = today = in_teams = stream = 0.0
    for tick, slots in enumerate(shape.tick_slots.tolist()):
        op = str(shape.ops[tick])
        if op == "H":
            continue
        over_all = _split_bytes(op, slots, _reach(shape, tick), costs)
        ring += slots * (shape.members - 1) * per_slot[op]
        today += over_all
        in_teams += slots * (2 ** int(level[tick]) - 1) * per_slot[op]
        stream += over_all if shape.levels and is_stream[tick] else 0.0
    return Sent(ring=ring, today=today, grouped=in_teams, stream=stream)


def near_bytes(plan: Plan, costs: CostModel, others: int) -> dict[str, int]:
    """Returns the bytes of one slot within a team, by op of the unit.

    Args:
        plan: the plan.
        costs: its costs.
        others: members of the team besides the device.
    """
    elements = int(costs.layer.kv_elements) * others
    size = costs.compute_bytes
    return {"F": elements * size, "B": elements * (size + max(size, _FLOAT32))}


def _reach(shape: WindowShape, tick: int) -> int:
    """Returns the tokens of a row up to the end of the furthest chunk of a tick."""
    units = shape.units[tick]
    return int(shape.starts[units[units >= 0] % shape.num_chunks + 1].max(initial=0))


def _split_bytes(op: str, slots: int, reach: int, costs: CostModel) -> float:
    """Returns the bytes that the plan's split sends for a tick: Ulysses' all-to-all and the hops of the ring."""
    sent = costs.exchange_bytes(costs.recompute.attention)[op == "B"] * slots
    if costs.ring.members > 1:
        sent += costs.ring_bytes(op, slots, reach)
    return sent
