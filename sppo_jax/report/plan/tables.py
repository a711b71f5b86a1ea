"""The tables of a plan's report as rows of texts, the same for a terminal and for a page."""

from dataclasses import dataclass

from sppo_jax.files.format_bytes import format_bytes
from sppo_jax.hardware import usable_bytes
from sppo_jax.plan.stall_limit import stall_problem, stall_text
from sppo_jax.predict.holders import MOMENTS
from sppo_jax.predict.memory import Memory
from sppo_jax.report.plan.figures import COLUMNS, WORKING, Figures
from sppo_jax.report.plan.words import (
    COLUMN_NAMES,
    PART_NAMES,
    TOLD_ELSEWHERE,
    holder_of,
    mesh_of,
    most_alpha,
    runs_of,
    schedule_of,
    seconds,
    settings_of,
    span,
    stash_of,
)

# Parts of a step below this share are shown as one part.
_SMALL_SHARE = 5e-4
REJECTED_HEADER = ("step s", "data x pipe x seq", "chunks", "schedule", "stash in/attn/rest", "alpha", "reason")
STAGES_HEADER = ("stage", *COLUMN_NAMES.values(), "peak", "host", "F s", "B s", "H s", "idle s", "chunks")


MOMENTS_HEADER = ("", *MOMENTS)


@dataclass(frozen=True, kw_only=True)
class ByteUnit:
    """The unit of all bytes of a report."""

    name: str
    size: int

    def text(self, value: float) -> str:
        """Returns bytes in the unit, with two decimals, or one decimal from 100 on."""
        return f"{value / self.size:.2f}" if value < 100 * self.size else f"{value / self.size:.1f}"


def byte_unit(memory: Memory) -> ByteUnit:
    """Returns the unit: GiB, or MiB if a plan takes less than one GiB of a device."""
    return ByteUnit(name="GiB", size=2**30) if memory.hbm_bytes >= 2**30 else ByteUnit(name="MiB", size=2**20)


def choice_rows(figures: Figures) -> list[tuple[str, str, tuple[str, ...]]]:
    """Returns each choice with its value and its reasons; reasons of other choices come last."""
    reasons, shown = figures.plan.reasons, set(TOLD_ELSEWHERE)
    rows: list[tuple[str, str, tuple[str, ...]]] = []
    for name, value, keys in settings_of(figures.plan):
        rows.append((name, value, tuple(reasons[key] for key in keys if key in reasons)))
        shown.update(keys)
    problem = stall_problem(figures.plan, figures.stall_s)
    rows.append(("stall limit", stall_text(figures.plan, figures.stall_s), (problem,) if problem else ()))
    return rows + [(key, reason, ()) for key, reason in reasons.items() if key not in shown]


def rejected_rows(figures: Figures) -> list[tuple[str, ...]]:
    """Returns the best rejected plans, under REJECTED_HEADER."""
    return [
        (
            seconds(item.step_s, figures.plan.predicted.chosen_by_s),
            mesh_of(item.plan),
            str(len(item.plan.chunk_lengths)),
            schedule_of(item.plan),
            stash_of(item.plan),
            most_alpha(item.plan),
            item.why,
        )
        for item in figures.found.rejected
    ]


def part_rows(figures: Figures) -> list[tuple[str, str, float, str]]:
    """Returns the parts of the step: name, seconds, share, and the names of the parts that the last row sums up."""
    step_s = figures.plan.predicted.step_s
    shares = {name: value / step_s for name, value in figures.parts.items()}
    rows = [
        (PART_NAMES[name], seconds(figures.parts[name], step_s), share, "")
        for name, share in shares.items()
        if share >= _SMALL_SHARE
    ]
    rest = [name for name, share in shares.items() if 0 < share < _SMALL_SHARE]
    if rest:
        names = ", ".join(PART_NAMES[name] for name in rest)
        total = sum(shares[name] for name in rest)
        rows.append(("the rest", seconds(total * step_s, step_s), total, names))
    return rows


def memory_rows(figures: Figures, unit: ByteUnit) -> list[tuple[str, str, float, str]]:
    """Returns the holders of a device's memory, largest first, then the sums: name, bytes, share, and the capacity."""
    memory, cluster = figures.found.memory, figures.cluster
    capacity, host = cluster.device.hbm_bytes, cluster.device_host_bytes
    rows = [
        (holder_of(name), unit.text(size), size / capacity, "")
        for name, size in sorted(memory.hbm.items(), key=lambda item: -item[1])
        if size
    ]
    hbm = f"of {format_bytes(capacity)}, of which plans may take {format_bytes(usable_bytes(cluster))}"
    return [
        *rows,
        ("HBM total", unit.text(memory.hbm_bytes), memory.hbm_bytes / capacity, hbm),
        ("host memory", unit.text(memory.host), memory.host / host, _host_note(memory, host)),
    ]


def moment_rows(figures: Figures, unit: ByteUnit) -> list[tuple[str, ...]]:
    """Returns the bytes of each holder in each moment of a step, under MOMENTS_HEADER, and their sums."""
    memory = figures.found.memory
    moments = memory.moments
    rows = [
        (holder_of(name), *(unit.text(moments[moment][name]) if moments[moment][name] else "" for moment in MOMENTS))
        for name in memory.hbm
        if memory.most(name)
    ]
    return [*rows, ("total", *(unit.text(sum(moments[moment].values())) for moment in MOMENTS))]


def stage_rows(figures: Figures, unit: ByteUnit) -> list[tuple[str, ...]]:
    """Returns one row for a device of each stage, under STAGES_HEADER; equal stages share a row."""
    step_s = figures.plan.predicted.step_s
    rows = []
    for stage in figures.stages:
        sizes = (*(stage.hbm[name] for name in (*COLUMNS, WORKING)), stage.hbm_bytes, stage.host_bytes)
        times = (stage.forward_s, stage.backward_s, stage.head_s, stage.idle_s)
        rows.append((*map(unit.text, sizes), *(seconds(value, step_s) for value in times), str(stage.peak_chunks)))
    return [(span(first, last), *row) for first, last, row in runs_of(rows)]


def _host_note(memory: Memory, host_bytes: int) -> str:
    note = f"of {format_bytes(host_bytes)} per device"
    if not memory.host_optimizer:
        return note
    return f"{note}; parameters, moments and gradients take {format_bytes(memory.host_optimizer)}"
