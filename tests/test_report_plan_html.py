"""The page: well-formed, self-contained, and showing what the figures say."""

import re
import xml.etree.ElementTree as ElementTree
from html import escape
from html.parser import HTMLParser

import pytest
from report_cases import MODEL, small_figures, too_large
from test_report_plan_figures import CASES
from test_report_plan_text import FIGURES

from sppo_jax.report.draw.timeline import whole_step
from sppo_jax.report.plan.html import plan_html
from sppo_jax.report.plan.memory_curve import memory_svg
from sppo_jax.report.plan.occupancy import occupancy

SVG = "{http://www.w3.org/2000/svg}"
VOID = {"meta", "br"}


class _Nesting(HTMLParser):
    """Checks that every tag is closed in its order."""

    def __init__(self):
        super().__init__()
        self.open, self.words = [], []

    def handle_starttag(self, tag, attrs):
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


@pytest.mark.parametrize("make", FIGURES.values(), ids=FIGURES)
def test_the_page_is_well_formed_and_needs_nothing_else(make):
    page = plan_html(make())
    parser = _Nesting()
    parser.feed(page)
    assert parser.open == []
    assert "<script" not in page and not re.search(r"(src|href)\s*=", page) and "url(" not in page
    assert not re.search(r"https?://(?!www\.w3\.org)", page)
    pictures = re.findall(r"<svg.*?</svg>", page, re.S)
    assert len(pictures) >= 2
    for picture in pictures:
        root = ElementTree.fromstring(picture)
        for box in root.iter(f"{SVG}rect"):
            assert float(box.get("x", 0)) + float(box.get("width")) <= float(root.get("width")) + 0.01
    for gone in ("nan", "inf ", "None"):
        assert gone not in " ".join(parser.words)


def test_the_answer_comes_first():
    page, other = plan_html(small_figures()), plan_html(too_large())
    assert page.index("<b>fits</b>") < page.index("<svg")
    assert other.index("<b>does not fit</b>") < other.index("<svg")
    assert escape(too_large().found.problem) in other


def test_a_long_step_is_drawn_to_scale_and_closer():
    figures = small_figures(sequence={"length": 2**20, "chunks": 256})
    page = plan_html(figures)
    assert len(re.findall(r"<svg", page)) >= 4
    assert "the whole step, to scale" in page and "the pipeline fills" in page and "the pipeline drains" in page
    whole = ElementTree.fromstring(re.search(r"<svg.*?</svg>", page, re.S).group())
    boxes = [box for box in whole.iter(f"{SVG}rect") if box.get("height") == "30"]
    # Boxes of a row fill it from the first to the last, without holes.
    rows = {}
    for box in boxes:
        rows.setdefault(box.get("y"), []).append((float(box.get("x")), float(box.get("width"))))
    assert len(rows) == 4
    for row in rows.values():
        assert row[0][0] == 64 and sum(row[-1]) == pytest.approx(1152, abs=1.1)
        for (start, width), (following, _) in zip(row, row[1:], strict=False):
            assert -1.1 < following - start - width < 0.7
    assert len(page) < 2_000_000


def test_copies_are_drawn_only_where_there_are_any():
    assert "copy to the host" in plan_html(small_figures())
    assert "copy to the host" not in plan_html(small_figures(stash={"inputs": "keep", "attention": "keep"}))


def test_the_memory_curve_reaches_what_is_in_use():
    figures = small_figures()
    memory = figures.found.memory
    curve = occupancy(figures.table, memory, figures.stashed, 0, figures.plan.stash.kv)
    svg = memory_svg(
        curve,
        whole_step(figures.simulation.tick_s, 1000),
        allocated=memory.hbm_bytes,
        capacity=2 * memory.hbm_bytes,
        host_allocated=memory.host,
        host_capacity=1000 * memory.host,
    )
    assert "capacity" in svg and "500 times what is shown" in svg
    paths = [path.get("d") for path in ElementTree.fromstring(svg).iter(f"{SVG}path") if "z" in path.get("d")]
    assert len(paths) == 5
    tops = [min(float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", path)) for path in paths]
    # 150 pixels are the capacity: the top of the highest layer is the most in use at once.
    most = max(map(sum, zip(curve.kv, curve.kv_grad, curve.stash, strict=True))) + curve.fixed
    assert 30 + 150 - tops[3] == pytest.approx(150 * most / (2 * memory.hbm_bytes), abs=0.2)
    assert tops[:4] == sorted(tops[:4], reverse=True)


def test_cells_name_what_runs_in_them():
    # A large vocabulary makes a head that is long enough to be drawn.
    page = plan_html(small_figures(**CASES["interleaved"], model={**MODEL, "vocab_size": 2**17}))
    titles = re.findall(r"<title>tick 0, stage 0: (.*?)</title>", page)
    assert titles and titles[0].startswith("forward, sequence 0, chunk 0, layers of group 0, ")
    assert "layers of group 1, " in page and "head and loss, all stages, sequence 0, chunk 0, " in page
