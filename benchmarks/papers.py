"""Predicts what others published and writes the comparison into docs/validation.md.

    python benchmarks/papers.py                 print
    python benchmarks/papers.py --write         print, and write the block `papers` and docs/papers.svg

Three constants of the A100 and one of the H100 are calibrated on named cells; all others are held out. No jax needed;
takes a few seconds.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

from blocks import write_block
from calibration import (
    Calibration,
    Ordering,
    Row,
    calibrate,
    mean_error,
    orderings,
    other_calibrations,
    predictions,
)
from published import KERNEL, Cell, out_of_memory, published_cells
from systems import GPU, memory_bytes

from sppo_jax.report.draw.chart import Axis, Panel, Series, chart_svg

DOCS = Path(__file__).parents[1] / "docs"


def report(rates: Calibration, rows: list[Row]) -> str:
    """Writes the comparison as Markdown."""
    by_role = {role: [row for row in rows if row.cell.role == role] for role in ("judge", "calibrate", "list")}
    ordered = orderings(rows)
    blocks = [
        _verdict(by_role["judge"], ordered),
        _memory([row for row in rows if row.cell.unit == "GB"]),
        _constants(rates, [row.cell for row in rows]),
        *_table(by_role["judge"], "Judged cells"),
        *_table(by_role["calibrate"], "Calibration cells"),
        *_table(by_role["list"], "Other cells, with why they are doubtful", doubts=True),
        "**Who wins**",
        "\n".join(
            [
                "| group | published | lead over the next | predicted | |",
                "|---|---|---|---|---|",
                *(
                    f"| {order.group} | {order.published} | {order.margin:.1%} | {order.predicted} | {order.verdict} |"
                    for order in ordered
                ),
            ]
        ),
    ]
    return "\n\n".join(blocks)


_VERDICT = """\
Held out and judged: {count} throughput cells, mean absolute error **{mean:.1%}** (aim: at most 10%), worst
**{worst:+.1%}** ({name}; aim: within 25%). The winning setting is right in {right} of {groups} groups and wrong in
{wrong}; in {ties} the model picks the second where the first leads by less than 2%, the runs' own scatter."""

_CONSTANTS = """\
Calibrated for the A100 (and A800): attention efficiency {a100.attention_efficiency:.3f} ({kernel.name}:
{kernel.value} TFLOP/s, {kernel.source} {kernel.mark}); matmul efficiency {a100.matmul_efficiency:.3f} and
{overhead:.1f} ms a unit (the first two calibration cells below). The last is Megatron's, with its timers and
blocking sends, and is not carried over to this project's program; the efficiencies are (`sppo_jax/hardware.py`).
With the same two schedules of other rows of the table as calibration cells the A100's mean error would be {low:.1%}
to {high:.1%}. For the H100 one constant, attention efficiency {h100.attention_efficiency:.3f} (of the kernel under
ALST; ours is another, so it is not carried over).

What this cannot show: the model's terms were written with the tables in view, so it is a test of consistency over
systems, lengths and schedules with few constants, not a blind prediction. With one attention efficiency for all,
BurstEngine's cells come out low and SPPO's high: the first run one long kernel a GPU, the second 160 and more short
ones over a growing prefix."""


def _verdict(judged: list[Row], ordered: list[Ordering]) -> str:
    worst = max(judged, key=lambda row: abs(row.error))
    count = {verdict: sum(order.verdict == verdict for order in ordered) for verdict in ("right", "tie", "WRONG")}
    return _VERDICT.format(
        count=len(judged),
        mean=mean_error(judged),
        worst=worst.error,
        name=worst.cell.name,
        right=count["right"],
        groups=len(ordered),
        wrong=count["WRONG"],
        ties=count["tie"],
    )


_MEMORY = """\
Memory, of which every byte is counted and none fitted, though with the figures in view: {count} figures read off
Seq1F1B's plots, mean absolute error {mean:.1%}, worst {worst:+.1%} ({name}). Of {oom} setups that ran out of memory
{told} are predicted above {room:.0f} GB, of those that ran {false}."""


def _memory(rows: list[Row]) -> str:
    worst, room = max(rows, key=lambda row: abs(row.error)), GPU.hbm_bytes / 1e9
    lost = [memory_bytes(setup) / 1e9 > room for setup in out_of_memory()]
    return _MEMORY.format(
        count=len(rows),
        mean=mean_error(rows),
        worst=worst.error,
        name=worst.cell.name,
        oom=len(lost),
        told=sum(lost),
        room=room,
        false=sum(row.predicted > room for row in rows),
    )


def _constants(rates: Calibration, cells: list[Cell]) -> str:
    others, a100 = other_calibrations(cells), rates[GPU.name]
    return _CONSTANTS.format(
        a100=a100, h100=rates["h100"], kernel=KERNEL, overhead=a100.overhead_s * 1e3, low=min(others), high=max(others)
    )


def _table(rows: list[Row], title: str, *, doubts: bool = False) -> list[str]:
    tail = " why doubtful |" if doubts else " assumed |"
    lines = [f"| cell | source | mark | published | predicted | error |{tail}", "|---" * 7 + "|"]
    for row in rows:
        cell = row.cell
        lines.append(
            f"| {cell.name} | {cell.source} | {cell.mark} | {_figure(cell.value, cell.unit)} | "
            f"{_figure(row.predicted, cell.unit)} | {row.error:+.1%} | {cell.doubt} |"
        )
    return [f"**{title}**", "\n".join(lines)]


def _figure(value: float, unit: str) -> str:
    if unit == "tokens":
        return f"{value / 2**20:.2f}M tokens"
    text = f"{value:.0f}" if value >= 1000 else f"{value:.3g}" if unit == "ratio" else f"{value:.1f}"
    return text if unit == "ratio" else f"{text} {unit}"


def picture(rows: list[Row]) -> str:
    """Draws predictions against published figures: throughput a GPU, and memory."""
    speed = [row for row in rows if row.cell.unit in ("tokens/s", "tokens/GPU/s")]
    judged = [row for row in speed if row.cell.role == "judge"]
    others = {"calibration": "calibrate", "doubtful": "list"}
    groups = {name: [row for row in judged if row.cell.source.startswith(name)] for name in _SYSTEMS}
    groups |= {name: [row for row in speed if row.cell.role == role] for name, role in others.items()}
    memory = [row for row in rows if row.cell.unit == "GB"]
    by_model = {name: [row for row in memory if f" {name} " in row.cell.name] for name in ("2.7B", "7B", "13B", "30B")}
    return chart_svg(
        [
            _panel("Throughput, tokens a second a GPU", groups, lambda row: 1 / _gpus(row)),
            _panel("Memory of Seq1F1B's runs, GB a GPU", by_model, lambda row: 1.0),
        ],
        height=400,
    )


_SYSTEMS = ("Seq1F1B", "SPPO", "BurstEngine", "ALST")


def _gpus(row: Row) -> int:
    return row.cell.setup.num_devices if row.cell.unit == "tokens/s" else 1


def _panel(title: str, groups: dict[str, list[Row]], scale: Callable[[Row], float]) -> Panel:
    ends = [row.cell.value * scale(row) for rows in groups.values() for row in rows]
    low, high = min(ends) * 0.85, max(ends) * 1.2
    series = [Series(name="as published", x=(low, high), y=(low, high), color=6)]
    for color, (name, rows) in enumerate(groups.items()):
        published = [row.cell.value * scale(row) for row in rows]
        predicted = [row.predicted * scale(row) for row in rows]
        mark = {"calibration": "square", "doubtful": "cross"}.get(name, "ring")
        series.append(Series(name=name, x=published, y=predicted, color=color, line=False, mark=mark))
    return Panel(
        title=title,
        x=Axis(label="published", log=True, low=low, high=high),
        y=Axis(label="predicted", log=True, low=low, high=high),
        series=series,
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--write", action="store_true", help="write docs/papers.svg and the block of docs/validation.md"
    )
    args = parser.parse_args(arguments)
    cells = published_cells()
    rates = calibrate(cells)
    rows = predictions(cells, rates)
    text = report(rates, rows)
    print(text)
    if args.write:
        (DOCS / "papers.svg").write_text(picture(rows) + "\n", encoding="utf-8")
        write_block(DOCS / "validation.md", "papers", f"![Predicted against published](papers.svg)\n\n{text}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
