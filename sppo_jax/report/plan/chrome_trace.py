"""A plan's simulated step as a Chrome trace, which Perfetto and chrome://tracing open; imports no jax."""

from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import Any

from sppo_jax.files.whole import json_text
from sppo_jax.report.plan.figures import Figures
from sppo_jax.report.plan.occupancy import occupancy
from sppo_jax.report.plan.words import schedule_of, subject
from sppo_jax.schedule.table import Table, TickShape, Unit

Event = dict[str, Any]

CATEGORIES = {"F": "forward", "B": "backward", "H": "head"}
COPY = "copy"
PARTS = 1024  # of a microsecond; a power of two
# Perfetto takes a thread with the number of its process for the main thread, so tracks count from 2.
PROCESS, FIRST_TRACK = 1, 2
# The tracks of a stage.
UNITS, TO_HOST, FROM_HOST = range(3)
TRACK_NAMES = {UNITS: "", TO_HOST: ": to the host", FROM_HOST: ": from the host"}


def chrome_trace(figures: Figures) -> str:
    """Returns the simulated step as the text of a Chrome trace.

    Args:
        figures: the figures of the plan.

    Returns:
        JSON text: events of metadata first, then units, copies and memory in use, sorted by their start. Times are in
        microseconds, in steps of 1/1024. The same figures give the same text, to the byte.
    """
    starts_s = tuple(accumulate(figures.simulation.tick_s, initial=0.0))
    events = [*_units(figures, starts_s), *_copies(figures, starts_s), *_memory(figures, starts_s)]
    metadata = [*_process(figures), *_tracks({event["tid"] for event in events if event["ph"] == "X"})]
    trace = {
        "traceEvents": [*metadata, *sorted(events, key=lambda event: event["ts"])],
        "displayTimeUnit": "ms",
        "otherData": {
            "source": f"simulated by sppo_jax {figures.plan.version} before anything was compiled",
            "subject": subject(figures),
        },
    }
    return json_text(trace, separators=(",", ":"))


def _process(figures: Figures) -> Iterator[Event]:
    num_stages, planned = figures.table.num_stages, figures.plan.sequences_per_pipeline
    name = f"plan: {schedule_of(figures.plan)}, {num_stages} {'stage' if num_stages == 1 else 'stages'}"
    if figures.sequences_left_out:
        name += f", {figures.table.num_sequences:,} of the {planned:,} sequences of a pipeline"
    yield {"ph": "M", "pid": PROCESS, "name": "process_name", "args": {"name": name}}
    yield {"ph": "M", "pid": PROCESS, "name": "process_sort_index", "args": {"sort_index": 0}}


def _tracks(tracks: set[int]) -> Iterator[Event]:
    for track in sorted(tracks):
        stage, row = divmod(track - FIRST_TRACK, len(TRACK_NAMES))
        of_track = {"ph": "M", "pid": PROCESS, "tid": track}
        yield {**of_track, "name": "thread_name", "args": {"name": f"stage {stage}{TRACK_NAMES[row]}"}}
        yield {**of_track, "name": "thread_sort_index", "args": {"sort_index": track}}


def _units(figures: Figures, starts_s: tuple[float, ...]) -> Iterator[Event]:
    """Yields an event for each unit of each stage; all stages compute a head unit, so each has an event for it."""
    table = figures.table
    seconds_of = figures.costs.of_chunks(table.chunk_lengths)
    for tick, shape, start_s in zip(table.ticks, table.tick_shapes, starts_s[:-1], strict=True):
        for stage, unit in enumerate(tick.units):
            if unit is not None:
                seconds = seconds_of(unit, shape)
                yield {
                    "name": _name(unit, table),
                    "cat": CATEGORIES[unit.op],
                    **_span(stage, UNITS, start_s, seconds),
                    "args": {**_unit_args(unit, seconds), **_token_args(unit, table, shape)},
                }


def _copies(figures: Figures, starts_s: tuple[float, ...]) -> Iterator[Event]:
    """Yields an event for each copy, which starts with its tick or when the link has finished the copy before."""
    free_s: dict[tuple[int, int], float] = {}
    for copy in sorted(figures.copies, key=lambda copy: copy.tick):
        track, seconds = TO_HOST if copy.out else FROM_HOST, figures.copy_s(copy)
        start_s = max(starts_s[copy.tick], free_s.get((copy.stage, track), 0.0))
        free_s[copy.stage, track] = start_s + seconds
        yield {
            "name": _name(copy.unit, figures.table),
            "cat": COPY,
            **_span(copy.stage, track, start_s, seconds),
            "args": {**_unit_args(copy.unit, seconds), "bytes": copy.size_bytes},
        }


def _memory(figures: Figures, starts_s: tuple[float, ...]) -> Iterator[Event]:
    """Yields the bytes that a device of each stage has in use, at each tick that changes them and at the end."""
    memory = figures.found.memory
    for stage in range(figures.table.num_stages):
        curve = occupancy(figures.table, memory, figures.stashed, stage, figures.plan.stash.kv)
        hbm = [curve.fixed + sum(parts) for parts in zip(curve.kv, curve.kv_grad, curve.stash, strict=True)]
        # After its last backward a stage holds neither K/V nor stashes.
        yield from _counter(f"stage {stage}: HBM in use", [*hbm, curve.fixed], starts_s)
        if memory.host:
            host = [curve.host_fixed + size for size in [*curve.host, 0]]
            yield from _counter(f"stage {stage}: host memory in use", host, starts_s)


def _counter(name: str, sizes: list[int], starts_s: tuple[float, ...]) -> Iterator[Event]:
    last = len(sizes) - 1
    for index, (before, size) in enumerate(pairwise([-1, *sizes])):
        if size != before or index == last:
            start_us = _microseconds(starts_s[index])
            yield {"name": name, "ph": "C", "pid": PROCESS, "ts": start_us, "args": {"bytes": size}}


def _span(stage: int, row: int, start_s: float, seconds: float) -> Event:
    """Returns the fields of an event for its track, start and duration."""
    start_us = _microseconds(start_s)
    # The end is rounded, not the duration, so that an event never overlaps the next event.
    duration_us = _microseconds(start_s + seconds) - start_us
    track = FIRST_TRACK + stage * len(TRACK_NAMES) + row
    return {"ph": "X", "pid": PROCESS, "tid": track, "ts": start_us, "dur": duration_us}


def _name(unit: Unit, table: Table) -> str:
    group = f" g{unit.virtual_stage // table.num_stages}" if table.num_groups > 1 and unit.op != "H" else ""
    return f"{unit.op}{unit.sequence}.{unit.chunk}{group}"


def _unit_args(unit: Unit, seconds: float) -> Event:
    return {
        "sequence": unit.sequence,
        "chunk": unit.chunk,
        "virtual_stage": unit.virtual_stage,
        "seconds": round(seconds, 9),
    }


def _token_args(unit: Unit, table: Table, shape: TickShape) -> Event:
    """Returns the tokens of a unit's chunk, and the tokens that its tick computes, padding included."""
    tokens = table.chunk_lengths[unit.chunk]
    return {"tokens": tokens, "padded_tokens": max(tokens, shape.tokens)}


def _microseconds(seconds: float) -> float:
    """Rounds to parts of a microsecond that sums of floats keep exactly, so that ends and starts of events agree."""
    return round(seconds * 1e6 * PARTS) / PARTS
