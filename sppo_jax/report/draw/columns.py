"""Aligned columns and wrapped paragraphs of plain text."""

import textwrap
from collections.abc import Sequence

WIDTH = 100


def aligned(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: Sequence[int] = (), wrap: int = -1) -> str:
    """Returns rows under a header, with two spaces between columns and numbers aligned to the right.

    Args:
        header: titles of the columns.
        rows: rows of as many texts.
        left: columns that are aligned to the left.
        wrap: the column that is broken into lines if a row is longer than WIDTH; -1: none.
    """
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    over = sum(widths) + 2 * (len(widths) - 1) - (WIDTH - 2)
    if wrap >= 0 and over > 0:
        widths[wrap] = max(12, widths[wrap] - over)
    lines = []
    for row in (header, *rows):
        cells = [textwrap.wrap(text, widths[wrap]) if index == wrap else [text] for index, text in enumerate(row)]
        for number in range(max(map(len, cells))):
            texts = [cell[number] if number < len(cell) else "" for cell in cells]
            padded = (
                text.ljust(width) if index in left else text.rjust(width)
                for index, (text, width) in enumerate(zip(texts, widths, strict=True))
            )
            lines.append(("  " + "  ".join(padded)).rstrip())
    return "\n".join(lines)


def paragraph(label: str, text: str, *, width: int = 16) -> str:
    """Returns a label and a text beside the label, wrapped to WIDTH and aligned with its first word."""
    margin = " " * (width + 2)
    return textwrap.fill(
        text,
        WIDTH,
        initial_indent=f"  {label}".ljust(width + 2),
        subsequent_indent=margin,
        break_long_words=False,
        break_on_hyphens=False,
    )


def bar(share: float, length: int = 40) -> str:
    """Returns a bar of `#` for a share of 0..1; a larger one ends in `>`."""
    if share > 1:
        return "#" * (length - 1) + ">"
    return "#" * round(max(0.0, share) * length)
