"""What teams gain on clusters of one and of several hosts, and a picture of one batch's teams, for docs/flexsp.md.

    python -m studies.groups             print
    python -m studies.groups --write     print, and write the block `groups` and docs/flexsp.svg

Everything is simulated by the planner; no device runs. No jax needed; takes a few seconds.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.blocks import write_block
from bench.figures import write
from sppo_jax.config import config_from_dict
from sppo_jax.data.rows.flex import window_pieces
from sppo_jax.data.rows.lengths import rows_of_corpus
from sppo_jax.flex.lengths import corpora
from sppo_jax.flex.placement import Placement
from sppo_jax.flex.rows import documents_of
from sppo_jax.report.draw.axis import Axis
from sppo_jax.report.draw.chart import Marker, Panel, Series
from sppo_jax.report.flex.figures import TeamFigures, figures_of_teams
from sppo_jax.search.make import make_plan

DOCS = Path(__file__).parents[1] / "docs"
WINDOWS = 2


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A cluster and documents.

    Args:
        cluster: of which one chunk is on all devices.
        seq: its devices.
        corpus: the document lengths.
        fill: share of the rows' places that documents take.
    """

    cluster: str
    seq: int
    corpus: str
    fill: float


CLUSTERS = (("h100:1x8", 8), ("a100-80g:4x8", 32), ("a100-80g:8x8", 64))
SETTINGS = tuple(
    Setting(cluster=cluster, seq=seq, corpus=corpus, fill=fill)
    for cluster, seq in CLUSTERS
    for corpus, fill in (("wikipedia", 1.0), ("wikipedia", 0.98), ("github-assumed", 0.98))
)
# The gain depends on the padding of rows, and on the rows of a step.
FILLS, ROWS = (1.0, 0.998, 0.98), (4, 16, 32)
# The batch of the picture: one small step, so that each document can be seen.
PICTURE = Setting(cluster="a100-80g:2x4", seq=8, corpus="wikipedia", fill=0.9)
COLORS = {1: 0, 2: 2, 4: 1, 8: 6}


def simulated(
    setting: Setting, *, length: int = 131072, rows: int = 8, chunks: int | str = "auto", windows: int = WINDOWS
) -> TeamFigures:
    """Plans Llama-3-8B for a setting and places the documents of the first windows.

    Args:
        setting: the cluster and the documents.
        length: tokens of a sequence.
        rows: sequences of a step.
        chunks: of a sequence.
        windows: steps whose documents are placed.
    """
    config = config_from_dict(
        {
            "model": {"preset": "llama3-8b"},
            "mesh": {"data": 1, "pipe": 1, "seq": setting.seq},
            "sequence": {"length": length, "per_step": rows, "chunks": chunks, "balance": "equal"},
            "hardware": {"cluster": setting.cluster},
            "train": {"steps": 1},
        }
    )
    plan = make_plan(config)
    quantiles, tokens = corpora()[setting.corpus], 2 * windows * rows * length
    packed = rows_of_corpus(quantiles, tokens=tokens, length=length, pack="whole", seed=0, fill=setting.fill)
    pieces = [window_pieces(packed, number, rows) for number in range(windows)]
    return figures_of_teams(config, plan, pieces, f"corpus {setting.corpus}")


def picture(found: TeamFigures) -> list[Panel]:
    """Returns a panel for each row of a window: members to the right, slots upwards, a box for each document."""
    placement = found.first
    return [_row_panel(placement, row) for row in range(placement.shape.rows)]


def _row_panel(placement: Placement, row: int) -> Panel:
    shape = placement.shape
    members, slots = shape.members, int(shape.slots.max())
    # Names first and in one order, so that all panels share one legend; these lines have no length.
    series = [Series(name=_kind(degree, members), x=(0, 0), y=(0, 0), color=color) for degree, color in COLORS.items()]
    for left, right, low, high, degree in _boxes(placement, row):
        x, y = (left, right, right, left, left), (low, low, high, high, low)
        series.append(Series(name="", x=x, y=y, color=COLORS[degree], width=1.2))
    rules = [Marker(x=chunk * members, title=f"chunk {chunk}") for chunk in range(1, shape.num_chunks)]
    levels = [_level(placement, row, chunk) for chunk in range(shape.num_chunks)]
    return Panel(
        title=f"row {row}: {', '.join(levels)}",
        x=Axis(label=f"chunk x {members} + member", low=0, high=members * shape.num_chunks),
        y=Axis(label="slots of a member", low=0, high=round(1.1 * slots)),
        series=series,
        rules=rules,
    )


def _kind(degree: int, members: int) -> str:
    if degree == members:
        return "stream: all members"
    return f"{degree} member{'s' if degree > 1 else ''}"


def _level(placement: Placement, row: int, chunk: int) -> str:
    cells = placement.cells
    return "stream" if cells.far[row, chunk] else f"level {cells.level[row, chunk]}"


def _boxes(placement: Placement, row: int) -> list[tuple[float, float, float, float, int]]:
    """Returns left, right, low and high of each document of a row, or of its part in a chunk, and its members."""
    shape, members = placement.shape, placement.shape.members
    height = np.zeros((shape.num_chunks, members))
    found: list[tuple[float, float, float, float, int]] = []
    for piece in documents_of(placement, row).tolist():
        if placement.begin[piece] >= 0:
            continue
        chunk, degree = int(placement.chunk[piece]), int(placement.degree[piece])
        first = int(placement.member[piece])
        block = height[chunk, first : first + degree]
        low = float(block.mean())  # equal but for the tokens by which members of a block differ
        block[:] = low + float(placement.pieces.size[piece]) / degree
        left = float(chunk * members + first)
        # The last token of a document may lie on any member of the block, so a mean may exceed the chunk by a slot.
        found.append((left, left + degree, low, min(float(block[0]), float(shape.slots[chunk])), degree))
    parts = placement.segments
    for at in np.flatnonzero(placement.row[parts.piece] == row).tolist():
        chunk = int(parts.chunk[at])
        low = (int(parts.first[at]) - int(shape.starts[chunk])) / members
        high = low + int(parts.tokens[at]) / members
        found.append((float(chunk * members), float((chunk + 1) * members), low, high, members))
    return found


HEADER = (
    "| cluster, `seq` | split | documents | full | exchange, share of a step | gain over packed | over one degree a "
    "batch | bytes, of packed |\n|---|---|---|---|---|---|---|---|"
)


def row_of(setting: Setting, found: TeamFigures) -> str:
    """Returns a row of the table."""
    return (
        f"| {setting.cluster}, {setting.seq} | {found.plan.sequence_kind} | {setting.corpus} | {found.fill:.1%} | "
        f"{found.exchange_share:.1%} | {found.gain['packed']:.2f} | {found.gain['per_batch']:.2f} | "
        f"{found.sent.flex / found.sent.today:.2f} |"
    )


def report() -> str:
    """Returns the block."""
    lines = [HEADER, *(row_of(setting, simulated(setting)) for setting in SETTINGS)]
    lines += [
        "",
        f"Gain over packed by the fill of rows, and by the rows of a step; {CLUSTERS[1][0]}, {max(ROWS)} rows:",
        "",
    ]
    lines += ["| full | " + " | ".join(f"{rows} rows a step" for rows in ROWS) + " |", "|---|" + "---|" * len(ROWS)]
    cluster, seq = CLUSTERS[1]
    for fill in FILLS:
        setting = Setting(cluster=cluster, seq=seq, corpus="wikipedia", fill=fill)
        gains = [simulated(setting, rows=rows, windows=max(ROWS) // rows).gain["packed"] for rows in ROWS]
        lines.append(f"| {fill:.1%} | " + " | ".join(f"{gain:.2f}" for gain in gains) + " |")
    return "\n".join(lines)


def pictured() -> list[Panel]:
    """Returns the panels of docs/flexsp.svg."""
    return picture(simulated(PICTURE, length=16384, rows=4, chunks=2))


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table, and writes the block and the picture if asked."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true", help="write docs/flexsp.svg and the block of docs/flexsp.md")
    args = parser.parse_args(arguments)
    text = report()
    print(text)
    if args.write:
        write_block(DOCS / "flexsp.md", "groups", text)
        write(DOCS / "flexsp.svg", pictured())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
