"""A plan as a Chrome trace: its structure, and its times and bytes against the simulation's own."""

import json
from collections import Counter
from itertools import accumulate, pairwise

import pytest
from report_cases import small_config, small_figures, too_large
from test_report_plan_figures import CASES

from sppo_jax.report.plan import figures as module
from sppo_jax.report.plan.chrome_trace import CATEGORIES, chrome_trace
from sppo_jax.report.plan.figures import figures_of
from sppo_jax.report.plan.occupancy import occupancy

SLOW = "copies too slow to hide"
KEEP = {"stash": {"inputs": "keep", "attention": "keep"}}
STREAM = {"sequence": {"per_pipeline": 4}}
SCHEDULES = {
    **CASES,
    "sppo": {"schedule": {"name": "sppo"}, "sequence": {"per_pipeline": 2}},
    "seq1f1b": {"schedule": {"name": "seq1f1b"}, **STREAM},
    "interleaved-seq1f1b": {"schedule": {"name": "interleaved-seq1f1b", "interleave": 2}, **STREAM},
    "gpipe": {"schedule": {"name": "gpipe"}, **STREAM},
    "no copies": KEEP,
}
every_schedule = pytest.mark.parametrize("name", SCHEDULES)


def events_of(figures, phase=None):
    events = json.loads(chrome_trace(figures))["traceEvents"]
    return [event for event in events if phase in (None, event["ph"])]


def tracks_of(figures):
    """Returns the complete events by the name of their track."""
    names = {event["tid"]: event["args"]["name"] for event in events_of(figures, "M") if event["name"] == "thread_name"}
    tracks = {name: [] for name in names.values()}
    for event in events_of(figures, "X"):
        tracks[names[event["tid"]]].append(event)
    return tracks


def process_name(figures):
    return next(event["args"]["name"] for event in events_of(figures, "M") if event["name"] == "process_name")


def end(event):
    return event["ts"] + event["dur"]


@every_schedule
def test_the_text_is_a_chrome_trace(name):
    figures = small_figures(**SCHEDULES[name])
    text = chrome_trace(figures)
    assert text == chrome_trace(figures) and text.isascii()
    events = json.loads(text, parse_constant=lambda constant: pytest.fail(constant))["traceEvents"]
    phases = [event["ph"] for event in events]
    num_metadata = phases.count("M")
    assert phases[:num_metadata] == ["M"] * num_metadata and set(phases[num_metadata:]) == {"X", "C"}
    timed = events[num_metadata:]
    assert all(before["ts"] <= after["ts"] for before, after in pairwise(timed))
    for event in timed:
        times = [event["ts"]] + ([event["dur"]] if event["ph"] == "X" else [])
        assert all(time >= 0 and (1024 * time).is_integer() for time in map(float, times))
        keys = {"tid", "dur", "cat"} if event["ph"] == "X" else set()
        assert set(event) == {"name", "ph", "pid", "ts", "args"} | keys
    tracks = {event["tid"] for event in timed if event["ph"] == "X"}
    for kind in ("thread_name", "thread_sort_index"):
        assert [event["tid"] for event in events if event["name"] == kind] == sorted(tracks)
    assert {event["pid"] for event in events} == {1} and 1 not in tracks


@every_schedule
def test_events_of_a_track_do_not_overlap(name):
    for events in tracks_of(small_figures(**SCHEDULES[name])).values():
        assert all(end(before) <= after["ts"] for before, after in pairwise(events))  # viewers nest what overlaps


@every_schedule
def test_the_trace_ends_with_the_simulated_step(name):
    figures = small_figures(**SCHEDULES[name])
    step_us = 1e6 * figures.simulation.step_s
    assert events_of(figures)[-1]["ts"] == pytest.approx(step_us, rel=1e-6)
    last_us = max(end(event) for event in events_of(figures, "X"))
    if name == SLOW:  # the last tick waits for a copy
        assert last_us < 0.96 * step_us
    else:
        assert last_us == pytest.approx(step_us, rel=1e-6)


@every_schedule
def test_a_stage_has_the_units_of_the_table_when_their_ticks_start(name):
    figures = small_figures(**SCHEDULES[name])
    starts_us = [1e6 * start_s for start_s in accumulate(figures.simulation.tick_s, initial=0.0)]
    tracks = tracks_of(figures)
    for stage in range(figures.table.num_stages):
        ticks = [tick.units[stage] for tick in figures.table.ticks]
        expected = [(unit, start_us) for unit, start_us in zip(ticks, starts_us, strict=False) if unit is not None]
        events = tracks[f"stage {stage}"]
        assert Counter(event["cat"] for event in events) == Counter(CATEGORIES[unit.op] for unit, _ in expected)
        for event, (unit, start_us) in zip(events, expected, strict=True):
            args = event["args"]
            assert event["name"].split()[0] == f"{unit.op}{unit.sequence}.{unit.chunk}"
            assert (args["sequence"], args["chunk"], args["virtual_stage"]) == unit[1:]
            assert args["tokens"] == figures.plan.chunk_lengths[unit.chunk] <= args["padded_tokens"]
            assert event["ts"] == pytest.approx(start_us, abs=1e-3)


@every_schedule
def test_the_seconds_of_a_stage_are_those_it_is_busy(name):
    figures = small_figures(**SCHEDULES[name])
    tracks = tracks_of(figures)
    for stage, busy_s in enumerate(figures.simulation.busy_s):
        events = tracks[f"stage {stage}"]
        assert sum(event["args"]["seconds"] for event in events) == pytest.approx(busy_s, rel=1e-6)
        assert sum(event["dur"] for event in events) == pytest.approx(1e6 * busy_s, rel=1e-6)


@every_schedule
def test_copies_are_those_of_the_figures(name):
    figures = small_figures(**SCHEDULES[name])
    starts_us = [1e6 * start_s for start_s in accumulate(figures.simulation.tick_s, initial=0.0)]
    tracks = tracks_of(figures)
    for out, where in ((True, "to the host"), (False, "from the host")):
        for stage in range(figures.table.num_stages):
            copies = sorted((c for c in figures.copies if (c.out, c.stage) == (out, stage)), key=lambda c: c.tick)
            events, free_us = tracks.get(f"stage {stage}: {where}", []), 0.0
            for event, copy in zip(events, copies, strict=True):
                assert event["args"]["bytes"] == copy.size_bytes and event["cat"] == "copy"
                assert event["dur"] == pytest.approx(1e6 * figures.copy_s(copy), abs=2e-3)
                assert event["name"][0] == copy.unit.op
                assert event["ts"] == pytest.approx(max(starts_us[copy.tick], free_us), abs=1e-3)
                free_us = event["ts"] + event["dur"]
                # Two copies of one tick have one link.
                alone = sum(other.tick == copy.tick for other in copies) == 1
                assert name == SLOW or not alone or event["ts"] == pytest.approx(starts_us[copy.tick], abs=1e-3)


def test_there_are_tracks_of_copies_only_where_there_are_copies():
    kept, copied = small_figures(**KEEP), small_figures()
    assert list(tracks_of(kept)) == [f"stage {stage}" for stage in range(4)] and not kept.copies
    kinds = ("", ": to the host", ": from the host")
    assert list(tracks_of(copied)) == [f"stage {stage}{kind}" for stage in range(4) for kind in kinds]


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != SLOW])
def test_counters_show_the_bytes_in_use(name):
    figures = small_figures(**SCHEDULES[name])
    memory, counters = figures.found.memory, {}
    for event in events_of(figures, "C"):
        counters.setdefault(event["name"], []).append(event["args"]["bytes"])
    for stage in range(figures.table.num_stages):
        curve = occupancy(figures.table, memory, figures.stashed, stage, figures.plan.stash.kv)
        hbm, host = counters[f"stage {stage}: HBM in use"], counters.get(f"stage {stage}: host memory in use", [0])
        parts = zip(curve.kv, curve.kv_grad, curve.stash, strict=True)
        assert max(hbm) == curve.fixed + max(map(sum, parts)) <= memory.hbm_bytes
        assert max(host) == max(curve.host) <= memory.host
        assert (hbm[-1], host[-1]) == (curve.fixed, 0)
    assert len(counters) == figures.table.num_stages * (2 if memory.host else 1)


def test_units_of_several_groups_of_layers_carry_their_group():
    tracks = tracks_of(small_figures(**CASES["interleaved"]))
    names = {event["name"] for event in tracks["stage 1"]}
    assert {"F0.0 g0", "F0.0 g1", "B0.3 g0", "B0.3 g1", "H0.0"} <= names
    assert {event["args"]["virtual_stage"] for event in tracks["stage 1"] if event["cat"] != "head"} == {1, 5}


def test_padding_is_counted():
    figures = small_figures(**CASES["unequal chunks"])
    padded = Counter(
        (event["args"]["tokens"], event["args"]["padded_tokens"]) for event in tracks_of(figures)["stage 0"]
    )
    assert set(padded) == {(16384, 16384), (8192, 8192), (8192, 16384)}


def test_the_process_is_named_after_the_plan_and_says_what_it_leaves_out(monkeypatch):
    assert process_name(small_figures()) == "plan: sppo, 4 stages"
    assert process_name(small_figures("h100:1x1", mesh={"pipe": 1})).endswith(", 1 stage")
    groups = dict(schedule={"name": "seq1f1b", "wave": 2}, sequence={"per_pipeline": 24})
    whole = small_figures(**groups)
    assert process_name(whole) == "plan: seq1f1b k=2, 4 stages"
    monkeypatch.setattr(module, "_MOST_CELLS", 100)
    short = figures_of(whole.found, small_config(**groups))
    assert short.sequences_left_out > 0
    shown = f"{short.table.num_sequences} of the 24 sequences of a pipeline"
    assert process_name(short) == f"plan: seq1f1b k=2, 4 stages, {shown}"


def test_a_plan_that_does_not_fit_has_a_trace_too():
    assert sum(event["cat"] == "forward" for event in events_of(too_large(), "X")) > 0
