"""A plan for a terminal, in ASCII: the answer and the reasons; on request rejected plans, seconds, bytes, timeline."""

import textwrap
from collections.abc import Sequence
from itertools import accumulate

from sppo_jax.predict.holders import MOMENTS
from sppo_jax.report.draw.columns import WIDTH, aligned, bar, paragraph
from sppo_jax.report.draw.text_timeline import text_passes, text_timeline
from sppo_jax.report.draw.timeline import FADING
from sppo_jax.report.plan.figures import Figures
from sppo_jax.report.plan.tables import (
    MOMENTS_HEADER,
    REJECTED_HEADER,
    STAGES_HEADER,
    byte_unit,
    choice_rows,
    memory_rows,
    moment_rows,
    part_rows,
    rejected_rows,
    stage_rows,
)
from sppo_jax.report.plan.words import COLUMN_HELP, DECIDED, seconds, subject, verdict
from sppo_jax.schedule.table import Table

# The choices that explain the step to someone who meets a plan for the first time, in the order of the question.
_FIRST_CHOICES = (
    *("mesh", "schedule", "chunks", "stash", "host share"),
    *("weights", "experts", "window", "state", "optimizer", "waiting", "hardware"),
)
# The parts of the step and the holders of memory that a line names.
_MOST_NAMED = 5
# Smaller parts of a step would be named with 0%.
_SHARE_NAMED = 0.005


def brief_text(figures: Figures) -> str:
    """Returns the answer, the reasons of the main choices, and what takes the time and the memory; 100 columns wide.

    Args:
        figures: the figures of the plan.
    """
    rows = {name: (value, reasons) for name, value, reasons in choice_rows(figures)}
    chosen = [(name, *rows[name]) for name in _FIRST_CHOICES if name in rows]
    blocks = [_answer(figures), _choices(chosen), _largest(figures)]
    return "\n\n".join([*blocks, "--verbose shows every choice, rejected plans, all parts, and the timeline."])


def plan_text(figures: Figures) -> str:
    """Returns the whole report, at most 100 columns wide where no single word is wider.

    Args:
        figures: the figures of the plan.
    """
    blocks = [
        _answer(figures),
        _choices(choice_rows(figures)),
        _considered(figures),
        _seconds(figures),
        _memory(figures),
        _stages(figures),
        _timeline(figures),
    ]
    return "\n\n".join(blocks)


def moments_text(figures: Figures) -> str:
    """Returns the bytes of each holder of device memory in each moment of a step, and what the moments are."""
    memory = figures.found.memory
    unit, moments = byte_unit(memory), memory.moments
    peak = max(moments, key=lambda moment: sum(moments[moment].values()))
    title = f"Memory of a device at each moment of a step, in {unit.name}; the peak is at: {peak}"
    lines = [title, aligned(MOMENTS_HEADER, moment_rows(figures, unit), left=(0,))]
    return "\n".join([*lines, *(paragraph(moment, what, width=12) for moment, what in MOMENTS.items())])


def scaled_timeline(table: Table, tick_s: Sequence[float], *, width: int = WIDTH) -> str:
    """Returns all ticks to scale: a column is a share of the step, and each op has columns for its share of the time.

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
            name = "." if tick.units[stage] is None else tick.op
            begin, last = (end - seconds_) / ends[-1] * columns, end / ends[-1] * columns
            for column in range(int(begin), min(columns, int(last) + 1)):
                share = min(last, column + 1) - max(begin, column)
                spent[column][name] = spent[column].get(name, 0.0) + share
        rows.append(f"  stage {stage}".ljust(label) + _cells(spent))
    return "\n".join(rows)


def _cells(spent: list[dict[str, float]]) -> str:
    """Returns a letter for each column: the op that is owed the most; it then owes the others what it took."""
    owed: dict[str, float] = {}
    cells = ""
    for column in spent:
        for name, share in column.items():
            owed[name] = owed.get(name, 0.0) + share
        cells += max(column, key=lambda name: owed[name])
        owed[cells[-1]] -= 1
        owed = {name: FADING * debt for name, debt in owed.items()}
    return cells


def copies_text(figures: Figures) -> str:
    """Returns the seconds that a device's link to its host is busy, those exposed, and those that loops wait."""
    exposed, waits, step_s = figures.parts["copies"], figures.parts["waits"], figures.plan.predicted.step_s
    overlap = f"{seconds(exposed, step_s)} s of it exposed" if exposed > 1e-9 else "all overlapped with compute"
    overlap += f", and loops of attention wait for it for {seconds(waits, step_s)} s" if waits > 1e-9 else ""
    out, back = (f"{seconds(busy, step_s)} s" for busy in figures.link_busy_s)
    ways = f"{out} each way" if out == back else f"{out} to the host and {back} back"
    of_optimizer_s = figures.costs.host_update_s()
    also = f"; {seconds(of_optimizer_s, step_s)} s more for the optimizer, exposed" if of_optimizer_s else ""
    return f"{ways} on the busiest device, {overlap}{also}"


def left_out_text(figures: Figures) -> str:
    """Returns what a picture of a step leaves out."""
    shown, planned = figures.table.num_sequences, figures.plan.sequences_per_pipeline
    return (
        f"The timeline shows a step of {shown} of the {planned:,} sequences of a pipeline; "
        f"the ticks of the other {figures.sequences_left_out:,} repeat the same pattern."
    )


def _answer(figures: Figures) -> str:
    return "\n".join([subject(figures), *(paragraph(label, text) for label, text in verdict(figures))])


def _choices(rows: Sequence[tuple[str, str, tuple[str, ...]]]) -> str:
    lines = ["Plan, and why"]
    for name, value, reasons in rows:
        lines.append(paragraph(name, value))
        why = [sentence for reason in reasons for sentence in reason.split("; ")]
        words = ("because ", "and ") if name in DECIDED else ("", "")
        lines += [paragraph("", f"- {words[index > 0]}{sentence}") for index, sentence in enumerate(why)]
    return "\n".join(lines)


def _largest(figures: Figures) -> str:
    """Returns a line on what takes the time of a step, and a line on what takes the memory of a device."""
    unit = byte_unit(figures.found.memory)
    parts = [f"{name} {share:.0%}" for name, _, share, _ in part_rows(figures) if share >= _SHARE_NAMED]
    holders = [f"{name} {size} {unit.name}" for name, size, _, of in memory_rows(figures, unit) if not of]
    lines = [paragraph("memory", ", ".join(holders[:_MOST_NAMED]))]
    if figures.found.fits:
        lines.insert(0, paragraph("time", ", ".join(parts[:_MOST_NAMED])))
    return "\n".join(["The largest parts", *lines])


def _considered(figures: Figures) -> str:
    found, rows = figures.found, rejected_rows(figures)
    title = f"Considered {found.num_considered:,} plans in {found.seconds:.2f} s"
    if not rows:
        return f"{title}; the settings allow no other plan"
    return f"{title}; the best {len(rows)} rejected\n{aligned(REJECTED_HEADER, rows, left=(1, 3, 4, 6), wrap=6)}"


def _seconds(figures: Figures) -> str:
    rows = [(name, spent, f"{share:.1%}", names or bar(share)) for name, spent, share, names in part_rows(figures)]
    lines = [
        f"Where the {seconds(figures.plan.predicted.step_s)} s of a step go (mean of the stages)",
        aligned(("", "seconds", "share", ""), rows, left=(0, 3), wrap=3),
    ]
    if figures.copies:
        lines.append(paragraph("host link", copies_text(figures)))
    return "\n".join(lines)


def _memory(figures: Figures) -> str:
    unit = byte_unit(figures.found.memory)
    rows = [(name, size, f"{share:.1%}", of or bar(share)) for name, size, share, of in memory_rows(figures, unit)]
    return "Memory of a device\n" + aligned(("", unit.name, "share", ""), rows, left=(0, 3))


def _stages(figures: Figures) -> str:
    unit = byte_unit(figures.found.memory)
    title = f"Stages: one device of each, in {unit.name} and seconds per step"
    table = aligned(STAGES_HEADER, stage_rows(figures, unit))
    return f"{title}\n{table}\n{paragraph('', COLUMN_HELP, width=0)}"


def _timeline(figures: Figures) -> str:
    table, tick_s = figures.table, figures.simulation.tick_s
    step_s = sum(tick_s)
    scaled = scaled_timeline(table, tick_s)
    title = f"Timeline to scale: a column is {seconds(step_s / len(scaled.splitlines()[0].split()[-1]))} s"
    # The first and the last ticks one by one, or all passes of a table that passes one group of layers after another.
    in_turn = table.passes_groups_in_turn
    parts = (text_passes(table) if in_turn else text_timeline(table, width=WIDTH, max_blocks=2)).splitlines()
    wrapped = [line if len(line) <= WIDTH else textwrap.fill(line, WIDTH) for line in parts]
    note = [paragraph("", left_out_text(figures))] if figures.sequences_left_out else []
    return "\n".join([title, scaled, *note, "", "Passes" if in_turn else "Ticks", *wrapped])
