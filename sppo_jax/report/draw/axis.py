"""Axes of charts: where they begin and end, round ticks, and the texts at them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

_MOST_DIGITS = 18  # a float has no more


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One axis.

    Args:
        label: what it shows.
        log: whether it is logarithmic.
        low: where the axis begins; None: at the smallest value.
        high: where the axis ends; None: at the largest value.
        percent: whether values are shares.
        whole: whether values are counts: ticks at whole numbers, with K and M for thousands and millions.
    """

    label: str
    log: bool = False
    low: float | None = None
    high: float | None = None
    percent: bool = False
    whole: bool = False


def axis_ends(axis: Axis, values: Sequence[float]) -> tuple[float, float]:
    """Returns the values at which an axis begins and ends; points at an edge that the axis does not set lie inside.

    Args:
        axis: the axis.
        values: all values that are drawn along the axis.

    Raises:
        ValueError: there are no values, a value is not finite, or a value of a logarithmic axis is not above 0.
    """
    if not values:
        raise ValueError("a chart needs at least one point, got none: give its series some")
    if any(not math.isfinite(value) or (axis.log and value <= 0) for value in values):
        wanted = "finite values above 0" if axis.log else "finite values"
        raise ValueError(f"the axis {axis.label!r} takes {wanted}, got others: drop them")
    low = min(values) if axis.low is None else axis.low
    high = max(values) if axis.high is None else axis.high
    if low == high:
        low, high = (low / 2, high * 2) if axis.log else (low - 1, high + 1)
    before, after = 0.04 * (axis.low is None), 0.04 * (axis.high is None)
    if axis.log:
        return low / (high / low) ** before, high * (high / low) ** after
    return low - before * (high - low), high + after * (high - low)


class Scale:
    """Maps the values of an axis to pixels."""

    def __init__(self, axis: Axis, values: list[float], start: float, stop: float) -> None:
        low, high = axis_ends(axis, values)
        self.axis, self.start, self.stop = axis, start, stop
        self.low, self.high = (math.log10(low), math.log10(high)) if axis.log else (low, high)

    def __call__(self, value: float) -> float:
        value = math.log10(value) if self.axis.log else value
        return self.start + (value - self.low) / (self.high - self.low) * (self.stop - self.start)

    def ticks(self) -> list[float]:
        """Returns round values along the axis."""
        if not self.axis.log:
            return self._even_ticks(self.low, self.high)
        low, high = 10**self.low, 10**self.high
        found = _powers_of_two(low, high) if self.axis.whole else _round_values(self.low, self.high)
        # A range of less than a power or two is about even.
        return found if len(found) > 1 else self._even_ticks(low, high)

    def _even_ticks(self, low: float, high: float) -> list[float]:
        step = _round_step((high - low) / 5)
        step = max(1.0, math.ceil(step)) if self.axis.whole else step
        first = math.ceil(low / step - 1e-9)
        return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]

    def labels(self) -> list[tuple[float, str]]:
        """Returns the ticks with their texts, of as many digits as it takes to tell ticks apart."""
        ticks = self.ticks()
        for digits in range(3 if self.axis.percent else 4, _MOST_DIGITS):
            texts = [self._text(value, digits) for value in ticks]
            if len(set(texts)) == len(texts):
                break
        return list(zip(ticks, texts, strict=True))

    def _text(self, value: float, digits: int) -> str:
        if self.axis.percent:
            return f"{value * 100:.{digits}g}%"
        if self.axis.whole and not self.axis.log:
            return count_text(value, digits)
        if value >= 1024 and value % 1024 == 0 and self.axis.log and self.axis.whole:
            return f"{value / 1024:.0f}K" if value < 2**20 else f"{value / 2**20:.0f}M"
        if value >= 1e4 and self.axis.log:
            return count_text(value, digits)
        return f"{value:{',' if self.axis.log else ''}.{digits}g}".replace("e-0", "e-")


def count_text(value: float, digits: int = 4) -> str:
    """Returns a count in short, with so many digits from 10,000 on: 950, 12K, 1.5M."""
    for least, size, unit in ((1e9, 1e9, "B"), (1e6, 1e6, "M"), (1e4, 1e3, "K")):
        if abs(value) >= least:
            return f"{value / size:.{digits}g}{unit}"
    return f"{value:,.0f}"


def _powers_of_two(low: float, high: float) -> list[float]:
    """Returns powers of two between two values, ten at most; of a wide range powers of ten."""
    if high >= 1e4 * low:
        return [10.0**power for power in range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)]
    powers = range(math.ceil(math.log2(low) - 1e-9), math.floor(math.log2(high) + 1e-9) + 1)
    return [2.0**power for power in powers if power % max(1, len(powers) // 9 + 1) == 0]


def _round_values(low: float, high: float) -> list[float]:
    """Returns 1, 2 and 5 times powers of ten between two logarithms; of a wide range the powers alone."""
    factors = (1, 2, 5) if high - low < 4 else (1,)
    powers = range(math.floor(low), math.floor(high) + 1)
    found = [factor * 10.0**power for power in powers for factor in factors]
    return [value for value in found if low - 1e-9 <= math.log10(value) <= high + 1e-9]


def _round_step(step: float) -> float:
    """Returns the smallest of 1, 2, 2.5, 5 times a power of ten that is at least `step`."""
    power = 10 ** math.floor(math.log10(step))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= step * (1 - 1e-9))
