"""The picture bench/results/records.svg: the longest sequence by number of GPUs, compiled for ours and run for others.

Ours are the compiled cases of records.md. Theirs are the published figures of `record_cells.py`. Figures on TPUs
and figures of models without a compiled case are left out.
"""

import json
from dataclasses import dataclass

from sppo_jax.hardware import parse_cluster
from sppo_jax.plan.plan import Plan
from sppo_jax.report.draw.axis import Axis
from sppo_jax.report.draw.chart import Panel, Series
from studies.record_cells import LENGTHS, THROUGHPUT
from studies.records_compiled import AIMS, RESULTS

MILLION = 1e6
# The models of each panel by preset, and the colour of each.
_PANELS = {
    "Llama-3-8B": {"llama3-8b": 0},
    "Other models": {"gpt-7b": 1, "qwen3-32b": 2, "llama3-70b": 3},
}
_NAMES = {"llama3-8b": "Llama-3-8B", "gpt-7b": "GPT-7B", "qwen3-32b": "Qwen3-32B", "llama3-70b": "Llama-3-70B"}
# Two 7B models with 32 key-value heads.
_LIKE = {"llama2-7b": "gpt-7b"}
# A length that a system trained at, and not its limit.
_TRAINED = [record for record in THROUGHPUT if record.cell == "7B, 4M, 64 A800"]
_OURS = "compiled here"
_MARKS = {_OURS: "circle", "ALST": "cross", "FPDT": "ring", "UPipe": "square", "SPPO": "ring", "BurstEngine": "square"}


@dataclass(frozen=True)
class Point:
    """One figure: a model by its preset, who reached it, on how many GPUs, and how many tokens."""

    preset: str
    system: str
    num_gpus: int
    tokens: float


def points() -> list[Point]:
    """Returns ours, then theirs."""
    plans = {row["name"]: row["plan"] for row in json.loads(RESULTS.read_text(encoding="utf-8"))["rows"]}
    found = []
    for aim in AIMS:
        plan = Plan.from_dict(plans[aim.case])
        found.append(Point(aim.case.split(" ")[0], _OURS, plan.mesh.num_devices, plan.sequence_length))
    for record in (*LENGTHS, *_TRAINED):
        cluster, preset = parse_cluster(record.cluster), record.model["preset"]
        preset = _LIKE.get(preset, preset)
        if cluster.device.platform == "gpu" and preset in _NAMES:
            found.append(Point(preset, record.theirs, cluster.num_devices, record.length or record.figure))
    return found


def picture() -> list[Panel]:
    """Returns one panel for the 8B model and one for all others."""
    found = points()
    return [_panel(title, colors, found) for title, colors in _PANELS.items()]


def _panel(title: str, colors: dict[str, int], found: list[Point]) -> Panel:
    lines: dict[tuple[str, str], list[Point]] = {}
    for point in found:
        if point.preset in colors:
            lines.setdefault((point.preset, point.system), []).append(point)
    return Panel(
        title=title,
        x=Axis(label="GPUs", log=True, whole=True, low=0.9, high=150),
        y=Axis(label="tokens of a sequence, millions", log=True, low=0.4, high=30),
        series=[
            Series(
                name=", ".join(
                    ([_NAMES[preset]] if len(colors) > 1 else []) + [system if system == _OURS else f"{system}, run"]
                ),
                x=[point.num_gpus for point in of_line],
                y=[point.tokens / MILLION for point in of_line],
                color=colors[preset] if system == _OURS or len(colors) > 1 else 1,
                line=False,
                mark=_MARKS.get(system, "cross"),
            )
            for (preset, system), of_line in lines.items()
        ],
    )
