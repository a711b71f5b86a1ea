"""Pinned memory and copies between devices and the host, one alone and all at once; and loops that wait for them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax

from sppo_jax.check.row import FAILS, NOT_JUDGED, SLOW, Figures, Row, Wanted, by_device, errors, rate
from sppo_jax.files.format_bytes import format_bytes
from sppo_jax.hardware import machine
from sppo_jax.processes.host_pool import fill
from sppo_jax.profile.copies import WAYS, copy_bytes_s
from sppo_jax.profile.loops import loop_seconds, wait_share
from sppo_jax.profile.timing import Timer

# Share of the planner's rate below which copies of all devices at once are slow, and the rate below which the system
# does not give the link that the card has.
_LEAST_SHARE, _BROKEN_BYTES_S = 0.7, 10e9
_LEAST_OF_MEDIAN = 0.8
_LEAST_PINNED_BYTES_S = 2**30


def measure_pinning(devices: Sequence[jax.Device], num_bytes: int, plan_bytes: int) -> Figures:
    """Returns the bytes a second that are pinned for each device of this process, while all of them pin.

    Args:
        devices: of this process.
        num_bytes: of each.
        plan_bytes: that a device of the plan pins.
    """
    begin = time.perf_counter()
    with ThreadPoolExecutor(len(devices)) as threads:
        list(threads.map(partial(fill, [num_bytes]), devices))
    bytes_s = num_bytes / (time.perf_counter() - begin)
    return {"pinning_bytes_s": bytes_s, "plan_bytes": plan_bytes, "lockable_bytes": machine.lockable_bytes()}


def judge_pinning(found: Sequence[Figures], wanted: Wanted) -> Row:
    """Returns the row of pinning in all processes."""
    if problem := errors(found):
        return Row(value=problem, verdict=FAILS, change="raise ulimit -l, or free memory of the host")
    least = min(one["pinning_bytes_s"] for one in found)
    text = f"{rate(least, 'B')} a device"
    if plan_bytes := max(one["plan_bytes"] for one in found):
        text += f": {plan_bytes / least / 60:.1f} minutes for the plan's {format_bytes(plan_bytes)} a device"
    expected = f"at least {rate(_LEAST_PINNED_BYTES_S, 'B')}"
    if least < _LEAST_PINNED_BYTES_S:
        return Row(value=text, expected=expected, verdict=SLOW, change="allow for it: a run pins before its first step")
    return Row(value=text, expected=expected)


def measure(timer: Timer, alone: Timer | None, ways: Sequence[str], num_rows: int, row_bytes: int) -> Figures:
    """Returns the bytes a second, one way, of the devices of this process.

    Args:
        timer: of the devices of this process.
        alone: of one of them, in the first process of each host; None in the others, which wait.
        ways: what to measure.
        num_rows: of a buffer.
        row_bytes: of a row.
    """
    found = {way: copy_bytes_s(timer, way, num_rows, row_bytes) for way in ways}
    one = {way: copy_bytes_s(alone, way, num_rows, row_bytes)[0] for way in ways} if alone else {}
    return {"all": found, "alone": one}


def judge(found: Sequence[Figures], wanted: Wanted) -> Row:
    """Returns the row of host copies of all processes."""
    if problem := errors(found):
        return Row(value=problem, verdict=FAILS, change="look at ulimit -l and at the memory of the host")
    ways = [way for way in WAYS if way in found[0]["all"]]
    values = {way: list(by_device([{**one, "x": one["all"][way]} for one in found], "x")) for way in ways}
    lowest = {way: min(of_way, key=lambda value: value[1]) for way, of_way in values.items()}
    alone = [f"{way} {rate(found[0]['alone'][way], 'B')}" for way in ways if way in found[0]["alone"]]
    together = ", ".join(f"{way} {rate(lowest[way][1], 'B')}" for way in ways)
    text = f"all at once: {together}"
    text += f"; alone: {', '.join(alone)}" if alone else ""
    if not wanted.is_timed:
        return Row(value=text, verdict=NOT_JUDGED)
    name, least = min(lowest.values(), key=lambda value: value[1])
    expected, change = (
        f"at least {rate(_LEAST_SHARE * wanted.host_link_bytes_s[1], 'B')}",
        "give check.json to hardware.measured",
    )
    numa = "bind each process to its NUMA node (numactl, nvidia-smi topo -m)"
    if least < _BROKEN_BYTES_S and wanted.host_link_bytes_s[0] > _BROKEN_BYTES_S:
        return Row(value=f"{text}; {name} is slowest", expected=expected, verdict=FAILS, change=numa)
    for way, of_way in values.items():
        middle = statistics.median(value for _, value in of_way)
        if lowest[way][1] < _LEAST_OF_MEDIAN * middle:
            value = f"{text}; {lowest[way][0]} is slowest"
            return Row(value=value, expected=expected, verdict=SLOW, change=numa)
    if least < _LEAST_SHARE * wanted.host_link_bytes_s[1]:
        return Row(value=text, expected=expected, verdict=SLOW, change=change)
    return Row(value=text, expected=expected)


def measure_loops(timer: Timer, turns: int, side: int) -> Figures:
    """Returns the share of a copy to the host for which a loop of an unknown count waits; see `profile.loops`.

    Args:
        timer: of the devices of this process.
        turns: of the outer loop.
        side: rows and columns of its matrices.
    """
    return {"wait_share": wait_share(loop_seconds(timer, turns, side))}


def judge_loops(found: Sequence[Figures], wanted: Wanted) -> Row:
    """Returns the row of loops that wait: never wrong, it feeds the planner."""
    if problem := errors(found):
        return Row(value=problem, verdict=FAILS)
    share = max(one["wait_share"] for one in found)
    text = f"a loop of attention waits for {share:.0%} of a write to the host"
    return Row(value=text, verdict=NOT_JUDGED)
