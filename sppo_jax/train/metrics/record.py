"""The files and the display of a run: metrics.jsonl, events.jsonl, report.html, trackers, lines or a progress bar."""

from __future__ import annotations

import errno
import math
import os
import sys
import time
import warnings
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from tqdm import tqdm

from sppo_jax.config import Config
from sppo_jax.files.format_bytes import NOT_FINITE, format_figure
from sppo_jax.files.whole import finite, json_text, write_whole
from sppo_jax.processes import distributed
from sppo_jax.processes.output import lost_lines
from sppo_jax.report.run.html import write_report
from sppo_jax.report.run.speed import speed_text
from sppo_jax.train.checkpoints.run_dir import forget_after
from sppo_jax.train.metrics.trackers import open_trackers


class Progress:
    """Shows steps as they are logged."""

    def __init__(self, num_steps: int, *, first: int = 0):
        """Prepares the bar and shows nothing yet; its clock starts with the first step, after compilation.

        Args:
            num_steps: length of the run.
            first: steps that were done before.
        """
        self._num_steps, self._first, self._start_s = num_steps, first, 0.0
        is_terminal = sys.stdout.isatty()
        self._bar = tqdm(total=num_steps, initial=first, unit="step", file=sys.stdout) if is_terminal else None

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Shows the metrics of a step: loss, token accuracy, gradient norm, rate, speed, peak memory, time left.

        Figures that are not finite are None.
        """
        if not self._start_s:
            self._start_s = time.perf_counter() - (metrics["step_s"] or 0.0) * (metrics["step"] - self._first)
        if self._bar is None:
            print(self._line(metrics), flush=True)
            return
        self._bar.set_postfix_str(", ".join(_learning(metrics)), refresh=False)
        self._bar.update(metrics["step"] - self._bar.n)

    def say(self, text: str) -> None:
        """Shows a text between the steps."""
        if self._bar is None:
            print(text, flush=True)
        else:
            self._bar.write(text, file=sys.stdout)

    def close(self) -> None:
        """Closes the bar and leaves it on the screen."""
        if self._bar is not None:
            self._bar.close()

    def _line(self, metrics: Mapping[str, Any]) -> str:
        step, width = metrics["step"], len(str(self._num_steps))
        left_s = (time.perf_counter() - self._start_s) / (step - self._first) * (self._num_steps - step)
        parts = [f"step {step:>{width}}/{self._num_steps}", *_learning(metrics)]
        for key, name in (("hbm_peak_bytes", "device"), ("host_peak_bytes", "host")):
            if metrics.get(key) is not None:
                parts.append(f"{name} {metrics[key] / 2**30:.1f} GiB")
        return "  ".join([*parts, f"eta {_clock(left_s)}"])


# Of a step's line: the metric, its name there and its form.
_LEARNING = (("token_accuracy", "accuracy", ".1%"), ("grad_norm", "norm", ".3g"), ("learning_rate", "rate", ".2e"))


def _learning(metrics: Mapping[str, Any]) -> list[str]:
    """Returns what a step learned and how fast; a figure that a step of another making does not have is left out."""
    parts = [f"loss {format_figure(metrics['loss'], '.4f')}"]
    for key, name, how in _LEARNING:
        if key in metrics:
            parts.append(f"{name} {format_figure(metrics[key], how)}")
    return [*parts, _speed(metrics)]


def _speed(metrics: Mapping[str, Any]) -> str:
    tokens = metrics["tokens_per_s"]
    return f"{NOT_FINITE} tokens/s" if tokens is None else speed_text(tokens, metrics["places_per_s"])


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes:02}:{seconds:02}"


# A report is drawn again while lines come in, after so many seconds, and never for more than this share of the time.
_REPORT_EVERY_S, _REPORT_SHARE = 60.0, 0.002


class Record:
    """Keeps the books of a run in the main process; in the others it does nothing."""

    def __init__(self, run_dir: Path, config: Config, *, step: int):
        """Opens the run's files at the step where the run starts or continues.

        Args:
            run_dir: of the run, claimed by it.
            config: all settings.
            step: steps done so far; what the books say of later ones is dropped, for they are done again.
        """
        self.run_dir = run_dir
        self._is_main = distributed.is_main()
        self._lost: list[tuple[Path, str]] = []
        self._told: set[str] = set()
        self._report_due_s = self._report_affordable_s = 0.0
        if self._is_main:
            if step < config.train.steps:
                (run_dir / "finished").unlink(missing_ok=True)
            forget_after(run_dir / "metrics.jsonl", step)
            forget_after(run_dir / "events.jsonl", math.inf)
            self._trackers = open_trackers(config, run_dir, step=step)
            self._progress = Progress(config.train.steps, first=step)

    def metrics(self, metrics: Mapping[str, Any]) -> None:
        """Writes a line of metrics and shows it; figures that are not finite become None for all who read them."""
        if self._is_main:
            metrics = finite(dict(metrics))
            self._append(self.run_dir / "metrics.jsonl", metrics)
            self._trackers.log(metrics)
            self._progress.log(metrics)
            self._tell_of_lost_output(metrics["step"])
            if time.monotonic() >= self._report_due_s:
                self.report()

    def event(self, event: str, step: int, text: str) -> None:
        """Writes a line to events.jsonl and shows it: start, resume, save, skip, spike, validation, stop, warning."""
        if self._is_main:
            self._append_event(event, step, text)
            self._progress.say(text)
            self._tell_of_lost_output(step)

    def events(self, events: Iterable[tuple[str, str]], step: int) -> None:
        """Writes and shows several events, each a name and a text."""
        for name, text in events:
            self.event(name, step, text)

    def saving(self, step: int, directory: Path, problem: str | None) -> None:
        """Records that a save has begun, or why a save failed."""
        if problem:
            self.event("warning", step, problem)
        self.event("save", step, f"step {step}: saving {directory / str(step)}")

    def say(self, text: str) -> None:
        """Shows a text."""
        if self._is_main:
            self._progress.say(text)

    def report_soon(self) -> None:
        """Draws report.html with the next line, while the devices are busy, unless it was drawn recently."""
        self._report_due_s = min(self._report_due_s, self._report_affordable_s)

    def report(self) -> None:
        """Draws report.html again; an error while drawing does not end the run."""
        if self._is_main:
            begin_s = time.monotonic()
            try:
                write_report(self.run_dir)
            except Exception as error:
                warnings.warn(f"report.html was not written ({error})", stacklevel=2)
            end_s = time.monotonic()
            self._report_affordable_s = end_s + (end_s - begin_s) / _REPORT_SHARE
            self._report_due_s = max(end_s + _REPORT_EVERY_S, self._report_affordable_s)

    def finish(self, text: str) -> None:
        """Marks the run as finished, for scripts that restart it until it is finished."""
        if self._is_main:
            write_whole(self.run_dir / "finished", f"{text}\n")

    def close(self) -> None:
        """Leaves the bar on the screen and closes the trackers."""
        if self._is_main:
            self._progress.close()
            self._trackers.close()

    def _append_event(self, event: str, step: int, text: str) -> None:
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        self._append(self.run_dir / "events.jsonl", {"time": now, "step": step, "kind": event, "text": text})

    def _tell_of_lost_output(self, step: int) -> None:
        """Records once that the output of the run can no longer be shown."""
        for line in lost_lines():
            if line not in self._told:
                self._told.add(line)
                self._append_event("warning", step, line)

    def _append(self, path: Path, entry: Mapping[str, Any]) -> None:
        """Appends a line; text that a full disk refuses is kept and written with the next line."""
        self._lost.append((path, json_text(dict(entry)) + "\n"))
        try:
            while self._lost:
                _append_line(*self._lost[0])
                self._lost.pop(0)
        except OSError as error:
            if len(self._lost) == 1:
                warnings.warn(
                    f"{path} cannot be written ({error.strerror}); the run continues and retries at each line",
                    stacklevel=3,
                )


def _append_line(path: Path, line: str) -> None:
    """Appends a line whole or not at all."""
    with path.open("ab", buffering=0) as file:
        before = file.seek(0, os.SEEK_END)
        try:
            written = file.write(line.encode())
            if written < len(line.encode()):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            file.truncate(before)
            raise
