"""A few real steps under the profiler, for Perfetto and xprof."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import jax

from sppo_jax.evaluation.placement import place_batch
from sppo_jax.train.setup import Experiment
from sppo_jax.train.state import init_state, shardings_of
from sppo_jax.train.step import make_train_step
from sppo_jax.train.watch.signals import Signals

# What a trace calls a step, and what the host does in it.
STEP, PHASES = "train", ("read a batch", "place the batch", "start the step", "wait for the step")
# The first step loads what was compiled; the second shows that nothing is compiled again.
_WARM_UP = 2


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Files of a trace.

    Args:
        perfetto: gzipped JSON, for ui.perfetto.dev.
        xplane: protocol buffers, for xprof and TensorBoard's profile plugin; None where the profiler wrote none.
        num_steps: steps in it.
        step_s: seconds of each.
    """

    perfetto: Path
    xplane: Path | None
    num_steps: int
    step_s: tuple[float, ...]


def trace_steps(experiment: Experiment, out: Path, *, num_steps: int) -> Trace:
    """Trains a few steps, the last of them under the profiler; nothing else is written.

    Args:
        experiment: from `prepare`.
        out: an empty or new directory.
        num_steps: steps to trace.

    Raises:
        ValueError: the profiler left no trace.
    """
    state = init_state(experiment.config, experiment.optimizer, experiment.shapes)
    signals = Signals(experiment.mesh)
    step = make_train_step(
        experiment.value_and_grad,
        experiment.optimizer,
        shardings_of(experiment.shapes),
        experiment.config.model,
    )

    def run(number: int) -> None:
        nonlocal state
        with jax.profiler.StepTraceAnnotation(STEP, step_num=number):
            with jax.profiler.TraceAnnotation(PHASES[0]):
                batch = next(experiment.loader)
            with jax.profiler.TraceAnnotation(PHASES[1]):
                placed = place_batch(batch, experiment.plan, experiment.mesh)
            with jax.profiler.TraceAnnotation(PHASES[2]):
                state, outputs = step(state, placed, signals.array())
            with jax.profiler.TraceAnnotation(PHASES[3]):
                jax.block_until_ready((state, outputs))

    for number in range(_WARM_UP):
        run(number)
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # calls of Python functions would bury the rest
    with jax.profiler.trace(str(out), create_perfetto_trace=True, profiler_options=options):
        for number in range(_WARM_UP, _WARM_UP + num_steps):
            run(number)
    return _found(out, num_steps)


def _found(out: Path, num_steps: int) -> Trace:
    perfetto = max(out.glob("plugins/profile/*/perfetto_trace.json.gz"), default=None)
    if perfetto is None:
        raise ValueError(f"the profiler must leave a trace, got none in {out}; stop other profilers of this process")
    seconds = tuple(float(event["dur"]) / 1e6 for event in events_of(perfetto) if event.get("name") == STEP)
    xplane = max(perfetto.parent.glob("*.xplane.pb"), default=None)
    return Trace(perfetto=perfetto, xplane=xplane, num_steps=num_steps, step_s=seconds)


def events_of(perfetto: Path) -> Iterator[Mapping]:
    """Gives the events of a trace that have a duration."""
    with gzip.open(perfetto, "rt", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    return (event for event in events if "dur" in event)
