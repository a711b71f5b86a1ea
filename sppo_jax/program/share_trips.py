"""When weights come from the host and gradients leave for it, where parameters wait there: part by part, tick by tick.

While the ticks of one group of layers run, the weights of the group whose turn is next come in equal parts, and the
gradients of the group whose turn was last leave in as many parts. So each trip has a tick's compute beside it. Parts
for which there is no tick travel at the turn itself: the first group's weights, and the last group's gradients.
"""

from typing import NamedTuple

from sppo_jax.schedule.table import Table
from sppo_jax.schedule.turns import Turns

# A group of layers, and a part of its share.
Part = tuple[int, int]


class ShareTrips(NamedTuple):
    """The trips of a table.

    Args:
        num_parts: parts in which a group's share travels.
        fetches: of each compute tick the part of weights that comes. Behind the last turn these are of no use.
        come: of each tick at whose top weights are gathered how many parts have come.
        writes: of each backward tick the part of gradients that leaves. What leaves before the first turn is
            overwritten later.
        left: of each tick at whose end sums are scattered, the group that was scattered before, and how many of its
            parts have left.
    """

    num_parts: int
    fetches: dict[int, Part]
    come: dict[int, int]
    writes: dict[int, Part]
    left: dict[int, Part]


def share_trips(table: Table, turns: Turns) -> ShareTrips:
    """Returns the trips of a training step whose sequences are one wave."""
    compute = [index for index, tick in enumerate(table.ticks) if tick.is_compute]
    backward = [index for index in compute if table.ticks[index].kind == "B"]
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
    return ShareTrips(num_parts, fetches, come, writes, left)


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
