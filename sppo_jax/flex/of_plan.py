"""The window of a plan, with the planner's seconds as integer costs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from sppo_jax.flex.shape import IntegerCosts, UnitWeights, WindowShape
from sppo_jax.plan.plan import Plan, schedule_table
from sppo_jax.predict.seconds.attention import AttentionOfType, kernel_pairs
from sppo_jax.predict.seconds.costs import CostModel
from sppo_jax.schedule.table import Table, TickShape, chunk_starts

_FLOAT32 = 4
# Bits of the cost of the longest unit: what is added up over ticks still fits an int64.
_BITS = 48


def window_shape(plan: Plan, costs: CostModel, window: int | None = None) -> WindowShape:
    """Returns the window of a plan.

    Args:
        plan: the plan.
        costs: the planner's seconds of the plan's units (`search.evaluate.costs_of`).
        window: rows of the window; None: those of a step. Fewer rows are those of some pipelines, or part of those of
            one.

    Raises:
        ValueError: the window does not divide a step into such parts, or the seq axis is no power of two.
    """
    rows = plan.num_sequences if window is None else window
    data, table = _part(plan, rows)
    return WindowShape(
        rows=rows,
        data=data,
        ring=plan.ring,
        ulysses=plan.ulysses,
        chunk_lengths=plan.chunk_lengths,
        table=table,
        weights=plan_weights(plan, costs),
    )


def _part(plan: Plan, rows: int) -> tuple[int, Table]:
    """Returns the pipelines that a window spans, and the schedule table of its rows in one of them."""
    each, schedule = plan.sequences_per_pipeline, plan.schedule
    if rows >= 1 and plan.num_sequences % rows == 0 and rows % each == 0:
        return rows // each, plan.table()
    if rows >= 1 and each % rows == 0 and rows % schedule.wave == 0 and schedule.csv is None:
        return 1, schedule_table(schedule, plan.mesh.pipe, rows, plan.chunk_lengths)
    waves = "" if schedule.wave == 1 else f" into whole waves of {schedule.wave}"
    raise ValueError(
        f"a window must be the rows of a step, {plan.num_sequences}, or a part of them that holds whole pipelines of "
        f"{each} rows or divides one{waves} whose schedule has a name, got {rows}; change the window"
    )


def plan_weights(plan: Plan, costs: CostModel) -> IntegerCosts:
    """Returns the planner's seconds as integers, in the same power-of-two part of a second on every process.

    What a pipeline sends between stages is charged for each slot. In a team cell a device receives keys and values
    of 2^level - 1 other members forward and again backward, and sends float32 gradients of as many back.

    Args:
        plan: the plan.
        costs: the planner's seconds of the plan's units.
    """
    longest = max(costs.seconds(op, 0, plan.sequence_length) for op in "FBH")
    unit_s = 2.0 ** (math.ceil(math.log2(longest)) - _BITS)

    def whole(seconds: float) -> int:
        return round(seconds / unit_s)

    forward, backward, head = (_unit(plan, costs, op, whole) for op in "FBH")
    return IntegerCosts(forward=forward, backward=backward, head=head, unit_s=unit_s)


def _unit(plan: Plan, costs: CostModel, op: str, whole: Callable[[float], int]) -> UnitWeights:
    bare, inner = _without_exchange(costs), TickShape(0, 0, has_ends=False)
    starts = chunk_starts(plan.chunk_lengths)

    def sent_s(model: CostModel, start: int, tokens: int) -> float:
        return model.transfer_s(op, start, tokens, inner)

    # A head tick has the head's table whatever its shape says.
    always_s, ends_s = sent_s(bare, 0, 0), 0.0 if op == "H" else bare.ends_s(op, 0)
    slot_ends_s = 0.0 if op == "H" else bare.ends_s(op, plan.mesh.seq) - ends_s
    return UnitWeights(
        fixed=whole(costs.compute_s(op, 0, 0) + costs.cluster.device.overhead_s + always_s),
        slot=whole(costs.token_s(op) + sent_s(bare, 0, plan.mesh.seq) - always_s),
        pair=whole(_pair_s(plan, costs, op)),
        sent=tuple(whole(seconds) for seconds in _sent_s(plan, costs, op)),
        stream=tuple(
            whole(sent_s(costs, start, tokens) - sent_s(bare, start, tokens))
            for start, tokens in zip(starts[:-1], plan.chunk_lengths, strict=True)
        ),
        ends=(whole(ends_s), whole(slot_ends_s)),
    )


def _without_exchange(costs: CostModel) -> CostModel:
    """Returns the costs of the same stages without what attention sends along the `seq` axis."""
    ring = dataclasses.replace(costs.ring, members=1, ulysses=1)
    return dataclasses.replace(costs, ulysses=1, ring=ring)


def _pair_s(plan: Plan, costs: CostModel, op: str) -> float:
    """Returns the seconds of a (query, key) pair of a long sequence on one device, over the layers of a unit."""
    if op == "H":
        return 0.0
    again, total = float(costs.recompute.attention), 0.0
    for one in costs.attention:
        forward, backward = _times(plan, costs, one)
        times = forward if op == "F" else costs.backward_times(one) * backward + again * forward
        total += times * costs.pair_s_of(one)
    return total * plan.mesh.seq


def _times(plan: Plan, costs: CostModel, layer_type: AttentionOfType) -> tuple[float, float]:
    """Returns what a pair with a key of a long prefix takes, by the time of a pair: steps of the kernel for TPUs."""
    if not costs.has_bundles or layer_type.window:
        return 1.0, 1.0
    pairs, tokens, length = kernel_pairs(costs, layer_type), max(plan.chunk_lengths), plan.sequence_length
    forward, backward = (
        (far - near) / (tokens * length)
        for far, near in zip(pairs(2 * length, tokens), pairs(length, tokens), strict=True)
    )
    return forward, backward


def _sent_s(plan: Plan, costs: CostModel, op: str) -> list[float]:
    """Returns the seconds of what a slot of a team cell receives, over the layers of a unit, by level."""
    # A head sends nothing along `seq`.
    elements = float(costs.layer.kv_elements * costs.layers) * costs.cache_share * (op != "H")
    # Backward passes keys and values again, once more where it computes attention again, and float32 gradients back.
    passes, sums = (1, 0) if op == "F" else (1 + costs.recompute.attention, _FLOAT32)
    size = elements * (passes * costs.compute_bytes + sums)
    seconds = [0.0]
    for level in range(plan.mesh.seq.bit_length() - 2):
        # Exchange `level` passes 2^level blocks between members that lie as far apart.
        seconds.append(seconds[-1] + 2**level * size / costs.cluster.link_bytes_s(2 ** (level + 1)))
    return seconds
