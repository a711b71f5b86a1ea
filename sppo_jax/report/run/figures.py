"""The figures of a run's report, computed once from the files of the run."""

from __future__ import annotations

import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

from sppo_jax.data.positions import Bucket, ContextGain
from sppo_jax.report.run.run_files import RunData, number

# A run has stopped answering if it wrote nothing for this many usual intervals, and for at least these seconds.
_SILENT_INTERVALS, _SILENT_S = 8, 300.0
# Number of last lines whose median is the speed that is shown.
_RECENT = 20


@dataclass(frozen=True, kw_only=True)
class Status:
    """The state of a run in a word or two, and a text that says why or since when."""

    word: str
    why: str


class Point(NamedTuple):
    """A value at a step."""

    step: int
    value: float


@dataclass(frozen=True, kw_only=True)
class ShownValidation:
    """One validation: loss, loss by position, and how many of the held-out sequences it measured.

    The numbers of sequences are None where the line does not have them: a run of an older version, or a task whose
    sequences are drawn without end.
    """

    step: int
    loss: float
    buckets: tuple[Bucket, ...]
    num_sequences: int | None = None
    num_held_out: int | None = None
    gains: tuple[ContextGain, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ShownRecall:
    """Shares of the answers found at one validation, by distance in tokens."""

    step: int
    distances: tuple[int, ...]
    accuracies: tuple[float, ...]


def series(rows: Iterable[Mapping[str, Any]], key: str, scale: float = 1.0) -> list[Point]:
    """Returns the values of a key, of the lines that have the key."""
    return [Point(step=row["step"], value=value * scale) for row in rows if (value := number(row, key)) is not None]


def smooth(points: Sequence[Point], num_points: int = 160) -> list[Point]:
    """Returns medians of windows of a fortieth of the steps, at least nine points; a spike does not move them.

    Args:
        points: the points, by rising step.
        num_points: most points to return.
    """
    if len(points) < 24:
        return []
    steps, num_points = [point.step for point in points], min(num_points, len(points))
    half = max(1 / 80, 4 / len(steps)) * (steps[-1] - steps[0])
    found = []
    for index in range(num_points):
        at = steps[0] + (steps[-1] - steps[0]) * index / (num_points - 1)
        window = points[bisect_left(steps, at - half) : bisect_right(steps, at + half)]
        if window:
            found.append(Point(step=round(at), value=statistics.median(point.value for point in window)))
    return found


def thin(points: Sequence[Point], num_points: int = 400) -> list[Point]:
    """Returns about `num_points` points, the smallest and the largest of each bucket, so that no spike is lost."""
    if len(points) <= num_points:
        return list(points)
    groups, found = num_points // 2, []
    for index in range(groups):
        group = points[index * len(points) // groups : (index + 1) * len(points) // groups]
        ends = {min(group, key=lambda p: p.value), max(group, key=lambda p: p.value)}
        found += sorted(ends, key=lambda p: p.step)
    return found


def validations(rows: Iterable[Mapping[str, Any]]) -> list[ShownValidation]:
    """Returns the validations of a run whose loss is finite."""
    found = []
    for row in rows:
        loss = number(row, "validation_loss")
        if loss is not None:
            buckets = [_bucket(entry) for entry in _entries(row, "validation_loss_by_position")]
            whole = sorted((bucket for bucket in buckets if bucket), key=lambda bucket: bucket.first)
            counts = {key: _whole(row, f"validation_{key}") for key in ("num_sequences", "num_held_out")}
            gains = tuple(gain for entry in _entries(row, "gain_by_context") if (gain := _gain(entry)))
            shown = ShownValidation(step=row["step"], loss=loss, buckets=tuple(whole), gains=gains, **counts)
            found.append(shown)
    return found


def not_finite(rows: Iterable[Mapping[str, Any]]) -> list[int]:
    """Returns the steps of the validations whose loss is not finite."""
    return [row["step"] for row in rows if "validation_loss" in row and number(row, "validation_loss") is None]


def _whole(row: Mapping[str, Any], key: str) -> int | None:
    value = number(row, key)
    return None if value is None else int(value)


def recalls(rows: Iterable[Mapping[str, Any]]) -> list[ShownRecall]:
    """Returns the recall by distance of the validations that measured it."""
    found = []
    for row in rows:
        pairs = sorted(
            (distance, accuracy)
            for entry in _entries(row, "recall_by_distance")
            if (distance := number(entry, "distance")) and (accuracy := number(entry, "accuracy")) is not None
        )
        if pairs:
            distances, accuracies = zip(*pairs, strict=True)
            found.append(ShownRecall(step=row["step"], distances=tuple(map(int, distances)), accuracies=accuracies))
    return found


def _entries(row: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    entries = row.get(key)
    return [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []


def _bucket(entry: Mapping[str, Any]) -> Bucket | None:
    values = [number(entry, key) for key in ("first", "last", "num_targets", "loss")]
    if any(value is None for value in values):
        return None
    first, last, num_targets, loss = values
    return Bucket(first=int(first), last=int(last), num_targets=int(num_targets), loss=loss)  # type: ignore[arg-type]


def _gain(entry: Mapping[str, Any]) -> ContextGain | None:
    values = [number(entry, key) for key in ("beyond", "num_targets", "whole", "cut")]
    if any(value is None for value in values):
        return None
    beyond, num_targets, whole, cut = values
    return ContextGain(beyond=int(beyond), num_targets=int(num_targets), whole=whole, cut=cut)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class RunFigures:
    """A run with the figures that follow from its files."""

    data: RunData
    status: Status
    loss: tuple[Point, ...]
    validations: tuple[ShownValidation, ...]
    not_finite: tuple[int, ...]
    recalls: tuple[ShownRecall, ...]
    parts_s: dict[str, float]

    @property
    def step(self) -> int:
        """Number of the last step that the lines report."""
        return self.data.rows[-1]["step"] if self.data.rows else 0

    @property
    def accuracy(self) -> list[Point]:
        """Shares of the trained tokens that the model finds the most likely."""
        return series(self.data.rows, "token_accuracy")

    @property
    def num_steps(self) -> int | None:
        return self.data.config.train.steps if self.data.config else None

    @property
    def trained_s(self) -> float:
        """Seconds of training, without steps that were repeated after a resume."""
        return sum(self.parts_s.values())

    @property
    def resumes(self) -> list[int]:
        """The steps from which the run was resumed."""
        return [step for event in self.events_of("resume") if (step := number(event, "step")) is not None]

    @property
    def best(self) -> ShownValidation | None:
        """The validation of lowest loss among those that measured what the last one did."""
        held_out = self.validations
        alike = [each for each in held_out if each.num_sequences == held_out[-1].num_sequences]
        return min(alike, key=lambda each: each.loss) if alike else None

    @property
    def tokens(self) -> int | None:
        """Tokens trained on, by the lines; None if a line does not say."""
        counts, before = [], 0
        for row in self.data.rows:
            speed, step_s = number(row, "tokens_per_s"), number(row, "step_s")
            if speed is None or step_s is None:
                return None
            counts.append(speed * step_s * (row["step"] - before))
            before = row["step"]
        return round(sum(counts))

    @property
    def places(self) -> int | None:
        """Places of the sequences trained on, padding and untrained tokens included."""
        return self.step * self.data.plan.sequence_length * self.num_sequences if self.data.plan else None

    @property
    def num_sequences(self) -> int:
        plan = self.data.plan
        return plan.mesh.data * plan.sequences_per_pipeline if plan else 0

    @property
    def eta_s(self) -> float | None:
        """Seconds until the last step, at the speed of the last lines."""
        step_s = self.recent("step_s")
        return None if step_s is None or self.num_steps is None else max(0, self.num_steps - self.step) * step_s

    def recent(self, key: str) -> float | None:
        """Returns the median of a key over the last lines, without the first line, which waits for the compiler."""
        rows = (self.data.rows[1:] or self.data.rows)[-_RECENT:]
        values = [point.value for point in series(rows, key)]
        return statistics.median(values) if values else None

    def events_of(self, *names: str) -> list[Mapping[str, Any]]:
        """Returns the events of some names."""
        return [event for event in self.data.events if event["kind"] in names]

    @property
    def num_skipped(self) -> int:
        counted = number(self.data.rows[-1], "skipped") if self.data.rows else None
        return int(counted) if counted is not None else len(self.events_of("skip"))


def figures_of_run(data: RunData) -> RunFigures:
    """Computes the figures of a run."""
    return RunFigures(
        data=data,
        status=status_of(data),
        loss=tuple(series(data.rows, "loss")),
        validations=tuple(validations(data.rows)),
        not_finite=tuple(not_finite(data.rows)),
        recalls=tuple(recalls(data.rows)),
        parts_s=parts_of(data.rows),
    )


def parts_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Returns the seconds that a run spent on each part; lines give means a step since the line before."""
    parts = {"compute": 0.0, "waiting for data": 0.0, "saving": 0.0, "validation": 0.0}
    before = 0
    for index, row in enumerate(rows):
        # The first line of a torn file says nothing about the steps before the line.
        num_steps = row["step"] - before if index or row["step"] < 1000 else 1
        step_s, data_s, save_s = (number(row, key) or 0.0 for key in ("step_s", "data_s", "save_s"))
        parts["waiting for data"] += num_steps * data_s
        parts["saving"] += num_steps * save_s
        parts["compute"] += num_steps * max(0.0, step_s - data_s - save_s)
        parts["validation"] += number(row, "validation_s") or 0.0
        before = row["step"]
    return parts


def status_of(data: RunData) -> Status:
    """Returns the state of a run, from its last lines and events."""
    num_steps = data.config.train.steps if data.config else None
    step = data.rows[-1]["step"] if data.rows else 0
    words = [event for event in data.events if event["kind"] in ("start", "resume", "stop")]
    stopped = bool(words) and words[-1]["kind"] == "stop"
    if (data.finished and not (words and not stopped)) or (num_steps and step >= num_steps):
        return Status(word="finished", why=f"all {num_steps or step:,} steps done")
    if stopped:
        return Status(word="stopped", why=str(words[-1].get("text") or "no reason given"))
    if data.held is False:
        return Status(word="stopped answering", why="its process has ended without recording a stop")
    intervals = [after["step"] - before["step"] for before, after in zip(data.rows, data.rows[1:], strict=False)]
    usual_s = max(intervals[-_RECENT:], default=1) * max(
        (p.value for p in series(data.rows[-_RECENT:], "step_s")), default=0
    )
    if data.age_s > max(_SILENT_S, _SILENT_INTERVALS * usual_s):
        return Status(
            word="stopped answering",
            why=f"wrote nothing for {duration(data.age_s)} and recorded no stop",
        )
    if not data.rows:
        return Status(word="starting", why="no step is logged yet")
    return Status(word="running", why=f"as of {datetime.now().astimezone():%Y-%m-%d %H:%M}")


def duration(seconds: float) -> str:
    """Returns a duration as text: 20 ms, 48 s, 12 min, 3 h 20 min, 5 d 4 h."""
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 100:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min"
    return f"{hours // 24} d {hours % 24} h"
