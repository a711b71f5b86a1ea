"""Pictures of points: all labels are texts, equal data draw equal bytes, and the digest is of the data."""

import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest

from bench import figures
from sppo_jax.report.draw.axis import Axis
from sppo_jax.report.draw.chart import Marker, Panel, Series

PANEL = Panel(
    title="first <line>",
    x=Axis(label="N, chunks", log=True, whole=True),
    y=Axis(label="waiting", log=True, percent=True),
    series=[
        Series(name="formula", x=(16, 32), y=(0.01, 0.1)),
        Series(name="", x=(16, 32), y=(0.01, 0.09), line=False, mark="circle"),
        Series(name="alone", x=(16,), y=(0.05,), line=False, mark="square"),
    ],
    rules=[Marker(x=20, title="saved")],
)


def test_a_picture_has_its_labels_ticks_and_digest_and_is_drawn_the_same_twice():
    svg = figures.draw([PANEL])
    texts = [element.text for element in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]
    assert {"first <line>", "N, chunks", "waiting", "saved"} <= set(texts)
    assert {"16", "32", "1%", "2%", "5%", "10%"} <= set(texts)
    assert (texts.count("formula"), texts.count("alone")) == (1, 1)
    assert figures.stored_digest(svg) == figures.digest([PANEL])
    assert figures.draw([PANEL]) == svg


@pytest.mark.parametrize(
    "change", [{"title": "t"}, {"series": PANEL.series[:2]}, {"rules": ()}, {"x": replace(PANEL.x, label="n")}]
)
def test_other_data_have_another_digest(change):
    assert figures.digest([replace(PANEL, **change)]) != figures.digest([PANEL])


def test_the_digest_counts_six_digits_and_a_picture_without_it_has_none():
    moved = [replace(series, y=[value * (1 + 1e-9) for value in series.y]) for series in PANEL.series]
    assert figures.digest([replace(PANEL, series=moved)]) == figures.digest([PANEL])
    moved = [replace(series, y=[value * 1.001 for value in series.y]) for series in PANEL.series]
    assert figures.digest([replace(PANEL, series=moved)]) != figures.digest([PANEL])
    assert figures.stored_digest("<svg/>") == ""


def test_points_outside_an_axis_are_refused():
    panel = replace(PANEL, y=replace(PANEL.y, low=0.02))
    with pytest.raises(ValueError, match="the axis 'waiting' takes values from 0.02 to .*, got others"):
        figures.draw([panel])


def test_panels_whose_axes_have_the_same_values_are_square():
    axis = Axis(label="s", low=0.0, high=0.2)
    square = replace(PANEL, x=replace(axis, high=40.0), y=replace(axis, high=40.0), rules=())
    for panels, width, height in (([square], 450, 460), ([PANEL], 600, 336), ([square, PANEL], 900, 336)):
        root = ElementTree.fromstring(figures.draw(panels))
        assert int(root.get("width")) == width and height < int(root.get("height")) < height + 60
