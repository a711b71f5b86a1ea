"""The picture of a schedule: well-formed, to scale, every unit drawn."""

import xml.etree.ElementTree as ElementTree

import pytest

from sppo_jax.report.draw.timeline import COLORS, IDLE, timeline_svg
from sppo_jax.schedule.generators import make_table


def test_every_tick_of_every_stage_is_a_box_of_its_kind():
    table = make_table("seq1f1b", 3, 2, (1,) * 4, 1)
    root = ElementTree.fromstring(timeline_svg(table, lambda unit, tokens: {"F": 1.0, "B": 2.0, "H": 0.5}[unit.op]))
    boxes = [box for box in root.iter("{http://www.w3.org/2000/svg}rect") if box.get("height") == "30"]
    assert len(boxes) == 3 * len(table.ticks)
    count = {fill: sum(box.get("fill") == fill for box in boxes) for fill in (*sum(COLORS.values(), ()), IDLE)}
    assert [count[fill] for fill in COLORS["F"]] == [count[fill] for fill in COLORS["B"]] == [12, 12]
    assert count[IDLE] == sum(unit is None for tick in table.ticks for unit in tick.units) > 0
    # Starts differ by what the ticks before take: a forward is half as wide as a backward.
    starts = [float(box.get("x")) for box in boxes[: len(table.ticks)]] + [992.0]
    widths = {tick.op: end - start for tick, start, end in zip(table.ticks, starts[:-1], starts[1:], strict=True)}
    assert abs(widths["B"] / widths["F"] - 2) < 0.01


@pytest.mark.parametrize("num_chunks", [8, 100, 1000])
def test_however_narrow_each_kind_has_its_share_of_the_width(num_chunks):
    table = make_table("seq1f1b", 2, 2, (1,) * num_chunks, 1)
    seconds = {"F": 1.0, "B": 2.0, "H": 0.5}
    root = ElementTree.fromstring(timeline_svg(table, lambda unit, tokens: seconds[unit.op]))
    boxes = [box for box in root.iter("{http://www.w3.org/2000/svg}rect") if box.get("height") == "30"]
    widths = dict.fromkeys("FBH", 0.0)
    for box, following in zip(boxes, [*boxes[1:], None], strict=True):
        # A box ends where the next of its row begins.
        same_row = following is not None and following.get("y") == box.get("y")
        width = float(following.get("x")) - float(box.get("x")) if same_row else float(box.get("width"))
        for kind, fills in COLORS.items():
            widths[kind] += width * (box.get("fill") in fills)
    total = sum(widths.values())
    for kind, share in {"F": 2 / 7, "B": 4 / 7, "H": 1 / 7}.items():
        assert widths[kind] / total == pytest.approx(share, abs=0.03)


def test_a_pass_of_a_group_of_layers_is_one_box_where_its_ticks_are_small():
    table = make_table("breadth-first", 2, 1, (1,) * 40, 3)
    seconds = {"F": 1.0, "B": 2.0, "H": 0.0}
    small, wide = (
        ElementTree.fromstring(timeline_svg(table, lambda unit, tokens: seconds[unit.op], width=width))
        for width in (900, 20_000)
    )
    for root, labels in ((small, ["g0", "g1", "g2", "g2", "g1", "g0"]), (wide, [])):
        texts = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
        assert [text for text in texts if text.startswith("g") and text[1:].isdigit()] == 2 * labels
    titles = [box.find("{http://www.w3.org/2000/svg}title") for box in small.iter("{http://www.w3.org/2000/svg}rect")]
    passes = [title.text for title in titles if title is not None and "chunks 0-39" in title.text]
    assert len(passes) == 2 * 6
    assert passes[0] == "ticks 0-39, stage 0: forward, sequence 0, chunks 0-39, layers of group 0, 40 s"
