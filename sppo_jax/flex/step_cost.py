"""The cost of a step from its cells: every tick lasts as long as its slowest coordinate, over `data` and `pipe`.

Letters: w rows, C chunks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sppo_jax.flex.shape import WindowShape


class Cells(NamedTuple):
    """What a tick depends on, of each cell [w, C].

    `top`: pairs of the member that has most, int64. `level`: log2 of the members that exchange keys, int64; 0 where
    far. `far`: whether the cell runs as stream.
    """

    top: np.ndarray
    level: np.ndarray
    far: np.ndarray


def tick_costs(cells: Cells, shape: WindowShape) -> np.ndarray:
    """Returns the cost of each tick: int64 [ticks].

    All coordinates run the largest level of the tick. Where a tick has stream and team cells, all coordinates run
    both paths one after the other, and wait for each other in both.
    """
    near = _per_tick(np.where(cells.far, 0, cells.top), shape)
    far = _per_tick(np.where(cells.far, cells.top, 0), shape)
    level = _per_tick(cells.level, shape)
    costs = np.zeros(len(near), np.int64)
    for op in "FBH":
        weights = shape.weights.of(op)
        sent, exchange = np.array(weights.sent, np.int64), np.array(weights.stream, np.int64)
        stream = _per_tick(np.where(cells.far, exchange, 0), shape)
        fixed, slot = (np.where(shape.tick_ends, cost, 0) for cost in weights.ends)
        fixed, slot = weights.fixed + fixed, weights.slot + slot + sent[level]
        cost = fixed + slot * shape.tick_slots + weights.pair * (near + far) + stream
        costs = np.where(shape.ops == op, cost, costs)
    return costs


def step_cost(cells: Cells, shape: WindowShape) -> int:
    """Returns the cost of all ticks of the schedule table, as `predict.seconds.simulate` adds them up."""
    return sum(tick_costs(cells, shape).tolist())


def tick_levels(cells: Cells, shape: WindowShape) -> np.ndarray:
    """Returns the largest level of each tick, that of all members where the tick has a stream cell: int64 [ticks]."""
    return _per_tick(np.where(cells.far, shape.levels, cells.level), shape)


def _per_tick(values: np.ndarray, shape: WindowShape) -> np.ndarray:
    """Returns the maximum of values [w, C] over the units of each tick, at least 0: int64 [ticks]."""
    by_unit = values.reshape(shape.data, -1).max(0)
    return np.append(by_unit, 0)[shape.units].max(1)
