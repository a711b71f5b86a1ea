"""The results of the GPU benchmark as a picture: attention by queries, speed and MFU by length. No jax."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from bench.gpu_parts.aims import ceiling_flops_s
from bench.gpu_parts.results import Results
from sppo_jax.report.draw.axis import Axis
from sppo_jax.report.draw.chart import Panel, Series, chart_svg

_TOKENS = Axis(label="tokens of a sequence", log=True, whole=True)


def draw(results: Results) -> str:
    """Return the picture as SVG; empty where there is nothing to draw."""
    panels = [panel for panel in (_attention(results), _speed(results), _use(results)) if panel]
    return chart_svg(panels) if panels else ""


def _attention(results: Results) -> Panel | None:
    lines: dict[tuple[str, str], list[tuple[int, float]]] = defaultdict(list)
    for row in results.rows("attention"):
        if "way" in row:
            lines[row["what"], row["way"]].append((row["queries"], row["flops_s"] / 1e12))
    kinds = list(dict.fromkeys(what for what, _ in lines))
    series = [
        Series(
            name=what if way == "forward" else "",
            x=[x for x, _ in points],
            y=[y for _, y in points],
            color=kinds.index(what),
            dashed=way == "backward",
            mark="circle",
        )
        for (what, way), points in lines.items()
    ]
    ceiling = ceiling_flops_s(results)
    if ceiling and series:
        ends = [min(min(s.x) for s in series), max(max(s.x) for s in series)]
        series.append(Series(name="matmul ceiling", x=ends, y=[ceiling / 1e12] * 2, color=6))
    if not series:
        return None
    x = Axis(label="queries", log=True, whole=True)
    return Panel(title="Attention (dashed: backward)", x=x, y=Axis(label="TFLOP/s", low=0), series=series)


def _steps(results: Results, value: str) -> dict[str, list[tuple[int, float]]]:
    """Return points by name: ours as planned, and the peers'; those with fewer layers under names of their own."""
    found: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for row in [*results.rows("step"), *results.rows("peer")]:
        if row.get(value) and row.get("stash", "planned") == "planned" and "longest" not in row["case"]:
            who = row.get("framework", "this project")
            found[f"{who}, {row['num_layers']} layers"].append((row["length"], row[value]))
    return found


def _series(points: dict[str, list[tuple[int, float]]]) -> list[Series]:
    found: list[Series] = []
    for color, (name, pairs) in enumerate(points.items()):
        xs, ys = zip(*sorted(pairs), strict=True)
        found.append(Series(name=name, x=xs, y=ys, color=color, mark="circle"))
    return found


def _panel(title: str, axis: Axis, points: dict[str, list[tuple[int, Any]]]) -> Panel | None:
    return Panel(title=title, x=_TOKENS, y=axis, series=_series(points)) if points else None


def _speed(results: Results) -> Panel | None:
    return _panel("Training", Axis(label="tokens/s", log=True, whole=True), _steps(results, "tokens_per_s"))


def _use(results: Results) -> Panel | None:
    return _panel("Causal MFU", Axis(label="share of the peak", low=0, percent=True), _steps(results, "mfu"))
