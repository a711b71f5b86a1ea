"""When weights of layer groups are fetched from the host and their gradients offloaded, if the host holds parameters.

While the ticks of one layer group run, the weights of the group whose turn is next are prefetched in equal parts, and
the gradients of the group whose turn was last are offloaded in as many parts. So a tick's compute overlaps each
transfer. Parts without a tick are exposed, at the turn itself: those of the first group's weights and of the last
group's gradients.
"""

from typing import NamedTuple

from sppo_jax.schedule.table import Table
from sppo_jax.schedule.turns import Turns

# A group of layers, and a part of its share.
Part = tuple[int, int]


class ShareTransfers(NamedTuple):
    """The transfers of a table.

    Args:
        num_parts: parts in which a group's share is transferred.
        fetches: of each compute tick the part of weights that is fetched. After the last turn these are of no use.
        come: of each tick at whose top weights are gathered how many parts have been fetched.
        writes: of each backward tick the part of gradients that is offloaded. What is offloaded before the first turn
            is overwritten later.
        left: of each tick at whose end sums are scattered, the group that was scattered before, and how many of its
            parts have been offloaded.
    """

    num_parts: int
    fetches: dict[int, Part]
    come: dict[int, int]
    writes: dict[int, Part]
    left: dict[int, Part]


def share_transfers(table: Table, turns: Turns) -> ShareTransfers:
    """Returns the transfers of a training step whose sequences are one wave."""
    compute = [index for index, tick in enumerate(table.ticks) if tick.is_compute]
    backward = [index for index in compute if table.ticks[index].op == "B"]
    num_parts = _num_parts(turns, backward)
    fetches: dict[int, Part] = {}
    come: dict[int, int] = {}
    gathers = sorted(turns.gathers)
    for at, begin, end in zip(gathers, [0, *gathers[:-1]], gathers, strict=True):
        ticks = [tick for tick in compute if begin <= tick < end]
        fetches |= _in_parts(ticks, turns.gathers[at][0], num_parts)
        come[at] = min(len(ticks), num_parts)
    fetches |= _in_parts([tick for tick in compute if tick >= gathers[-1]], turns.gathers[gathers[-1]][0], num_parts)
    writes: dict[int, Part] = {}
    left: dict[int, Part] = {}
    scatters = sorted(turns.scatters)
    before = [scatters[0], *scatters[:-1]]
    for at, begin in zip(scatters, before, strict=True):
        first = at == begin
        ticks = [tick for tick in backward if (tick <= at if first else begin < tick <= at)]
        group = turns.scatters[begin][0]
        writes |= _in_parts(ticks, group, num_parts)
        left[at] = group, num_parts if first else min(len(ticks), num_parts)
    return ShareTransfers(num_parts, fetches, come, writes, left)


def _num_parts(turns: Turns, backward: list[int]) -> int:
    """Returns the ticks between two turns, or all of the backward where it has one turn."""
    scatters = sorted(turns.scatters)
    gaps = [
        sum(begin < tick <= end for tick in backward) for begin, end in zip(scatters[:-1], scatters[1:], strict=True)
    ]
    return min(gaps) if gaps else len(backward)


def _in_parts(ticks: list[int], group: int, num_parts: int) -> dict[int, Part]:
    """Returns a part for each of some ticks, the last one again where ticks are left over."""
    return {tick: (group, min(place, num_parts - 1)) for place, tick in enumerate(ticks)}
