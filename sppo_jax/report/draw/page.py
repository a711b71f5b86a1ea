"""What all pages share: light and dark styles, tables, cards. A page is one file that needs no other file."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from sppo_jax.report.draw.chart import Look

_STYLE = """
:root { color-scheme: light dark; --paper: #fff; --card: #fff; --ink: #1c1c1c; --soft: #555; --pale: #6b7280;
  --grid: #e8eaed; --line: #d0d4d9; --bar: #4878a8; --good: #e4f2e4; --good-line: #3f8440; --bad: #fbe5e7;
  --bad-line: #b00020; --warn: #fdf0d5; --warn-line: #b7791f; --c0: #0072b2; --c1: #d55e00; --c2: #009e73;
  --c3: #c2569b; --c4: #d48f00; --c5: #56b4e9; --c6: #777; }
@media (prefers-color-scheme: dark) { :root { --paper: #12161b; --card: #191e25; --ink: #e6e9ee; --soft: #a9b2bd;
  --pale: #98a2ae; --grid: #2a313a; --line: #39424d; --bar: #5b92c9; --good: #16301b; --good-line: #4f9a55;
  --bad: #3b171c; --bad-line: #e2606f; --warn: #35290f; --warn-line: #d09a3a; --c0: #4aa8e8; --c1: #ff8a4c;
  --c2: #35c79a; --c3: #e58fc4; --c4: #f0b429; --c5: #8fd0f5; --c6: #8b95a1; }
  .wide svg { filter: invert(.91) hue-rotate(180deg); } }
body { font: 15px/1.5 Helvetica, Arial, sans-serif; color: var(--ink); background: var(--paper); max-width: 1160px;
  margin: 24px auto; padding: 0 16px; }
h1 { font-size: 22px; margin: 0 0 4px; overflow-wrap: anywhere; } h2 { font-size: 17px; margin: 32px 0 8px; }
p { margin: 6px 0; max-width: 900px; } small, .note { color: var(--soft); font-size: 13px; }
.answer { display: flex; flex-wrap: wrap; gap: 10px; margin: 16px 0; }
.answer div { border: 1px solid var(--line); border-radius: 6px; padding: 8px 12px; min-width: 100px; flex: 0 1 auto;
  background: var(--card); }
.answer b { display: block; font-size: 20px; } .answer span { color: var(--soft); font-size: 13px; }
.answer .fits { background: var(--good); border-color: var(--good-line); }
.answer .not { background: var(--bad); border-color: var(--bad-line); }
.answer .warn { background: var(--warn); border-color: var(--warn-line); }
.wide { overflow-x: auto; margin: 8px 0; } .wide svg { display: block; min-width: 760px; width: 100%; height: auto; }
table { border-collapse: collapse; font-size: 14px; } th { text-align: right; border-bottom: 2px solid var(--pale); }
th, td { padding: 4px 10px; vertical-align: top; } td { text-align: right; border-bottom: 1px solid var(--line); }
th, td.number { white-space: nowrap; font-variant-numeric: tabular-nums; }
th.text, td.text { text-align: left; } td.why { color: var(--soft); text-align: left; }
.bar { background: var(--bar); height: 11px; display: inline-block; }
"""
# Charts take their colours from the page.
PAGE_LOOK = Look(
    paper="var(--card)",
    grid="var(--grid)",
    ink="var(--ink)",
    pale="var(--pale)",
    palette=tuple(f"var(--c{index})" for index in range(7)),
    hover=True,
)


def page(title: str, body: Sequence[str], *, style: str = "", script: str = "") -> str:
    """Returns a whole page.

    Args:
        title: the title, as text.
        body: the body, as HTML.
        style: CSS rules besides the common rules.
        script: JavaScript; the page must be complete without the script.
    """
    return "\n".join(
        [
            "<!DOCTYPE html>",
            "<html lang='en'><head><meta charset='utf-8'>",
            "<meta name='viewport' content='width=device-width, initial-scale=1'>",
            f"<title>{escape(title)}</title><style>{_STYLE}{style}</style></head><body>",
            *body,
            *([f"<script>{script}</script>"] if script else []),
            "</body></html>\n",
        ]
    )


def cards(boxes: Sequence[tuple[str, str, str]]) -> list[str]:
    """Returns the cards at the head: a large figure, a text below, and how it looks: "fits", "not", "warn" or ""."""
    drawn = [f"<div class='{css}'><b>{escape(big)}</b><span>{escape(small)}</span></div>" for big, small, css in boxes]
    return ["<div class='answer'>", *drawn, "</div>"]


def table(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, text: Sequence[int] = (), raw: Sequence[int] = ()
) -> str:
    """Returns a table.

    Args:
        header: titles of the columns.
        rows: rows of as many texts.
        text: columns that are aligned to the left; the others are numbers.
        raw: columns that hold HTML, also aligned to the left.
    """
    classes = ["text" if index in (*text, *raw) else "number" for index in range(len(header))]
    head = "".join(f"<th class='{css}'>{escape(name)}</th>" for css, name in zip(classes, header, strict=True))
    lines = [f"<div class='wide'><table><tr>{head}</tr>"]
    for row in rows:
        cells = [cell if index in raw else escape(cell) for index, cell in enumerate(row)]
        lines.append(
            "<tr>"
            + "".join(f"<td class='{css}'>{cell}</td>" for css, cell in zip(classes, cells, strict=True))
            + "</tr>"
        )
    return "\n".join([*lines, "</table></div>"])


def bar(share: float) -> str:
    """Returns a bar, 300 pixels for a share of 1."""
    return f"<span class='bar' style='width:{max(1, round(min(share, 1.5) * 300))}px'></span>"
