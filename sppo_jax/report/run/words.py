"""The texts of a run's report: the head line, tables, and five lines for a terminal."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from sppo_jax.files.format_bytes import NOT_FINITE, format_bytes
from sppo_jax.plan.plan import Plan
from sppo_jax.report.draw.axis import count_text
from sppo_jax.report.plan.words import seconds, settings_of
from sppo_jax.report.run.figures import Point, RunFigures, ShownValidation, duration
from sppo_jax.report.run.run_files import number
from sppo_jax.report.run.speed import is_alike, speed_text

_LOOKS = {"finished": "fits", "running": "fits", "starting": "", "stopped": "warn", "stopped answering": "not"}
# Rows of the tables of events and of skipped steps.
_MOST_ROWS = 60
_COLLAPSED = ("save", "skip", "spike")
_TROUBLES = ("warning", "corrupt")


def subject_of_run(figures: RunFigures) -> str:
    """Returns what is trained: model, sequences, devices."""
    config, plan = figures.data.config, figures.data.plan
    parts = []
    if config:
        model = config.model
        parts.append(model.preset or f"{model.num_layers} layers, {model.hidden_size} wide")
    if plan:
        several = "" if figures.num_sequences == 1 else f"{figures.num_sequences} sequences of "
        parts.append(f"{several}{plan.sequence_length:,} tokens per step in {len(plan.chunk_lengths)} chunks")
        mesh = plan.mesh
        parts.append(
            f"{mesh.data * mesh.pipe * mesh.seq} devices: data {mesh.data} x pipe {mesh.pipe} x seq {mesh.seq}"
        )
    return "; ".join(parts) or "settings not known yet"


def head_cards(figures: RunFigures) -> list[tuple[str, str, str]]:
    """Returns the cards at the head of the page, as (large figure, text below, how it is shown)."""
    status, step, num_steps = figures.status, figures.step, figures.num_steps
    boxes = [
        (status.word, status.why, _LOOKS[status.word]),
        (f"{step:,}", f"of {num_steps:,} steps" if num_steps else "steps", ""),
    ]
    if figures.loss:
        last_loss = figures.loss[-1]
        boxes.append((f"{last_loss.value:.4f}", f"loss of step {last_loss.step:,}, nats per token", ""))
    if figures.accuracy:
        last_accuracy = figures.accuracy[-1]
        boxes.append((f"{last_accuracy.value:.1%}", f"token accuracy of step {last_accuracy.step:,}", ""))
    if broken := _broken(figures):
        boxes.append((NOT_FINITE, f"validation loss after step {broken:,}", "warn"))
    if figures.validations and figures.best:
        last, best = figures.validations[-1], figures.best
        below = f"validation loss after step {last.step:,}{_of_held_out(last)}" + (
            "" if best is last else f", best {best.loss:.4f} at {best.step:,}"
        )
        boxes.append((f"{last.loss:.4f}", below, ""))
        boxes += [
            (f"{one.gain:+.4f}", f"nats gained by context beyond {one.beyond:,} tokens", "") for one in last.gains[:1]
        ]
    if figures.recalls:
        recall = figures.recalls[-1]
        boxes.append((f"{recall.accuracies[-1]:.1%}", f"recall at distance {recall.distances[-1]:,}", ""))
    mfu = figures.recent("mfu")
    boxes += _speed_cards(figures)
    if mfu is not None:
        boxes.append((f"{mfu:.1%}", "causal MFU", ""))
    boxes += _count_cards(figures)
    if figures.trained_s:
        boxes.append((duration(figures.trained_s), _left(figures), ""))
    if figures.num_skipped:
        boxes.append((f"{figures.num_skipped}", "steps skipped", "warn"))
    return boxes


def _speed_cards(figures: RunFigures) -> list[tuple[str, str, str]]:
    """Returns trained tokens a second, and places a second where these are more or all that is known."""
    tokens, places = figures.recent("tokens_per_s"), figures.recent("places_per_s")
    boxes = [] if tokens is None else [(_large(tokens), "tokens/s", "")]
    if places is not None and (tokens is None or not is_alike(tokens, places)):
        boxes.append((_large(places), "places/s", ""))
    return boxes


def _count_cards(figures: RunFigures) -> list[tuple[str, str, str]]:
    """Returns the trained tokens of the run, and its places where these are more or all that is known."""
    tokens, places = figures.tokens, figures.places
    boxes = [(count_text(tokens), "tokens trained", "")] if tokens else []
    if places and (not tokens or not is_alike(tokens, places)):
        boxes.append((count_text(places), "places for tokens", ""))
    return boxes


def _large(speed: float) -> str:
    return f"{speed:,.0f}" if speed < 1e5 else count_text(speed)


def part_rows(figures: RunFigures) -> list[tuple[str, str, float]]:
    """Returns the parts of the run's time: name, time, share."""
    total = figures.trained_s
    return [(name, duration(spent), spent / total) for name, spent in figures.parts_s.items() if spent]


def predicted_rows(figures: RunFigures) -> list[tuple[str, str, str]]:
    """Returns the planner's figures beside those of the run."""
    plan, step_s = figures.data.plan, figures.recent("step_s")
    if plan is None or step_s is None:
        return []
    predicted = plan.predicted
    rows = [("step, seconds", seconds(predicted.step_s, step_s), seconds(step_s, predicted.step_s))]
    peak = figures.recent("hbm_peak_bytes")
    if peak is not None:
        rows.append(("fullest device", format_bytes(max(predicted.hbm_bytes)), format_bytes(peak)))
    return rows


def skip_rows(figures: RunFigures) -> list[tuple[str, str, str]]:
    """Returns the last steps that were skipped, newest first."""
    return [_row(event)[:2] + (_row(event)[3],) for event in reversed(figures.events_of("skip")[-_MOST_ROWS:])]


def event_rows(figures: RunFigures) -> list[tuple[str, str, str, str]]:
    """Returns the run's events, newest first, without validations.

    Consecutive saves, skips or spikes share a row, and so do warnings of one text, wherever they are.
    """
    runs: list[list[tuple[int, Mapping[str, Any]]]] = []
    warned: dict[Any, list[tuple[int, Mapping[str, Any]]]] = {}
    for place, event in enumerate(figures.data.events):
        name = event["kind"]
        if name == "validation":
            continue
        run = warned.get(_sameness(event)) if name in _TROUBLES else None
        if run is None and runs and name in _COLLAPSED and runs[-1][0][1]["kind"] == name:
            run = runs[-1]
        if run is None:
            runs.append(run := [])
            if name in _TROUBLES:
                warned[_sameness(event)] = run
        run.append((place, event))
    runs.sort(key=lambda run: run[-1][0])
    return [_row_of([event for _, event in run]) for run in reversed(runs[-_MOST_ROWS:])]


def _row_of(run: Sequence[Mapping[str, Any]]) -> tuple[str, str, str, str]:
    """Returns the row of events that share one."""
    step, time, name, text = _row(run[-1])
    first = _row(run[0])[0]
    steps = f"{first}-{step}" if len(run) > 1 and first != step else step
    identical = len({str(event.get("text")) for event in run}) == 1
    many = f"{len(run)} times: {text}" if identical else f"{len(run)} of them; the last: {text}"
    return (steps, time, name, text if len(run) == 1 else many)


def _sameness(event: Mapping[str, Any]) -> tuple[str, str]:
    """Returns what warnings of one cause share: all but the numbers in their text."""
    return str(event["kind"]), re.sub(r"\d+", "", str(event.get("text") or ""))


def choice_rows(plan: Plan) -> list[tuple[str, str, str]]:
    """Returns the plan's choices with their reasons."""
    return [
        (name, value, "; ".join(plan.reasons[key] for key in keys if key in plan.reasons))
        for name, value, keys in settings_of(plan)
    ]


def summary(figures: RunFigures) -> str:
    """Returns five lines for a terminal."""
    status, num_steps = figures.status, figures.num_steps
    tokens, places, mfu = (figures.recent(key) for key in ("tokens_per_s", "places_per_s", "mfu"))
    steps = f"step {figures.step:,}" + (f" of {num_steps:,}" if num_steps else "")
    lines = [f"{figures.data.name}: {status.word} ({status.why}), {steps}"]
    accuracy = f", token accuracy {figures.accuracy[-1].value:.1%}" if figures.accuracy else ""
    lines.append(f"loss         {_loss_words(figures.loss)}{accuracy}")
    lines.append(f"validation   {_validation_words(figures)}")
    if tokens is None and places is None:
        lines.append("speed        not known yet")
    else:
        share = f", MFU {mfu:.1%}" if mfu is not None else ""
        lines.append(f"speed        {speed_text(tokens, places)}{share}, {duration(figures.trained_s)} so far")
    troubles = [
        f"{count} {name}{'' if count == 1 else 's'}"
        for name, count in (
            ("resume", len(figures.resumes)),
            ("skipped step", figures.num_skipped),
            ("spike", len(figures.events_of("spike"))),
            ("warning", len({_sameness(event) for event in figures.events_of(*_TROUBLES)})),
        )
    ]
    return "\n".join([*lines, f"events       {', '.join(troubles)}"])


def _loss_words(points: Sequence[Point]) -> str:
    if not points:
        return "none logged yet"
    first, last = points[0], points[-1]
    return f"{first.value:.4f} at step {first.step:,}, {last.value:.4f} at step {last.step:,}"


def _validation_words(figures: RunFigures) -> str:
    broken = _broken(figures)
    now = f"{NOT_FINITE} at step {broken:,}" if broken else ""
    if not figures.validations:
        return now or "none yet"
    last = figures.validations[-1]
    far = "".join(f"; {gain.text}" for gain in last.gains)
    finite = f"{last.loss:.4f} at step {last.step:,}{_of_held_out(last)}{far}"
    return f"{now}; {finite}" if now else finite


def _broken(figures: RunFigures) -> int | None:
    """Returns the step of the last validation if its loss is not finite."""
    finite = max((validation.step for validation in figures.validations), default=0)
    return next((step for step in figures.not_finite[-1:] if step > finite), None)


def _of_held_out(validation: ShownValidation) -> str:
    """Says how many of the held-out sequences a validation measured, where its line says that."""
    if validation.num_sequences is None or validation.num_held_out is None:
        return ""
    return f" over {validation.num_sequences:,} of {validation.num_held_out:,} sequences"


def _left(figures: RunFigures) -> str:
    if figures.status.word != "running" or not figures.eta_s:
        return "of training"
    return f"of training, {duration(figures.eta_s)} left"


def _row(event: Mapping[str, Any]) -> tuple[str, str, str, str]:
    step = number(event, "step")
    return (
        "" if step is None else f"{step:,.0f}",
        _clock(event.get("time")),
        str(event["kind"]),
        " ".join(str(event.get("text") or "").split())[:400],
    )


def _clock(time: Any) -> str:
    """Returns a time of events.jsonl to the second, in its own time zone."""
    try:
        return f"{datetime.fromisoformat(str(time)):%Y-%m-%d %H:%M:%S}"
    except ValueError:
        return ""
