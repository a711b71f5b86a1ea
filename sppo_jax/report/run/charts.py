"""The charts of a run's report, as panels; an empty list where there is nothing to show yet."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sppo_jax.report.draw.axis import Axis
from sppo_jax.report.draw.chart import Marker, Panel, Series
from sppo_jax.report.run.figures import Point, RunFigures, series, smooth, thin
from sppo_jax.report.run.run_files import number
from sppo_jax.report.run.speed import is_alike

STEP = Axis(label="step", whole=True, low=0)
BLUE, RED, GREEN, PINK, ORANGE, SKY, GREY = range(7)
GIB = 2**-30
# Largest number of validations that one chart shows as lines.
_MOST_LINES = 12


def loss_panel(figures: RunFigures) -> Panel | None:
    """Loss by step, smoothed, with validation, spikes, skipped steps and resumes."""
    points, held_out = list(figures.loss), figures.validations
    if not points:
        return None
    smoothed = smooth(points)
    top = _top(points, [v.loss for v in held_out]) if smoothed else math.inf
    raw = _line("loss", _below(thin(points), top), strength=0.45 if smoothed else 1.0, width=1.2)
    drawn = [raw, _line("smoothed", _below(smoothed, top))] if smoothed else [raw]
    if held_out:
        drawn.append(
            Series(
                name="validation", x=[v.step for v in held_out], y=[v.loss for v in held_out], color=RED, mark="ring"
            )
        )
    spikes = [_capped(p, top) for p, row in _rows_with_loss(figures) if row.get("spike") is True]
    if spikes:
        drawn.append(_marks("spike", spikes, ORANGE, "cross"))
    floor = min([p.value for p in points] + [v.loss for v in held_out])
    skipped = [Point(step=int(step), value=floor) for e in figures.events_of("skip") if (step := number(e, "step"))]
    if skipped:
        drawn.append(_marks("skipped step", skipped, PINK, "square"))
    return Panel(title="", x=STEP, y=Axis(label="nats per token"), series=drawn, rules=_resumes(figures))


def position_panel(figures: RunFigures) -> Panel | None:
    """Validation loss by position in the context, a line for each validation."""
    shown = [v for v in figures.validations if v.buckets]
    lines = [
        Series(
            name=_name(validation.step, index, len(picked)),
            x=[bucket.middle for bucket in validation.buckets],
            y=[bucket.loss for bucket in validation.buckets],
            hint=f"step {validation.step:,}",
            strength=strength,
            width=2.4 if validation is shown[-1] else 1.4,
            mark="circle" if validation is shown[-1] else "",
        )
        for picked in [_spread(shown)]
        for index, (validation, strength) in enumerate(zip(picked, _strengths(len(picked)), strict=True))
    ]
    if not lines:
        return None
    x = Axis(label="position in the document, tokens (log 2)", log=True)
    return Panel(title="", x=x, y=Axis(label="nats per token"), series=lines)


def recall_panel(figures: RunFigures) -> Panel | None:
    """Shares of the answers found, by distance."""
    picked = _spread(figures.recalls)
    lines = [
        Series(
            name=_name(recall.step, index, len(picked)),
            x=recall.distances,
            y=recall.accuracies,
            hint=f"step {recall.step:,}",
            color=PINK,
            strength=strength,
            width=2.4 if recall is picked[-1] else 1.4,
            mark="circle" if recall is picked[-1] else "",
        )
        for index, (recall, strength) in enumerate(zip(picked, _strengths(len(picked)), strict=True))
    ]
    if not lines:
        return None
    x = Axis(label="distance of the answer, tokens (log 2)", log=True)
    return Panel(title="", x=x, y=Axis(label="answers found", percent=True, low=0, high=1), series=lines)


def speed_panel(figures: RunFigures) -> Panel | None:
    """Trained tokens per second by step, and places per second where these are more or all that is known."""
    tokens, places = (_without_first(series(figures.data.rows, key)) for key in ("tokens_per_s", "places_per_s"))
    if not places:
        return None
    # After a line that is read late, the next line seems to have taken no time.
    top = 1.3 * max((point.value for point in smooth(places)), default=math.inf)
    lines = _raw_and_smoothed("tokens/s", [_capped(point, top) for point in tokens], BLUE) if tokens else []
    known = {point.step: point.value for point in tokens}
    if not all(is_alike(known.get(point.step, 0.0), point.value) for point in places):
        lines.append(_line("places/s", thin([_capped(point, top) for point in places]), GREY))
    y = Axis(label="per second", whole=True, low=0)
    return Panel(title="", x=STEP, y=y, series=lines, rules=_resumes(figures))


def _without_first(points: list[Point]) -> list[Point]:
    """Drops the first line, which waits for the compiler's work and the first batches."""
    return points[1:] if len(points) > 3 else points


def mfu_panel(figures: RunFigures) -> Panel | None:
    """Shares of the devices' peak rate by step."""
    points = series(figures.data.rows, "mfu")
    if not points:
        return None
    lines = _raw_and_smoothed("MFU", points, GREEN)
    return Panel(title="", x=STEP, y=Axis(label="of the peak", percent=True, low=0), series=lines)


def memory_panel(figures: RunFigures) -> Panel | None:
    """The largest memory in use so far, of the fullest device and of the process."""
    device = thin(series(figures.data.rows, "hbm_peak_bytes", GIB))
    host = thin(series(figures.data.rows, "host_peak_bytes", GIB))
    drawn = [_line("device", device, BLUE)] if device else []
    drawn += [_line("host process", host, ORANGE)] if host else []
    plan = figures.data.plan
    if device and plan:
        ends, most = (device[0].step, device[-1].step), max(plan.predicted.hbm_bytes) * GIB
        drawn.append(Series(name="device, predicted", x=ends, y=(most, most), color=GREY, dashed=True))
    if not drawn:
        return None
    return Panel(title="", x=STEP, y=Axis(label="GiB", low=0), series=drawn)


def breakdown_panel(figures: RunFigures) -> Panel | None:
    """Seconds of a step by part, stacked; the first line, which waits for the compiler, is left out."""
    rows = [row for row in figures.data.rows if number(row, "step_s") is not None]
    rows = rows[1:] if len(rows) > 2 else rows
    if len(rows) < 2:
        return None
    rows = [rows[index * len(rows) // 200] for index in range(200)] if len(rows) > 200 else rows
    parts = {
        "waiting for data": [number(row, "data_s") or 0.0 for row in rows],
        "saving": [number(row, "save_s") or 0.0 for row in rows],
    }
    parts["compute"] = [
        max(0.0, (number(row, "step_s") or 0.0) - data_s - save_s)
        for row, data_s, save_s in zip(rows, *parts.values(), strict=True)
    ]
    steps, floor, drawn = [row["step"] for row in rows], [0.0] * len(rows), []
    for name, color in (("compute", BLUE), ("waiting for data", ORANGE), ("saving", PINK)):
        upper = [low + high for low, high in zip(floor, parts[name], strict=True)]
        drawn.append(Series(name=name, x=steps, y=upper, floor=floor, color=color, line=False))
        floor = upper
    # A save that takes long would flatten all other curves.
    top = 4 * statistics.median(floor) or 1.0
    drawn = [
        replace(each, y=[min(value, top) for value in each.y], floor=[min(value, top) for value in each.floor])
        for each in drawn
    ]
    return Panel(title="", x=STEP, y=Axis(label="seconds per step", low=0), series=drawn)


def accuracy_panel(figures: RunFigures) -> Panel | None:
    """Share of the trained tokens that the model finds the most likely, by step."""
    if not figures.accuracy:
        return None
    y = Axis(label="of the trained tokens", percent=True, low=0)
    return Panel(title="", x=STEP, y=y, series=_raw_and_smoothed("accuracy", figures.accuracy, BLUE))


def entropy_panel(figures: RunFigures) -> Panel | None:
    """Mean entropy of the predicted distributions by step."""
    points = series(figures.data.rows, "entropy")
    if not points:
        return None
    y = Axis(label="nats per token", low=0)
    return Panel(title="", x=STEP, y=y, series=_raw_and_smoothed("entropy", points, GREEN))


def rate_panel(figures: RunFigures) -> Panel | None:
    """Learning rate by step."""
    points = thin(series(figures.data.rows, "learning_rate"))
    if not points:
        return None
    return Panel(title="", x=STEP, y=Axis(label="learning rate", low=0), series=[_line("", points, GREEN)])


def gradient_panel(figures: RunFigures) -> Panel | None:
    """Norm of the gradient by step, and the norm at which it is clipped."""
    points = [point for point in series(figures.data.rows, "grad_norm") if point.value > 0]
    if not points:
        return None
    drawn = _raw_and_smoothed("norm", points, BLUE)
    config = figures.data.config
    values = sorted(point.value for point in points)
    limit = config.optimizer.clip_norm if config else None
    if limit and values[0] / 4 <= limit <= values[-1] * 4:
        ends = points[0].step, points[-1].step
        drawn.append(Series(name="clipped above", x=ends, y=(limit, limit), color=RED, dashed=True, width=1.2))
    wide = values[-1] > 30 * values[0]
    return Panel(title="", x=STEP, y=Axis(label="gradient norm", log=wide, low=None if wide else 0), series=drawn)


def load_panel(figures: RunFigures) -> Panel | None:
    """Load of the fullest expert over the mean load, by step; 1 is even."""
    points = series(figures.data.rows, "expert_load")
    if not points:
        return None
    even = Series(name="", x=[points[0].step, points[-1].step], y=[1, 1], color=GREY, dashed=True, width=1)
    lines = [even, *_raw_and_smoothed("max over mean", points, ORANGE)]
    return Panel(title="", x=STEP, y=Axis(label="load, max over mean", low=0), series=lines)


def router_panel(figures: RunFigures) -> Panel | None:
    """Entropy of the router, as a share of the largest, and share of experts without a token."""
    entropy = thin(series(figures.data.rows, "expert_entropy"))
    if not entropy:
        return None
    dead = thin(series(figures.data.rows, "dead_experts"))
    lines = [_line("entropy of the router", entropy, BLUE), _line("experts without a token", dead, RED)]
    return Panel(title="", x=STEP, y=Axis(label="share", percent=True, low=0, high=1), series=lines)


def _raw_and_smoothed(name: str, points: list[Point], color: int) -> list[Series]:
    smoothed = smooth(points)
    if not smoothed:
        return [_line(name, points, color, mark="circle" if len(points) < 3 else "")]
    return [_line(name, thin(points), color, strength=0.45, width=1.2), _line("smoothed", smoothed, color)]


def _line(
    name: str, points: Sequence[Point], color: int = BLUE, *, strength: float = 1.0, width: float = 1.8, mark: str = ""
) -> Series:
    mark = mark or ("circle" if len(points) == 1 else "")
    x, y = [p.step for p in points], [p.value for p in points]
    return Series(name=name, x=x, y=y, color=color, strength=strength, width=width, mark=mark)


def _marks(name: str, points: Sequence[Point], color: int, mark: str) -> Series:
    x, y = [p.step for p in points], [p.value for p in points]
    return Series(name=name, x=x, y=y, color=color, mark=mark, line=False)


def _rows_with_loss(figures: RunFigures) -> Iterator[tuple[Point, Mapping[str, Any]]]:
    for row in figures.data.rows:
        value = number(row, "loss")
        if value is not None:
            yield Point(step=row["step"], value=value), row


def _resumes(figures: RunFigures) -> list[Marker]:
    last = figures.step
    return [Marker(x=step, title=f"resumed from step {step:,.0f}") for step in figures.resumes if step <= last]


def _top(points: Sequence[Point], held_out: Sequence[float]) -> float:
    """Returns the loss at which the chart is cut off: the first steps and large spikes would flatten the curve."""
    settled = points[0].step + (points[-1].step - points[0].step) / 12
    values = sorted(point.value for point in points if point.step >= settled)
    high, low = max([values[int(0.98 * len(values))], *held_out]), values[0]
    return high + 0.35 * (high - low) if high > low else 2 * high + 1


def _below(points: Sequence[Point], top: float) -> list[Point]:
    """Returns points cut off at the top; of the points above it at the start of a line only the last is kept."""
    first = next((index for index, point in enumerate(points) if point.value <= top), 0)
    return [_capped(point, top) for point in points[max(0, first - 1) :]]


def _capped(point: Point, top: float) -> Point:
    return Point(step=point.step, value=min(point.value, top))


def _spread(items: Sequence) -> list:
    """Returns at most _MOST_LINES of the items, evenly spaced, including the first and the last."""
    if len(items) <= _MOST_LINES:
        return list(items)
    return [items[index * (len(items) - 1) // (_MOST_LINES - 1)] for index in range(_MOST_LINES)]


def _strengths(count: int) -> list[float]:
    """Returns opacities from faint (the oldest) to full (the newest)."""
    return [
        1.0 if count == 1 else 0.3 + 0.5 * index / (count - 1) + 0.2 * (index == count - 1) for index in range(count)
    ]


def _name(step: int, index: int, count: int) -> str:
    """Returns a name for the first and the last of many lines."""
    return f"step {step:,}" if index in (0, count - 1) else ""
