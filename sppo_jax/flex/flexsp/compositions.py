"""All ways to divide a cluster into teams, and how fast each could be if documents were divisible.

Suffixes: C compositions, D degrees (increasing), K documents (longest first).
"""

from __future__ import annotations

import functools

import numpy as np

from sppo_jax.flex.flexsp.costs import TeamCosts

_BISECTIONS = 11
# The estimate ends at this multiple of the least work of a device, or of the longest document if that is more.
_MOST = 4


@functools.cache
def compositions(num_devices: int, degrees: tuple[int, ...]) -> np.ndarray:
    """Returns the numbers of teams of each degree, for every way to use all devices.

    A way that leaves devices idle is a way that uses all devices, with teams that have no documents.

    Args:
        num_devices: devices of the cluster.
        degrees: allowed sizes of teams, increasing; each divides the next and the number of devices.

    Returns:
        int64 [compositions, degrees]; 202 rows for 64 devices and degrees 2 to 64.
    """

    def ways(left: int, upto: int) -> list[tuple[int, ...]]:
        if upto == 0:
            return [(left // degrees[0],)]
        most = left // degrees[upto]
        return [(*way, count) for count in range(most + 1) for way in ways(left - count * degrees[upto], upto - 1)]

    return np.array(ways(num_devices, len(degrees) - 1), np.int64)


def fluid_times(counts_CD: np.ndarray, lengths_K: np.ndarray, times_KD: np.ndarray, costs: TeamCosts) -> np.ndarray:
    """Estimates the time of each composition without the fixed time, documents being divisible.

    Degrees are filled with the longest documents first, largest degree first, up to a time and a number of tokens. This
    order is optimal while tokens do not bind, since a long document loses least by a larger team.

    Args:
        counts_CD: teams of each degree.
        lengths_K: tokens, longest first.
        times_KD: see `TeamCosts.times_KD`.
        costs: the costs.

    Returns:
        int64 [compositions], nanoseconds; compositions that are far slower than the best all have the same estimate.
    """
    ends_DK = np.cumsum(np.pad(times_KD, ((1, 0), (0, 0))), axis=0).T.copy()
    tokens_K = np.cumsum(np.pad(lengths_K, (1, 0)))
    least = max(least_work_ns(times_KD, costs), int(times_KD[0, costs.tokens_D() >= lengths_K[0]].min()))
    low, high = np.full(len(counts_CD), least), np.full(len(counts_CD), _MOST * least)
    for _ in range(_BISECTIONS):
        middle = (low + high) // 2
        fits = _fits(counts_CD, middle, ends_DK, tokens_K, costs.tokens_D(), times_KD, lengths_K)
        high, low = np.where(fits, middle, high), np.where(fits, low, middle)
    return high


def least_work_ns(times_KD: np.ndarray, costs: TeamCosts) -> int:
    """Returns the time if each document takes its cheapest degree and all devices share the work evenly."""
    return int((times_KD * np.array(costs.degrees)).min(axis=1).sum()) // costs.num_devices


def _fits(
    counts_CD: np.ndarray,
    limit_C: np.ndarray,
    ends_DK: np.ndarray,
    tokens_K: np.ndarray,
    tokens_D: np.ndarray,
    times_KD: np.ndarray,
    lengths_K: np.ndarray,
) -> np.ndarray:
    """Returns whether all documents fit in the time, bool [compositions]; places are rounded up to whole documents."""
    num = len(lengths_K)
    place = np.zeros(len(counts_CD), np.int64)
    for degree in reversed(range(counts_CD.shape[1])):
        count, ends = counts_CD[:, degree], ends_DK[degree]
        next_K = np.minimum(place, num - 1)
        longest_fits = (times_KD[next_K, degree] <= limit_C) & (lengths_K[next_K] <= tokens_D[degree])
        by_time = np.searchsorted(ends, ends[place] + count * limit_C, side="right") - 1
        by_tokens = np.searchsorted(tokens_K, tokens_K[place] + count * tokens_D[degree], side="right") - 1
        place = np.where(longest_fits & (count > 0), np.minimum(by_time, by_tokens), place)
    return place >= num
