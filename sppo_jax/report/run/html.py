"""A run as one page, drawn again while the run trains: its state, curves, events and plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from sppo_jax.files.whole import write_whole
from sppo_jax.report.draw.chart import Panel, chart_svg
from sppo_jax.report.draw.hover import SCRIPT
from sppo_jax.report.draw.page import PAGE_LOOK, bar, cards, page, table
from sppo_jax.report.draw.timeline import timeline_svg
from sppo_jax.report.plan.figures import drawn_table
from sppo_jax.report.run import charts as run_charts
from sppo_jax.report.run.figures import RunFigures, duration, figures_of_run
from sppo_jax.report.run.run_files import read_run_dir
from sppo_jax.report.run.scores import score_sections, scores_of_run
from sppo_jax.report.run.words import (
    choice_rows,
    event_rows,
    head_cards,
    part_rows,
    predicted_rows,
    skip_rows,
    subject_of_run,
)
from sppo_jax.search.make import costs_of

FILE = "report.html"
# Widths in pixels: of a chart beside another, of a chart on a telephone, and of the timeline.
_BROAD, _NARROW, _TIMELINE = 560, 372, 1128

_STYLE = """
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 470px), 1fr)); gap: 14px; }
figure { margin: 0; padding: 10px 10px 6px; border: 1px solid var(--line); border-radius: 6px; background: var(--card);
  min-width: 0; }
figcaption { font-size: 13px; color: var(--soft); padding: 0 4px 4px; }
figcaption b { font-size: 15px; color: var(--ink); display: block; }
figure svg { display: block; width: 100%; height: auto; max-width: 640px; margin: 0 auto; } .narrow { display: none; }
.empty { color: var(--soft); padding: 34px 12px; text-align: center; font-size: 14px; }
.progress { height: 6px; border-radius: 3px; background: var(--grid); overflow: hidden; margin: 12px 0 0; }
.progress i { display: block; height: 100%; background: var(--bar); }
.sub { color: var(--soft); margin: 0; max-width: none; } td.text { overflow-wrap: anywhere; min-width: 84px; }
td.text:first-child { min-width: 0; white-space: nowrap; }
details { margin: 10px 0; } summary { cursor: pointer; } pre { overflow-x: auto; font-size: 12.5px; line-height: 1.4;
  background: var(--card); border: 1px solid var(--line); border-radius: 6px; padding: 10px; }
#tip { position: fixed; display: none; pointer-events: none; background: var(--card); color: var(--ink); z-index: 2;
  border: 1px solid var(--line); border-radius: 4px; padding: 4px 8px; font-size: 12px; line-height: 1.4;
  box-shadow: 0 2px 8px #0004; white-space: nowrap; }
@media (max-width: 560px) { body { margin: 12px auto; padding: 0 10px; } .broad { display: none; }
  .narrow { display: block; } figure { padding: 8px 2px 4px; } figcaption { padding: 0 8px 4px; }
  .answer { gap: 8px; } .answer div { flex: 1 1 40%; min-width: 0; padding: 6px 10px; } .answer b { font-size: 18px; }
  table { font-size: 13px; } th, td { padding: 4px 6px; } .bar { max-width: 90px; } }
"""

# Title, caption, drawing function, and the text that is shown while there is nothing to draw.
_CHARTS: tuple[tuple[str, str, Callable[[RunFigures], Panel | None], str], ...] = (
    (
        "Loss",
        "Logged steps, running medians, validations. Dotted: the run was resumed.",
        run_charts.loss_panel,
        "No step is logged yet.",
    ),
    (
        "Validation loss by position in the context",
        "Falling to the right: tokens far back help. Oldest validation faint, newest strong.",
        run_charts.position_panel,
        "No validation yet (train.eval_every; 0 validates at the end only).",
    ),
    (
        "Recall by distance",
        "Share of the answers found, by distance. Oldest validation faint, newest strong.",
        run_charts.recall_panel,
        "",
    ),
    ("Token accuracy", "Trained tokens that the model finds the most likely.", run_charts.accuracy_panel, ""),
    (
        "Entropy",
        "Of the predicted distributions. Below the loss: surer than right.",
        run_charts.entropy_panel,
        "",
    ),
    (
        "Tokens per second",
        "Of all devices; places too, if many are not trained.",
        run_charts.speed_panel,
        "No step is logged yet.",
    ),
    ("Model FLOPs used (MFU)", "Share of the peak; causal, without recomputation.", run_charts.mfu_panel, ""),
    (
        "Seconds of a step",
        "By part, without validations; cut off at four times the median.",
        run_charts.breakdown_panel,
        "Two logged steps are needed.",
    ),
    ("Memory", "Peak so far.", run_charts.memory_panel, "No step is logged yet."),
    ("Gradient norm", "Before clipping.", run_charts.gradient_panel, "No step is logged yet."),
    ("Load of experts", "Tokens of the fullest expert over the mean, over layers.", run_charts.load_panel, ""),
    ("Router", "Entropy as a share of the largest possible, and experts without a token.", run_charts.router_panel, ""),
    ("Learning rate", "", run_charts.rate_panel, "No step is logged yet."),
)


def write_report(run_dir: Path) -> Path:
    """Writes the report of a run into the run's directory, whole or not at all.

    Args:
        run_dir: the run directory, with those of config.yaml, plan.json, metrics.jsonl and events.jsonl that exist.

    Returns:
        The path of report.html.

    Raises:
        ValueError: the directory holds no run, or cannot be read or written.
    """
    return write_page(run_dir / FILE, run_html(figures_of_run(read_run_dir(run_dir))))


def write_page(path: Path, text: str) -> Path:
    """Writes a page to a file, whole or not at all, and returns the path.

    Raises:
        ValueError: the file cannot be written.
    """
    try:
        write_whole(path, text)
    except OSError as error:
        raise ValueError(
            f"the file of a report must be writable, got {path} ({error.strerror}); name another file with --out"
        ) from None
    return path


def run_html(figures: RunFigures) -> str:
    """Returns the whole page of a run."""
    data = figures.data
    body = [
        f"<h1>{escape(data.name)}</h1>",
        f"<p class='sub'>{escape(subject_of_run(figures))}</p>",
        *_progress(figures),
        *cards(head_cards(figures)),
        *(f"<p class='note'>{escape(note)}</p>" for note in data.notes),
        "<h2>Curves</h2>",
        "<div class='charts'>",
        *(_figure(*chart[:2], chart[2](figures), chart[3]) for chart in _CHARTS),
        "</div>",
        *score_sections(scores_of_run(data.run_dir)),
        *_seconds(figures),
        *_predicted(figures),
        *_section("Skipped steps", skip_rows(figures), ("step", "time", "why"), text=(1, 2)),
        *_section("Events", event_rows(figures), ("step", "time", "event", ""), text=(1, 2, 3)),
        *_plan(figures),
        *_settings(figures),
    ]
    return page(f"{data.name}: {figures.status.word}", body, style=_STYLE, script=SCRIPT)


def _progress(figures: RunFigures) -> list[str]:
    if not figures.num_steps:
        return []
    share = min(1.0, figures.step / figures.num_steps)
    return [f"<div class='progress' title='{share:.1%} of the steps'><i style='width:{share:.2%}'></i></div>"]


def _figure(title: str, caption: str, panel: Panel | None, empty: str) -> str:
    """Returns a chart in two widths, of which the page shows one; "" if the chart can never have points."""
    if panel is None and not empty:
        return ""
    head = f"<figcaption><b>{escape(title)}</b>{escape(caption)}</figcaption>"
    if panel is None:
        return f"<figure>{head}<div class='empty'>{escape(empty)}</div></figure>"
    broad = chart_svg([panel], width=_BROAD, height=292, look=PAGE_LOOK)
    narrow = chart_svg([panel], width=_NARROW, height=256, look=PAGE_LOOK)
    return f"<figure>{head}<div class='broad'>{broad}</div><div class='narrow'>{narrow}</div></figure>"


def _seconds(figures: RunFigures) -> list[str]:
    if not figures.trained_s:
        return []
    rows = [(name, spent, f"{share:.1%}", bar(share)) for name, spent, share in part_rows(figures)]
    note = "Compiling, and steps that a resumed run repeated, are not included."
    return [
        f"<h2>Where the time went: {duration(figures.trained_s)}</h2>",
        table(("part", "time", "share", ""), rows, text=(0,), raw=(3,)),
        f"<p class='note'>{note}</p>",
    ]


def _predicted(figures: RunFigures) -> list[str]:
    rows, config = predicted_rows(figures), figures.data.config
    parts = _section("Predicted and measured", rows, ("", "predicted", "measured"))
    if rows and config and config.train.num_simulated_devices:
        parts.append(
            "<p class='note'>Simulated devices share the cores of one machine; the prediction ignores this.</p>"
        )
    return parts


def _section(
    title: str, rows: Sequence[Sequence[str]], header: Sequence[str], *, text: Sequence[int] = (0,)
) -> list[str]:
    return [f"<h2>{escape(title)}</h2>", table(header, rows, text=text)] if rows else []


def _plan(figures: RunFigures) -> list[str]:
    plan, config = figures.data.plan, figures.data.config
    if plan is None:
        return []
    parts = ["<h2>The plan, and why</h2>", table(("choice", "value", "reason"), choice_rows(plan), text=(0, 1, 2))]
    if config is None:
        return parts
    try:
        drawn = drawn_table(plan)
        costs = costs_of(plan, config).of_chunks(drawn.chunk_lengths)
        title = f"{plan.schedule.name}: one step, as predicted"
        svg = timeline_svg(drawn, costs, width=_TIMELINE, title=title)
    except ValueError as error:  # the planner may be unable to compute the costs of a plan that was given by hand
        return [*parts, f"<p class='note'>The timeline cannot be drawn ({escape(str(error))}).</p>"]
    return [*parts, f"<div class='wide'>{svg}</div>"]


def _settings(figures: RunFigures) -> list[str]:
    if not figures.data.config_text:
        return []
    return [f"<details><summary>All settings</summary><pre>{escape(figures.data.config_text)}</pre></details>"]
