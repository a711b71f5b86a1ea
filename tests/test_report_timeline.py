"""The picture of a schedule: well-formed, to scale, every unit drawn."""

import xml.etree.ElementTree as ElementTree

from sppo_jax.report.timeline import COLORS, IDLE, timeline_svg
from sppo_jax.schedule.registry import make_table


def test_every_tick_of_every_stage_is_a_box_of_its_kind():
    table = make_table("seq1f1b", 3, 2, (1,) * 4, 1)
    root = ElementTree.fromstring(timeline_svg(table, lambda unit, tokens: {"F": 1.0, "B": 2.0, "H": 0.5}[unit.kind]))
    boxes = [box for box in root.iter("{http://www.w3.org/2000/svg}rect") if box.get("height") == "30"]
    assert len(boxes) == 3 * len(table.ticks)
    count = {fill: sum(box.get("fill") == fill for box in boxes) for fill in (*sum(COLORS.values(), ()), IDLE)}
    assert [count[fill] for fill in COLORS["F"]] == [count[fill] for fill in COLORS["B"]] == [12, 12]
    assert count[IDLE] == sum(unit is None for tick in table.ticks for unit in tick.units) > 0
    # Starts differ by what the ticks before take: a forward is half as wide as a backward.
    starts = [float(box.get("x")) for box in boxes[: len(table.ticks)]] + [992.0]
    widths = {tick.kind: end - start for tick, start, end in zip(table.ticks, starts[:-1], starts[1:], strict=True)}
    assert abs(widths["B"] / widths["F"] - 2) < 0.01
