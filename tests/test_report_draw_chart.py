"""Charts: well-formed, every point at its place, round ticks, and refusals that name the axis."""

import math
import xml.etree.ElementTree as ElementTree

import pytest

from sppo_jax.report.draw.axis import Axis
from sppo_jax.report.draw.chart import (
    LEFT,
    PALETTE,
    RIGHT,
    TOP,
    Look,
    Marker,
    Panel,
    Series,
    chart_svg,
)

SVG = "{http://www.w3.org/2000/svg}"


def draw(*series, x=None, y=None, **sizes):
    panel = Panel(title="t <&>", x=x or Axis(label="x"), y=y or Axis(label="y"), series=series)
    return ElementTree.fromstring(chart_svg([panel], **sizes))


def texts(root):
    return [element.text for element in root.iter(f"{SVG}text")]


def test_points_lie_where_their_values_are():
    corners = Series(name="a", x=(0, 10), y=(0, 5), line=False, mark="circle")
    root = draw(corners, x=Axis(label="x", low=0, high=10), y=Axis(label="y", low=0, high=5), width=400, height=300)
    (first, last) = [(float(c.get("cx")), float(c.get("cy"))) for c in root.iter(f"{SVG}circle")][:2]
    assert first == (LEFT, 250) and last == (400 - RIGHT, TOP)


def test_logarithmic_axes_put_powers_at_equal_steps():
    root = draw(
        Series(name="", x=(16, 32, 64), y=(0.01, 1.0, 100.0), line=False, mark="circle"),
        x=Axis(label="N", log=True, whole=True),
        y=Axis(label="norm", log=True),
    )
    places = [(float(c.get("cx")), float(c.get("cy"))) for c in root.iter(f"{SVG}circle")]
    assert places[1][0] == pytest.approx((places[0][0] + places[2][0]) / 2, abs=0.1)
    assert places[1][1] == pytest.approx((places[0][1] + places[2][1]) / 2, abs=0.1)
    assert {"16", "32", "64", "0.01", "1", "100"} <= set(texts(root))


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 7.3), (-3, 4), (0.001, 0.0042), (0, 12345)])
def test_ticks_are_few_round_and_inside(low, high):
    root = draw(Series(name="", x=(low, high), y=(low, high)))
    ticks = [float(text) for text in texts(root) if text not in ("t <&>", "x", "y")]
    assert 6 <= len(ticks) <= 16
    margin = 0.05 * (high - low)
    assert all(low - margin <= tick <= high + margin for tick in ticks)


def test_legend_names_series_and_wraps():
    series = [
        Series(name=f"series number {i}", x=(0, 1), y=(0, i), color=i, mark="ring", dashed=True) for i in range(6)
    ]
    root = draw(*series, width=300, height=200)
    assert {f"series number {i}" for i in range(6)} <= set(texts(root))
    rows = {e.get("y") for e in root.iter(f"{SVG}text") if (e.text or "").startswith("series")}
    assert len(rows) > 1 and float(root.get("height")) >= 200 + 18 * len(rows)
    assert all(float(e.get("x")) < 300 for e in root.iter(f"{SVG}text"))


def test_panels_stand_side_by_side():
    panel = Panel(title="", x=Axis(label=""), y=Axis(label=""), series=[Series(name="", x=(0, 1), y=(0, 1))])
    root = ElementTree.fromstring(chart_svg([panel] * 3, width=100, height=90))
    assert (root.get("width"), root.get("height")) == ("300", "90")


def test_panels_stand_in_rows_below_each_other_with_one_legend_that_they_share():
    first, second = Series(name="a", x=(0, 1), y=(0, 1)), Series(name="b", x=(0, 1), y=(1, 0))
    alike = Panel(title="", x=Axis(label="x"), y=Axis(label="y"), series=[first, second])
    unnamed = Panel(title="", x=Axis(label="x"), y=Axis(label="y"), series=[Series(name="", x=(0, 1), y=(0, 1))])
    root = ElementTree.fromstring(chart_svg([alike, unnamed, alike], width=200, height=90, columns=2))
    assert [group.get("transform") for group in root.findall(f"{SVG}g")] == [
        "translate(0,0)",
        "translate(200,0)",
        "translate(0,90)",
    ]
    assert (texts(root).count("a"), texts(root).count("b")) == (1, 1)
    assert root.get("width") == "400" and 180 < float(root.get("height")) < 240
    other = Panel(title="", x=Axis(label="x"), y=Axis(label="y"), series=[second])
    root = ElementTree.fromstring(chart_svg([alike, other], width=200, height=90))
    assert (texts(root).count("a"), texts(root).count("b")) == (1, 2)


def test_a_lone_point_has_its_name_above_it_where_the_axis_has_no_label():
    alone = Series(name="ours\n1.2x", x=(1,), y=(5,), line=False, mark="square")
    root = draw(alone, x=Axis(label="", low=0, high=2), y=Axis(label="y", low=0, high=10))
    (mark,) = [e for e in root.iter(f"{SVG}rect") if e.get("height") == "6"]
    above = {e.text: float(e.get("y")) for e in root.iter(f"{SVG}text") if e.text in ("ours", "1.2x")}
    assert above["ours"] < above["1.2x"] < float(mark.get("y"))
    assert not {"0", "2"} <= {e.text for e in root.iter(f"{SVG}text") if float(e.get("y")) > 300}  # no ticks
    assert texts(draw(alone, x=Axis(label="x"))).count("ours\n1.2x") == 1  # in the legend


def test_a_marker_is_named_at_its_line_but_in_a_page_only_under_the_pointer():
    panel = Panel(
        title="",
        x=Axis(label="step"),
        y=Axis(label="y"),
        series=[Series(name="", x=(0, 10), y=(0, 1))],
        rules=[Marker(x=5, title="resumed")],
    )
    assert "resumed" in texts(ElementTree.fromstring(chart_svg([panel])))
    assert "resumed" not in texts(ElementTree.fromstring(chart_svg([panel], look=Look(hover=True))))


def test_a_line_has_all_points_and_its_colour():
    root = draw(Series(name="a", x=range(5), y=range(5), color=1))
    (line,) = root.iter(f"{SVG}polyline")
    assert len(line.get("points").split()) == 5 and line.get("stroke") == PALETTE[1]


@pytest.mark.parametrize(
    ("series", "axis", "words"),
    [
        (Series(name="", x=(), y=()), Axis(label="x"), "at least one point"),
        (Series(name="", x=(1.0,), y=(math.nan,)), Axis(label="x"), "the axis 'y' takes finite values, got others"),
        (
            Series(name="", x=(0.0, 1.0), y=(1, 2)),
            Axis(label="N", log=True),
            "the axis 'N' takes finite values above 0",
        ),
    ],
)
def test_bad_values_are_refused(series, axis, words):
    with pytest.raises(ValueError, match=words):
        draw(series, x=axis)


def test_a_page_chooses_the_colours_and_gets_what_hovering_needs():
    look = Look(paper="var(--card)", palette=("var(--a)",), hover=True)
    line = Series(name="", x=(0, 10), y=(0, 5), hint="step <1>", strength=0.5, width=3)
    area = Series(name="area", x=(0, 10), y=(3, 4), floor=(1, 2), line=False)
    zero = Series(name="", x=(0, 10), y=(0, 0), dashed=True)
    x = Axis(label="step", whole=True, low=0, high=10)
    rules = [Marker(x=5, title="resumed")]
    panel = Panel(title="", x=x, y=Axis(label="y", low=0, high=5), series=(line, area, zero), rules=rules)
    root = ElementTree.fromstring(chart_svg([panel], width=400, height=300, look=look))
    assert "white" not in ElementTree.tostring(root, "unicode")
    (plot,) = [group for group in root.iter(f"{SVG}g") if group.get("class") == "plot"]
    start, stop, low, high, kind = plot.get("data-x").split()
    assert (int(start), int(stop), float(low), float(high), kind) == (LEFT, 400 - RIGHT, 0, 10, "plain")
    named = [e.get("data-name") for e in root.iter(f"{SVG}polyline")]
    assert named == ["step <1>", None]
    (polygon,) = root.iter(f"{SVG}polygon")
    assert len(polygon.get("points").split()) == 4
    (rule,) = [e for e in root.iter(f"{SVG}line") if e.find(f"{SVG}title") is not None]
    assert float(rule.get("x1")) == (LEFT + 400 - RIGHT) / 2 and rule.find(f"{SVG}title").text == "resumed"
