"""Turns the outputs of steps into metrics, one step late so that the devices never wait for it."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from threading import Thread
from typing import Any

import jax
import numpy as np

from sppo_jax.config import MetricsConfig
from sppo_jax.hardware import find_device
from sppo_jax.models.counts import flops_per_token
from sppo_jax.train.metrics.memory_peak import peak_memory
from sppo_jax.train.metrics.record import Record
from sppo_jax.train.setup import Experiment
from sppo_jax.train.watch.signals import GO, STOP


def peak_flops_per_s(config: MetricsConfig, device: jax.Device) -> float | None:
    """Returns a device's peak FLOP/s: as configured, else from its datasheet; None if that is not known."""
    if not isinstance(config.peak_flops, str):
        return config.peak_flops
    if device.platform == "cpu":
        return None
    try:
        return find_device(device.device_kind).matmul_flops_s
    except ValueError:
        return None


# What to do about a loss or a gradient that is not finite.
STAY_FINITE = "lower optimizer.lr, raise optimizer.warmup_steps, or look at the data of these steps"
_WINDOW, _MIN_STEPS, _MIN_SIGMAS = 50, 20, 6.0


class LossSpikes:
    """Remembers the losses of the last steps, and finds those far above them."""

    def __init__(self) -> None:
        """Starts without losses; the first 20 losses are never spikes."""
        self._recent: deque[float] = deque(maxlen=_WINDOW)

    def check(self, loss: float) -> str | None:
        """Takes the next loss; returns a sentence if it is a spike.

        A spike lies 6 deviations above the median of the last 50 losses; the deviation is the median one (times
        1.48, as of a normal distribution), which the spikes before do not widen.

        Args:
            loss: in nats a target; finite.
        """
        recent = list(self._recent)
        self._recent.append(loss)
        if len(recent) < _MIN_STEPS:
            return None
        middle = statistics.median(recent)
        deviation = 1.4826 * statistics.median(abs(each - middle) for each in recent)
        if loss <= middle + _MIN_SIGMAS * deviation or loss <= middle * 1.02:
            return None
        return f"loss spike: {loss:.4f}, where the last {len(recent)} had a median of {middle:.4f}"


def clock_at_end(output: jax.Array) -> Callable[[], float]:
    """Reads the clock when an output is ready, whatever this thread does until then.

    On a GPU the call of the next step returns only when the loops of that step are done: XLA's host thread reads, turn
    by turn, whether a loop goes on. A clock read after that call would be a step late.

    Args:
        output: of a step that has begun.

    Returns:
        A function that waits for the output, and returns the seconds of the clock at which the output was ready.
    """
    found: list[float] = []

    def read() -> None:
        with suppress(Exception):  # what a step raises is raised where its outputs are read
            jax.block_until_ready(output)
        found.append(time.perf_counter())

    thread = Thread(target=read, daemon=True)
    thread.start()

    def end_s() -> float:
        thread.join()
        return found[0]

    return end_s


class Meter:
    """Reads each step's outputs, writes a line of metrics when one is due, and records skips and spikes."""

    def __init__(self, experiment: Experiment, record: Record, *, first: int):
        """Starts the clock.

        Args:
            experiment: the run.
            record: where lines and events go.
            first: steps done before.
        """
        self._experiment, self._record, self._spikes = experiment, record, LossSpikes()
        self._pending: tuple[int, Mapping[str, jax.Array], Callable[[], float]] | None = None
        self._done: tuple[int, dict[str, Any], float] | None = None
        self._logged, self._num_targets, self._num_skipped, self._is_spike = first, 0, 0, False
        self._spent_s = {"data_s": 0.0, "save_s": 0.0}
        # All at once: an operation between steps would wait for the running step.
        with jax.numpy_dtype_promotion("standard"):
            self._learning_rates = np.asarray(experiment.schedule(np.arange(experiment.config.train.steps)))
        self._since_s = time.perf_counter()
        self.failure: str | None = None

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Counts the seconds until a batch is ready, if the devices are idle by then."""
        begin_s = time.perf_counter()
        yield
        if self._pending is None or self._pending[1]["loss"].is_ready():
            self._spent_s["data_s"] += time.perf_counter() - begin_s

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Counts the seconds for which a save stops the run."""
        begin_s = time.perf_counter()
        yield
        self._spent_s["save_s"] += time.perf_counter() - begin_s

    def expect(self, step: int, outputs: Mapping[str, jax.Array]) -> None:
        """Takes the outputs of a step that has begun.

        Args:
            step: its number, from 1.
            outputs: scalars `loss`, `grad_norm`, `num_targets`, `is_bad_update`, `num_skipped`, `num_skipped_in_row`,
                `signal`, and if known `num_hits` and `entropy`; others are reported as they are.
        """
        self._pending = (step, outputs, clock_at_end(outputs["loss"]))

    def wait(self) -> int:
        """Waits for the expected step, if there is one, and stops the clock.

        Returns:
            What the processes want done: GO, SAVE or STOP.
        """
        if self._pending is None:
            return GO
        (step, pending, end_s), self._pending = self._pending, None
        outputs = {name: value.item() for name, value in jax.device_get(pending).items()}
        self._done = step, outputs, end_s()
        self._num_targets += outputs["num_targets"]
        self._watch(step, outputs)
        return STOP if self.failure else outputs["signal"]

    def write(self, more: Mapping[str, Any] | None = None) -> None:
        """Writes the line of the step that was waited for, if one is due.

        Args:
            more: metrics of a validation: with them a line is due, and their time does not count.
        """
        if self._done is None:
            return
        (step, outputs, now_s), self._done = self._done, None
        config = self._experiment.config.train
        if more is not None or step % config.log_every == 0 or step == config.steps:
            self._record.metrics(self._metrics(step, outputs, now_s) | dict(more or {}))
            self._logged, self._num_targets, self._is_spike = step, 0, False
            self._spent_s = dict.fromkeys(self._spent_s, 0.0)
            # A validation is off the clock; an ordinary line is written while the next step runs.
            self._since_s = now_s if more is None else time.perf_counter()

    def _watch(self, step: int, outputs: Mapping[str, Any]) -> None:
        """Records an event for a step that was skipped or whose loss is a spike."""
        loss, limit = outputs["loss"], self._experiment.config.train.max_nonfinite
        if outputs["num_skipped_in_row"]:
            text, advice = f"a loss of {loss} and a gradient norm of {outputs['grad_norm']}", STAY_FINITE
            if outputs["is_bad_update"]:
                text, advice = f"{text} whose update is not finite", _ADVICE_OF_UPDATES
            in_row = outputs["num_skipped_in_row"]
            self._record.event("skip", step, f"step {step} skipped: {text} ({in_row} in a row, the limit is {limit})")
            if in_row >= limit and not self.failure:  # one more step has begun by then
                self.failure = (
                    f"loss, gradients and state must stay finite, got {text} at step {step}, the last of {in_row} such "
                    f"steps in a row (train.max_nonfinite); {advice}"
                )
        elif outputs["num_targets"] and (spike := self._spikes.check(loss)):
            self._is_spike = True
            self._record.event("spike", step, f"step {step}: {spike}")
        self._num_skipped = outputs["num_skipped"]

    def _metrics(self, step: int, outputs: Mapping[str, Any], now_s: float) -> dict[str, Any]:
        """Returns the line of metrics.jsonl for a step; its times are means since the previous line."""
        experiment, num_steps = self._experiment, step - self._logged
        config, length = experiment.config, experiment.config.sequence.length
        step_s = (now_s - self._since_s) / num_steps
        places_per_s = config.num_sequences * length / step_s
        peak = peak_flops_per_s(config.metrics, experiment.mesh.devices.flat[0])
        flops_per_s = flops_per_token(config.model, length) * places_per_s
        return {
            "step": step,
            "loss": outputs["loss"] if outputs["num_targets"] else None,
            **_of_predictions(outputs),
            "grad_norm": outputs["grad_norm"],
            "learning_rate": float(self._learning_rates[max(step - 1 - self._num_skipped, 0)]),
            "tokens_per_s": self._num_targets / num_steps / step_s,
            "places_per_s": places_per_s,
            "step_s": step_s,
            **{name: spent_s / num_steps for name, spent_s in self._spent_s.items()},
            "mfu": flops_per_s / (peak * experiment.mesh.size) if peak else None,
            **peak_memory(),
            "skipped": self._num_skipped,
            "spike": self._is_spike,
            **{name: value for name, value in outputs.items() if name not in _OUTPUTS},
        }


def _of_predictions(outputs: Mapping[str, Any]) -> dict[str, float | None]:
    """Returns which share of the targets is the most likely token, and the entropy; None without targets."""
    if "num_hits" not in outputs:  # the step of another making
        return {}
    num_targets = outputs["num_targets"]
    accuracy, entropy = (outputs["num_hits"] / num_targets, outputs["entropy"]) if num_targets else (None, None)
    return {"token_accuracy": accuracy, "entropy": entropy}


# Outputs of a step that become metrics by other names, or events.
_OUTPUTS = (
    *("loss", "num_hits", "entropy", "grad_norm", "num_targets", "is_bad_update"),
    *("num_skipped", "num_skipped_in_row", "signal"),
)
# What to change where too many steps were skipped for what the optimizer made of their gradients.
_ADVICE_OF_UPDATES = (
    "lower optimizer.lr, optimizer.weight_decay or model.experts.bias_rate, or raise optimizer.eps; the data of these "
    "steps are not the cause"
)
