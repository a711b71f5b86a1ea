"""Part `overlap`: a traced train step: what share of the time of host copies has a kernel beside it, and what waits.

The profiler's trace has a row for each stream of the GPU. Intervals are in microseconds, as the trace has them. While
a profiler runs, XLA takes nothing into CUDA graphs, so the program that is traced starts each kernel by itself.
"""

from __future__ import annotations

import gzip
import json
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax

from bench.gpu_parts import step
from bench.gpu_parts.case import Case, Emit
from bench.gpu_parts.program import Program, Target, timed
from bench.gpu_parts.room import needed_gib

Interval = tuple[float, float]
# Shorter pauses between kernels are the cost of starting them.
_LAUNCH_US = 20.0
_MOST_KERNELS = 60
# Beside every figure of this part.
NOTE = "traced without CUDA graphs: XLA leaves them out while a profiler runs"


def cases(*, tiny: bool) -> list[Case]:
    """List the cases."""
    if tiny:
        return [Case(part="overlap", name="tiny", settings=step.TINY_STEP, expected_s=10, limit_s=120)]
    stash = "all on the host"
    settings = {"model": step.ONE_BILLION, "length": 128 * 1024, "stash": stash, "host_gib": step.HOST_GIB}
    needs = {"hbm_gib": 70.0, "host_gib": needed_gib(step.HOST_GIB)}
    by_order = {"": settings, ", breadth-first": settings | {"schedule": step.BREADTH_FIRST}}
    return [
        Case(part="overlap", name=f"1B at 128K, {stash}{order}", settings=one, expected_s=85, limit_s=400, **needs)
        for order, one in by_order.items()
    ]


def programs(settings: dict, target: Target) -> Iterator[Program]:
    """List the program of a case, which is one of part `step`."""
    yield from step.programs(settings, target)


def run(settings: dict, device: str, emit: Emit) -> None:
    """Trace one step after two that are not, and read the trace."""
    ready = step.prepare(settings, device)
    (untraced_s,) = timed(ready.once, runs=1)
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, create_perfetto_trace=True, profiler_options=options):
            jax.block_until_ready(ready.once())
        path = max(Path(folder).glob("plugins/profile/*/perfetto_trace.json.gz"))
        events = list(device_events(read_trace(path)))
    emit(
        {
            "what": f"overlap, {settings['stash']}{step.order_of(settings)}",
            "length": settings["length"],
            "untraced_s": untraced_s,
            "note": NOTE,
            **analyse(events),
        }
    )


class Event(NamedTuple):
    """Work of a GPU stream: the stream's row in the trace, what ran, and when."""

    stream: str
    name: str
    begin_us: float
    end_us: float

    @property
    def is_copy(self) -> bool:
        """Whether it is a copy between device and host."""
        return "memcpyd2h" in self.name.lower() or "memcpyh2d" in self.name.lower()


def read_trace(path: Path) -> list[dict[str, Any]]:
    """Read the events of a Perfetto trace."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return json.load(file)["traceEvents"]


def device_events(trace: Iterable[dict[str, Any]]) -> Iterator[Event]:
    """Pick the work of the GPU's streams out of a trace; none where there is no GPU."""
    processes, threads, timed_events = {}, {}, []
    for event in trace:
        if event.get("ph") == "M" and event.get("name") == "process_name":
            processes[event["pid"]] = event["args"]["name"]
        elif event.get("ph") == "M" and event.get("name") == "thread_name":
            threads[event["pid"], event["tid"]] = event["args"]["name"]
        elif "dur" in event:
            timed_events.append(event)
    for event in timed_events:
        stream = threads.get((event["pid"], event["tid"]), "")
        if "GPU" in processes.get(event["pid"], "") and stream.startswith("Stream"):
            begin_us = float(event["ts"])
            yield Event(stream, event["name"], begin_us, begin_us + float(event["dur"]))


def analyse(events: list[Event]) -> dict[str, Any]:
    """Return where a step's time goes.

    Returns:
        Seconds of the step, of kernels and of host copies, each counted once where several run; the share of the
        copies' time with a kernel beside it; the seconds without any kernel, by whether a host copy runs; the kernels
        that take most.
    """
    kernels = union((e.begin_us, e.end_us) for e in events if not e.is_copy)
    copies = union((e.begin_us, e.end_us) for e in events if e.is_copy)
    idle = [gap for gap in gaps(kernels) if gap[1] - gap[0] > _LAUNCH_US]
    waiting_us = length(overlap(idle, copies))
    by_name: dict[str, float] = defaultdict(float)
    for event in events:
        by_name[event.name] += (event.end_us - event.begin_us) / 1e6
    longest = sorted(by_name.items(), key=lambda item: -item[1])[:_MOST_KERNELS]
    beside_us, copies_us = length(overlap(copies, kernels)), length(copies)
    return {
        "traced_s": (kernels[-1][1] - kernels[0][0]) / 1e6 if kernels else None,
        "kernels_s": length(kernels) / 1e6,
        "copies_s": copies_us / 1e6,
        "copies_beside_kernels": beside_us / copies_us if copies_us else None,
        "idle_beside_copies_s": waiting_us / 1e6,
        "idle_alone_s": (length(idle) - waiting_us) / 1e6,
        "longest": [{"name": name[:120], "seconds": seconds} for name, seconds in longest],
    }


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Join intervals that touch; the result is sorted and disjoint."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def gaps(intervals: list[Interval]) -> list[Interval]:
    """Return what lies between disjoint, sorted intervals."""
    return [(a[1], b[0]) for a, b in zip(intervals, intervals[1:], strict=False)]


def overlap(a: list[Interval], b: list[Interval]) -> list[Interval]:
    """Return what two lists of disjoint, sorted intervals share."""
    found, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        begin, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if begin < end:
            found.append((begin, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return found


def length(intervals: list[Interval]) -> float:
    """Return the total length of disjoint intervals."""
    return sum(end - begin for begin, end in intervals)
