"""The most of something that a stage holds at once, from what comes and goes tick by tick.

Arrays: T ticks, S stages.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

Change = tuple[int, int]  # a tick, and by how much what is held grows in it or shrinks behind it


class Repeat(NamedTuple):
    """Ticks of a table that run several times, for the next sequences each time.

    Args:
        start: the first of the ticks.
        stop: the tick after the last of them.
        rounds: how often they run.
        sequences: sequences by which a round goes on.
    """

    start: int
    stop: int
    rounds: int
    sequences: int


def _by_tick(change: Change) -> tuple[int, int]:
    return change[0], -change[1]


def peak(changes: Iterable[Change], repeats: Sequence[Repeat]) -> int:
    """Returns the most that is held at once; what comes in a tick is held together with what goes behind it."""
    found = sorted(changes, key=_by_tick)
    for start, stop, rounds, _ in repeats:
        growth = (rounds - 1) * sum(change for tick, change in found if start <= tick < stop)
        if growth:
            # Most is held in the last round where it grows, in the first where it shrinks.
            found = sorted([*found, (start if growth > 0 else stop, growth)], key=_by_tick)
    return max(accumulate(change for _, change in found), default=0)


def peaks(ticks_T: np.ndarray, changes_TS: np.ndarray, repeats: Sequence[Repeat]) -> np.ndarray:
    """Returns for each stage what `peak` does, 0 at least, where a tick changes what a stage holds at most once.

    Args:
        ticks_T: the ticks, rising; among them the first of each repeat and the one after its last.
        changes_TS: by how much what a stage holds grows in a tick, or shrinks behind it.
        repeats: as in `peak`.
    """
    come_TS, go_TS = np.maximum(changes_TS, 0), np.minimum(changes_TS, 0)
    for start, stop, rounds, _ in repeats:
        first, behind = np.searchsorted(ticks_T, (start, stop))
        growth_S = (rounds - 1) * (come_TS[first:behind] + go_TS[first:behind]).sum(axis=0)
        come_TS[first] += np.maximum(growth_S, 0)
        go_TS[behind] += np.minimum(growth_S, 0)
    held_TS = np.cumsum(come_TS + go_TS, axis=0) - go_TS
    return held_TS.max(axis=0, initial=0)
