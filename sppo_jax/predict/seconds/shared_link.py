"""A card's link that copies to its host share with what the card sends to other hosts: both together take its rate.

Copies overlap with compute, sends do not. So a tick whose copies and sends together take longer than it lasts as long
as both.
"""

import math
from collections.abc import Callable
from dataclasses import replace

from sppo_jax.predict.seconds.costs import CostModel
from sppo_jax.schedule.table import Table, TickShape


def network_bytes(costs: CostModel) -> Callable[[str, int, int, TickShape], float]:
    """Returns the bytes that a device sends to other hosts on the link of its copies, by the arguments of `transfer_s`.

    Args:
        costs: seconds of units.
    """
    cluster = costs.cluster
    if math.isinf(cluster.slot_bytes_s):
        return lambda op, start, tokens, tick: 0.0
    # What is sent within a host takes no time here.
    device = replace(cluster.device, link_bytes_s=math.inf)
    between = replace(costs, cluster=replace(cluster, device=device))
    return lambda op, start, tokens, tick: between.transfer_s(op, start, tokens, tick) * device.network_bytes_s


def with_sends(table: Table, copies_s: tuple[float, ...], costs: CostModel) -> tuple[float, ...]:
    """Returns the seconds of each tick's host copies and of what the tick sends on the same link.

    Args:
        table: the schedule.
        copies_s: seconds of the copies beside each tick, at the rate of the link to the host.
        costs: seconds of units.
    """
    cluster, sent = costs.cluster, network_bytes(costs)
    if math.isinf(cluster.slot_bytes_s) or not any(copies_s):
        return copies_s
    known: dict[tuple[str, TickShape], float] = {}

    def seconds(copy_s: float, op: str, shape: TickShape) -> float:
        if (op, shape) not in known:
            known[op, shape] = sent(op, max(0, shape.reach - shape.tokens), shape.tokens, shape)
        return max(copy_s, (copy_s * cluster.host_link_bytes_s + known[op, shape]) / cluster.slot_bytes_s)

    ticks = zip(copies_s, table.ticks, table.tick_shapes, strict=True)
    return tuple(seconds(copy_s, tick.op, shape) if copy_s else copy_s for copy_s, tick, shape in ticks)
