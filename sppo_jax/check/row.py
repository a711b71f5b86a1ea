"""A row of `sppo check`: what was found, what was expected, and the verdict; no jax.

Every row has a function that measures, on each process, and a pure judge that gets the figures of all processes.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

OK, SLOW, FAILS, UNKNOWN, NOT_JUDGED = "ok", "slow", "FAILS", "not known", "not judged"
# From good to bad: what is worst of several things is the verdict of a row.
_ORDER = (OK, NOT_JUDGED, UNKNOWN, SLOW, FAILS)
# What a process found, as JSON values. "error" is one line about a failure; "host" names the machine of the process.
Figures = Mapping[str, Any]
_NAME_WIDTH, _VERDICT_WIDTH = 26, 10


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the result.

    Args:
        value: what was found; names the device or the process that differs.
        expected: what was expected.
        verdict: one of the words of this module.
        change: what to do; "" where nothing is wrong.
    """

    value: str
    expected: str = ""
    verdict: str = OK
    change: str = ""

    def line(self, name: str) -> str:
        """Returns the line that is printed.

        Args:
            name: of the row.
        """
        expected = f" (expected: {self.expected})" if self.expected else ""
        change = f"; {self.change}" if self.change else ""
        text = f"{name:{_NAME_WIDTH}} {self.verdict:{_VERDICT_WIDTH}} {self.value}{expected}{change}"
        return " ".join(text.splitlines())


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What judges compare figures with; the planner's figures of a device.

    Args:
        is_timed: whether rates are judged: not on CPUs.
        matmul_flops_s: the peak.
        hbm_bytes_s: of the datasheet.
        attention_flops_s: of the forward over a long prefix, and of the backward.
        host_link_bytes_s: of a device alone, and of one while all devices of a host copy both ways.
        link_bytes_s: to a device of the same host.
        network_bytes_s: to a device of another host.
        pool_bytes: device memory that the plan counts on; 0 where there is no plan.
        plan_bytes: device memory that the plan takes; 0 where there is no plan.
        checkpoint_bytes: of two checkpoints; 0 where none is saved.
        uses_host: whether the plan copies to the host.
        num_devices: of all processes.
    """

    is_timed: bool
    matmul_flops_s: float = 0.0
    hbm_bytes_s: float = 0.0
    attention_flops_s: tuple[float, float] = (0.0, 0.0)
    host_link_bytes_s: tuple[float, float] = (0.0, 0.0)
    link_bytes_s: float = 0.0
    network_bytes_s: float = 0.0
    pool_bytes: int = 0
    plan_bytes: int = 0
    checkpoint_bytes: int = 0
    uses_host: bool = False
    num_devices: int = 1


def worst(verdicts: Sequence[str]) -> str:
    """Returns the worst of some verdicts; ok where there is none."""
    return max(verdicts, key=_ORDER.index, default=OK)


def errors(found: Sequence[Figures]) -> str:
    """Returns what failed in which process; "" where nothing did."""
    return ", ".join(f"process {k} on {one['host']}: {one['error']}" for k, one in enumerate(found) if "error" in one)


def by_device(found: Sequence[Figures], key: str) -> Iterator[tuple[str, Any]]:
    """Yields the name of each device, and its figure, in the order of processes and their devices.

    Args:
        found: the figures of all processes.
        key: of a list with a figure of each local device.
    """
    alone = len(found) == 1
    for process, one in enumerate(found):
        for device, figure in enumerate(one[key]):
            yield (f"device {device}" if alone else f"device {device} of process {process} on {one['host']}"), figure


def odd_ones(values: Sequence[tuple[str, Any]]) -> tuple[list[str], Any]:
    """Returns the names of those that differ from most, and what most have; the first one's, where none is the most.

    Args:
        values: names and what they have.
    """
    most = statistics.mode([value for _, value in values])
    return [name for name, value in values if value != most], most


def rate(per_s: float, unit: str) -> str:
    """Returns a rate in words: FLOP/s in TFLOP/s, bytes in GB/s.

    Args:
        per_s: FLOP or bytes a second.
        unit: "FLOP" or "B".
    """
    size, letter = (1e12, "T") if unit == "FLOP" else (1e9, "G")
    return f"{per_s / size:.3g} {letter}{unit}/s"


def judge_rates(values: Sequence[tuple[str, float]], unit: str, least: float, wanted: Wanted, change: str) -> Row:
    """Returns the row of one rate of each device.

    Args:
        values: names and rates.
        unit: "FLOP" or "B".
        least: the rate below which a device is slow.
        wanted: says whether rates are judged.
        change: what to do about a slow device.
    """
    slowest, lowest = min(values, key=lambda value: value[1])
    middle = statistics.median(value for _, value in values)
    text = (
        rate(middle, unit)
        if len(values) == 1
        else f"{rate(middle, unit)} in the median, {slowest} {rate(lowest, unit)}"
    )
    if not wanted.is_timed:
        return Row(value=text, verdict=NOT_JUDGED)
    expected = f"at least {rate(least, unit)}"
    if lowest < least:
        return Row(value=text, expected=expected, verdict=SLOW, change=change)
    return Row(value=text, expected=expected)
