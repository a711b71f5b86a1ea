"""Pictures drawn by matplotlib: all labels are texts, equal data draw equal bytes, and the digest is of the data."""

import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest

from bench import figures
from sppo_jax.report.draw.chart import Axis, Marker, Panel, Series

ROOT = Path(__file__).parents[1]
PANEL = Panel(
    title="first <line>\nsecond line",
    x=Axis(label="N, chunks", log=True, whole=True),
    y=Axis(label="waiting", log=True, percent=True),
    series=[
        Series(name="formula", x=(16, 32), y=(0.01, 0.1)),
        Series(name="", x=(16, 32), y=(0.01, 0.09), line=False, mark="circle"),
        Series(name="alone\n1.2x", x=(16,), y=(0.05,), line=False, mark="square"),
    ],
    rules=[Marker(x=20, title="saved")],
)


def test_a_picture_has_its_labels_ticks_and_digest_and_is_drawn_the_same_twice():
    svg = figures.draw([PANEL])
    texts = [element.text for element in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]
    assert {"first <line>", "second line", "N, chunks", "waiting", "saved", "alone", "1.2x"} <= set(texts)
    assert {"16", "32", "1%", "2%", "5%", "10%"} <= set(texts)
    assert texts.count("formula") == 1
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


def test_without_matplotlib_tables_are_made_and_pictures_are_refused():
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from bench import clock, figures, recall, resume, validation\nfrom studies import bubble, papers\n"
        "try: figures.draw([])\n"
        "except ModuleNotFoundError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "need matplotlib, which is not installed: pip install -e '.[dev]'" in done.stdout


@pytest.mark.parametrize(("names", "width", "columns"), [(["a"] * 5, 640, 5), (["x" * 40] * 3, 300, 1)])
def test_a_legend_is_one_row_if_it_fits(names, width, columns):
    assert figures._legend_columns(names, width) == columns
