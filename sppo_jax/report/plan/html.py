"""A plan as one page: the answer, the picture of the step, memory, tables, reasons. No network, no scripts."""

from html import escape
from statistics import median

from sppo_jax.files.format_bytes import format_bytes
from sppo_jax.report.draw.page import bar, cards, page, table
from sppo_jax.report.draw.timeline import LinkUse, Window, timeline_svg, whole_step
from sppo_jax.report.plan.figures import Figures
from sppo_jax.report.plan.memory_curve import memory_svg
from sppo_jax.report.plan.occupancy import occupancy
from sppo_jax.report.plan.tables import (
    REJECTED_HEADER,
    STAGES_HEADER,
    byte_unit,
    choice_rows,
    memory_rows,
    part_rows,
    rejected_rows,
    stage_rows,
)
from sppo_jax.report.plan.text import copies_text, left_out_text
from sppo_jax.report.plan.words import COLUMN_HELP, seconds, subject

WIDTH = 1160
# If a tick of the whole step is narrower than this, the ends and the start of the backward are drawn again, larger.
_READABLE = 16
_CLOSE_TICKS = 40


def plan_html(figures: Figures) -> str:
    """Returns the whole page.

    Args:
        figures: the figures of the plan.
    """
    title = subject(figures)
    body = [
        f"<h1>{escape(title)}</h1>",
        *_answer(figures),
        "<h2>The step</h2>",
        *_pictures(figures),
        "<h2>Where the seconds go</h2>",
        *_seconds(figures),
        "<h2>Memory of a device</h2>",
        *_memory(figures),
        "<h2>Stages</h2>",
        *_stages(figures),
        "<h2>The plan, and why</h2>",
        *_choices(figures),
        "<h2>Considered and rejected</h2>",
        *_considered(figures),
        f"<p class='note'>Predicted by sppo_jax {escape(figures.plan.version)} before anything was compiled.</p>",
    ]
    return page(title, body)


def _answer(figures: Figures) -> list[str]:
    found, plan = figures.found, figures.plan
    memory, cluster = found.memory, figures.cluster
    boxes = [
        ("fits" if found.fits else "does not fit", figures.cluster.name, "fits" if found.fits else "not"),
        (f"{seconds(plan.predicted.step_s)} s", "predicted step", ""),
        (f"{figures.tokens_s:,.0f}", f"tokens/s, {figures.tokens_s / figures.num_devices:,.0f} per device", ""),
    ]
    if figures.mfu is not None:
        boxes.append((f"{figures.mfu:.1%}", "causal MFU", ""))
    boxes += [
        (f"{plan.predicted.bubble_fraction:.1%}", "bubble", ""),
        (format_bytes(memory.hbm_bytes), f"HBM of {format_bytes(cluster.device.hbm_bytes)}", ""),
        (format_bytes(memory.host), f"host of {format_bytes(cluster.device_host_bytes)} per device", ""),
    ]
    problem = [f"<p><strong>{escape(found.problem)}</strong></p>"] if found.problem else []
    return [*cards(boxes), *problem]


def _pictures(figures: Figures) -> list[str]:
    tick_s = figures.simulation.tick_s
    whole = whole_step(tick_s, WIDTH)
    left_out = [f"<p class='note'>{escape(left_out_text(figures))}</p>"] if figures.sequences_left_out else []
    parts = [*left_out, _picture(figures, whole, "the whole step, to scale"), _memory_picture(figures, whole)]
    if median(tick_s) * whole.scale >= _READABLE or len(tick_s) <= _CLOSE_TICKS:
        return parts
    for first, what in _close_ups(figures):
        last = min(first + _CLOSE_TICKS, len(tick_s)) - 1
        window = Window(first=first, last=last, starts_s=whole.starts_s, width=WIDTH)
        parts.append(_picture(figures, window, f"closer: ticks {first}-{last}, {what}"))
    return parts


def _close_ups(figures: Figures) -> list[tuple[int, str]]:
    """Returns the first tick and the name of each window that is drawn larger, none twice."""
    ticks = figures.table.ticks
    backward = next(index for index, tick in enumerate(ticks) if tick.op == "B")
    found: list[tuple[int, str]] = []
    for first, what in (
        (0, "the pipeline fills"),
        (max(0, backward - _CLOSE_TICKS // 2), "backward begins"),
        (len(ticks) - _CLOSE_TICKS, "the pipeline drains"),
    ):
        if all(abs(first - known) > _CLOSE_TICKS // 2 for known, _ in found):
            found.append((first, what))
    return found


def _picture(figures: Figures, window: Window, title: str) -> str:
    links = [
        LinkUse(stage=copy.stage, tick=copy.tick, out=copy.out, seconds=figures.copy_s(copy)) for copy in figures.copies
    ]
    table = figures.table
    costs = figures.costs.of_chunks(table.chunk_lengths)
    svg = timeline_svg(table, costs, width=WIDTH, title=f"{table.name}: {title}", links=links, window=window)
    return f"<div class='wide'>{svg}</div>"


def _memory_picture(figures: Figures, window: Window) -> str:
    memory, cluster = figures.found.memory, figures.cluster
    fullest = max(figures.stages, key=lambda stage: stage.peak_chunks).stage
    curve = occupancy(figures.table, memory, figures.stashed, fullest, figures.plan.stash.kv)
    svg = memory_svg(
        curve,
        window,
        allocated=memory.hbm_bytes,
        capacity=cluster.device.hbm_bytes,
        host_allocated=memory.host,
        host_capacity=cluster.device_host_bytes,
    )
    return f"<div class='wide'>{svg}</div>"


def _seconds(figures: Figures) -> list[str]:
    rows = [
        (name, spent, f"{share:.1%}", escape(names) or bar(share)) for name, spent, share, names in part_rows(figures)
    ]
    note = f"<p class='note'>Host link: {escape(copies_text(figures))}.</p>" if figures.copies else ""
    return [table(("part", "seconds", "share", ""), rows, text=(0,), raw=(3,)), note]


def _memory(figures: Figures) -> list[str]:
    unit = byte_unit(figures.found.memory)
    rows = [
        (name, size, f"{share:.1%}", escape(of) or bar(share)) for name, size, share, of in memory_rows(figures, unit)
    ]
    return [table(("holds", unit.name, "share", ""), rows, text=(0,), raw=(3,))]


def _stages(figures: Figures) -> list[str]:
    unit = byte_unit(figures.found.memory)
    note = f"One device of each stage, in {unit.name} and seconds per step. {COLUMN_HELP}."
    return [table(STAGES_HEADER, stage_rows(figures, unit)), f"<p class='note'>{escape(note)}</p>"]


def _choices(figures: Figures) -> list[str]:
    rows = [(name, value, "; ".join(reasons)) for name, value, reasons in choice_rows(figures)]
    return [table(("choice", "value", "reason"), rows, text=(0, 1, 2))]


def _considered(figures: Figures) -> list[str]:
    found, rows = figures.found, rejected_rows(figures)
    note = f"<p>{found.num_considered:,} plans considered in {found.seconds:.2f} s.</p>"
    if not rows:
        return [note, "<p>The settings allow no other plan.</p>"]
    return [note, table(REJECTED_HEADER, rows, text=(1, 3, 4, 6))]
