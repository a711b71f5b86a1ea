"""A plan for a terminal: the answer, the choices and why, what lost, where seconds and bytes go. Plain ASCII."""

import textwrap
from collections.abc import Sequence
from itertools import accumulate

from sppo_jax.report.columns import WIDTH, aligned, bar, paragraph
from sppo_jax.report.figures import COLUMNS, WORKING, Figures
from sppo_jax.report.words import (
    COLUMN_HELP,
    COLUMN_NAMES,
    PART_NAMES,
    TOLD_ELSEWHERE,
    gib,
    holder_of,
    mesh_of,
    most_alpha,
    runs_of,
    schedule_of,
    seconds,
    settings_of,
    span,
    stash_of,
    subject,
    verdict,
)
from sppo_jax.schedule.table import Table
from sppo_jax.schedule.timeline import text_timeline

# Parts of a step below this share are shown as one.
_SMALL_SHARE = 5e-4


def plan_text(figures: Figures) -> str:
    """Returns the whole report, at most 100 columns wide where no single word is wider.

    Args:
        figures: the search's answer and what follows from it.
    """
    blocks = [
        "\n".join([subject(figures), *verdict(figures)]),
        _choices(figures),
        _considered(figures),
        _seconds(figures),
        _memory(figures),
        _stages(figures),
        _timeline(figures),
    ]
    return "\n\n".join(blocks)


def scaled_timeline(table: Table, tick_s: Sequence[float], *, width: int = WIDTH) -> str:
    """Draws all ticks to scale: a column is a share of the step, and shows what a stage does for most of it.

    Args:
        table: the schedule.
        tick_s: seconds of each tick.
        width: columns of the terminal.
    """
    label = len(f"  stage {table.num_stages - 1} ")
    ends, columns = list(accumulate(tick_s)), width - label
    rows = []
    for stage in range(table.num_stages):
        spent: list[dict[str, float]] = [{} for _ in range(columns)]
        for tick, seconds_, end in zip(table.ticks, tick_s, ends, strict=True):
            name = "." if tick.units[stage] is None else tick.kind
            begin, last = (end - seconds_) / ends[-1] * columns, end / ends[-1] * columns
            for column in range(int(begin), min(columns, int(last) + 1)):
                share = min(last, column + 1) - max(begin, column)
                spent[column][name] = spent[column].get(name, 0.0) + share
        cells = "".join(max(column, key=lambda name: column[name]) for column in spent)
        rows.append(f"  stage {stage}".ljust(label) + cells)
    return "\n".join(rows)


def copies_text(figures: Figures) -> str:
    """Returns how long a device's link to its host is busy, and how much of that is not behind compute."""
    exposed, busy, step_s = figures.parts["copies"], figures.link_busy_s(), figures.plan.predicted.step_s
    hidden = f"{seconds(exposed, step_s)} s not behind compute" if exposed > 1e-9 else "all of it behind compute"
    return f"{seconds(busy, step_s)} s each way on the busiest device, {hidden}"


def _choices(figures: Figures) -> str:
    lines, shown = ["Plan, and why"], set(TOLD_ELSEWHERE)
    reasons = figures.plan.reasons
    for name, value, keys in settings_of(figures.plan):
        lines.append(paragraph(name, value))
        lines += [paragraph("", f"- {reasons[key]}") for key in keys if key in reasons]
        shown.update(keys)
    lines += [paragraph(key, reason) for key, reason in reasons.items() if key not in shown]
    return "\n".join(lines)


def _considered(figures: Figures) -> str:
    found = figures.found
    title = f"Considered {found.num_considered:,} plans in {found.seconds:.2f} s"
    if not found.rejected:
        return f"{title}; the settings leave no other"
    header = ("step s", "data x pipe x seq", "chunks", "schedule", "stash in/attn/rest", "alpha", "lost because")
    rows = [
        (
            seconds(item.step_s, figures.plan.predicted.step_s),
            mesh_of(item.plan),
            str(len(item.plan.chunk_lengths)),
            schedule_of(item.plan),
            stash_of(item.plan),
            most_alpha(item.plan),
            item.why,
        )
        for item in found.rejected
    ]
    return f"{title}; the best {len(rows)} that lost\n{aligned(header, rows, left=(1, 3, 4, 6), wrap=6)}"


def _seconds(figures: Figures) -> str:
    step_s = figures.plan.predicted.step_s
    large = {name: value for name, value in figures.parts.items() if value / step_s >= _SMALL_SHARE}
    small = {name: value for name, value in figures.parts.items() if 0 < value / step_s < _SMALL_SHARE}
    rows = [
        (PART_NAMES[name], seconds(value, step_s), f"{value / step_s:.1%}", bar(value / step_s))
        for name, value in large.items()
    ]
    if small:
        rest = sum(small.values())
        names = ", ".join(PART_NAMES[name] for name in small)
        rows.append(("the rest", seconds(rest, step_s), f"{rest / step_s:.1%}", names))
    lines = [
        f"Where the {seconds(step_s)} s of a step go (mean of the stages)",
        aligned(("", "seconds", "share", ""), rows, left=(0, 3), wrap=3),
    ]
    if figures.copies:
        lines.append(paragraph("host link", copies_text(figures)))
    return "\n".join(lines)


def _memory(figures: Figures) -> str:
    memory, cluster = figures.found.memory, figures.cluster
    capacity, host = cluster.device.hbm_bytes, cluster.device_host_bytes
    rows = [
        (holder_of(name), gib(size), f"{size / capacity:.1%}", bar(size / capacity))
        for name, size in sorted(memory.hbm.items(), key=lambda item: -item[1])
        if size
    ]
    total = memory.hbm_bytes
    rows.append(("HBM in all", gib(total), f"{total / capacity:.1%}", f"of {gib(capacity)} GiB"))
    rows.append(("host memory", gib(memory.host), f"{memory.host / host:.1%}", f"of {gib(host)} GiB for each device"))
    return "Memory of a device\n" + aligned(("", "GiB", "share", ""), rows, left=(0, 3))


def _stages(figures: Figures) -> str:
    header = ("stage", *COLUMN_NAMES.values(), "peak", "host", "F s", "B s", "H s", "idle s", "chunks")
    step_s = figures.plan.predicted.step_s
    rows = []
    for stage in figures.stages:
        sizes = (*(stage.hbm[name] for name in (*COLUMNS, WORKING)), stage.hbm_bytes, stage.host_bytes)
        times = (stage.forward_s, stage.backward_s, stage.head_s, stage.idle_s)
        rows.append((*map(gib, sizes), *(seconds(value, step_s) for value in times), str(stage.peak_chunks)))
    lines = [(span(first, last), *row) for first, last, row in runs_of(rows)]
    title = "Stages: a device of each, in GiB and seconds a step"
    return f"{title}\n{aligned(header, lines)}\n{paragraph('', COLUMN_HELP, width=0)}"


def _timeline(figures: Figures) -> str:
    table, tick_s = figures.table, figures.simulation.tick_s
    step_s = sum(tick_s)
    scaled = scaled_timeline(table, tick_s)
    title = f"Timeline to scale: a column is {seconds(step_s / len(scaled.splitlines()[0].split()[-1]))} s"
    # The first and the last ticks one by one.
    ticks = text_timeline(table, width=WIDTH, max_blocks=2).splitlines()
    wrapped = [line if len(line) <= WIDTH else textwrap.fill(line, WIDTH) for line in ticks]
    return "\n".join([title, scaled, "", "Ticks", *wrapped])
