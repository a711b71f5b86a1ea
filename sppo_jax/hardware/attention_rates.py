"""Measured rates of attention by the way, the queries and the keys of a call, and those between."""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

WAYS = ("forward", "backward")


@dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """What attention reached.

    Args:
        way: "forward" or "backward".
        queries: of a head.
        keys: of a head, those before the queries and their own.
        flops_s: FLOP/s, counting two matmuls forward and five backward.
    """

    way: str
    queries: int
    keys: int
    flops_s: float


class AttentionRates(NamedTuple):
    """Calls by their numbers of keys, rising; `make_rates` makes them.

    Attributes:
        forward, backward: the binary logarithm of keys, with those of queries, rising, and the FLOP/s of each call.
    """

    forward: tuple[tuple[float, tuple[tuple[float, float], ...]], ...]
    backward: tuple[tuple[float, tuple[tuple[float, float], ...]], ...]

    def flops_s(self, way: str, queries: float, keys: float) -> float:
        """Returns the FLOP/s of a call: between measured ones by logarithms of lengths, beyond them the nearest's."""
        by_keys = self.forward if way == "forward" else self.backward
        at = math.log2(max(1.0, queries))
        return _between(by_keys, math.log2(max(1.0, keys)), lambda calls: _between(calls, at, lambda flops_s: flops_s))

    def fastest(self, way: str) -> float:
        """Returns the FLOP/s of the fastest call."""
        by_keys = self.forward if way == "forward" else self.backward
        return max(flops_s for _, calls in by_keys for _, flops_s in calls)


def _between(rows: Sequence[tuple[float, Any]], at: float, value: Callable[[Any], float]) -> float:
    """Returns the value at a place between two rows that begin with their places, or that of the nearest end."""
    number = bisect_left(rows, at, key=lambda row: row[0])
    if number in (0, len(rows)):
        return value(rows[min(number, len(rows) - 1)][1])
    (low, before), (high, behind) = rows[number - 1], rows[number]
    share = (at - low) / (high - low)
    return (1 - share) * value(before) + share * value(behind)


def make_rates(calls: Iterable[AttentionCall]) -> AttentionRates:
    """Returns the rates of calls of both ways; of several calls alike the mean counts."""
    found: dict[str, dict[int, dict[int, list[float]]]] = {way: {} for way in WAYS}
    for call in calls:
        found[call.way].setdefault(call.keys, {}).setdefault(call.queries, []).append(call.flops_s)

    def rows(by_keys: dict[int, dict[int, list[float]]]) -> tuple[tuple[float, tuple[tuple[float, float], ...]], ...]:
        return tuple(
            (math.log2(keys), tuple((math.log2(queries), sum(x) / len(x)) for queries, x in sorted(of_keys.items())))
            for keys, of_keys in sorted(by_keys.items())
        )

    return AttentionRates(*(rows(found[way]) for way in WAYS))
