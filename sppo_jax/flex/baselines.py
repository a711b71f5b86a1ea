"""What flexible groups are compared with: the same documents on the same rows and members, placed in other ways.

* static: every document alone on as many members as the longest needs; no packing, so it takes more rows than a window.
* packed: the packed rows, without groups: every document over all members.
* per_batch: the best single degree of the window, packed; all members where no smaller degree holds every document.
* flex: `plan_cells`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sppo_jax.flex.cells import place, plan_cells, today
from sppo_jax.flex.placement import Pieces, Placement
from sppo_jax.flex.shape import Shape


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """One way to place the documents of a window.

    Args:
        name: "static", "packed", "per_batch" or "flex".
        windows: the placements, one for each window that is needed.
        rows: rows that hold documents or lie before one that does.
        cost: the predicted cost of all of them. A last window that is not full counts by its share of the rows, as if
            the next documents filled it; the others count whole.
    """

    name: str
    windows: tuple[Placement, ...]
    rows: int
    cost: int


def baselines(pieces: Pieces, shape: Shape) -> dict[str, Baseline]:
    """Returns all four ways by name."""
    found = {
        "packed": today(pieces, shape),
        "per_batch": per_batch(pieces, shape),
        "flex": plan_cells(pieces, shape),
    }
    return {"static": static(pieces, shape)} | {
        name: Baseline(name=name, windows=(placement,), rows=shape.rows, cost=placement.cost)
        for name, placement in found.items()
    }


def per_batch(pieces: Pieces, shape: Shape) -> Placement:
    """Returns the fastest placement in which all documents have one degree and all fit into the window.

    A document of fewer tokens than the degree has the largest degree that its tokens fill.
    """
    best = today(pieces, shape)
    for level in range(shape.levels):
        degree = 2**level
        most = 1 << (np.frexp(pieces.size.astype(np.float64))[1].astype(np.int64) - 1)
        found = place(pieces, shape, np.minimum(degree, most), largest=1, stream=False)
        if found is not None and found.cost < best.cost:
            best = found
    return best


def static(pieces: Pieces, shape: Shape) -> Baseline:
    """Returns every document alone in a block of as many members as the longest document needs.

    A block holds one document and padding. If all members are needed, a document begins a chunk and takes as many
    chunks as it needs. Documents are dealt longest first; `rows` may exceed the window's.
    """
    by_size = np.argsort(-pieces.size, kind="stable")
    longest, most = int(pieces.size.max(initial=1)), int(shape.slots.max())
    degree = next((2**level for level in range(shape.levels) if longest <= 2**level * most), shape.members)
    if degree == shape.members:
        places = _alone_in_chunks(pieces.size[by_size].tolist(), shape)
    else:
        places = _alone_in_blocks(pieces.size[by_size].tolist(), degree, shape)
    found = np.array(places, np.int64).reshape(-1, 3)  # place of the row, counted over windows; chunk; first member
    rows = int(found[:, 0].max(initial=0)) + 1
    windows = []
    for number in range(-(-rows // shape.rows)):
        inside = found[:, 0] // shape.rows == number
        windows.append(_window(pieces, by_size[inside], found[inside], degree, shape))
    share = rows - (len(windows) - 1) * shape.rows
    cost = sum(window.cost for window in windows[:-1]) + windows[-1].cost * share // shape.rows
    return Baseline(name="static", windows=tuple(windows), rows=rows, cost=cost)


def _alone_in_chunks(sizes: list[int], shape: Shape) -> list[tuple[int, int, int]]:
    starts, found, row, chunk = shape.starts.tolist(), [], 0, 0
    for size in sizes:
        if starts[-1] - starts[chunk] < size:
            row, chunk = row + 1, 0
        found.append((row, chunk, 0))
        chunk = next(later for later, start in enumerate(starts) if start - starts[chunk] >= size)
        if chunk == shape.num_chunks:
            row, chunk = row + 1, 0
    return found


def _alone_in_blocks(sizes: list[int], degree: int, shape: Shape) -> list[tuple[int, int, int]]:
    blocks, found, at = shape.members // degree, [], 0
    per_row = blocks * shape.num_chunks
    slots = shape.slots.tolist()
    for size in sizes:
        while slots[at % per_row // blocks] * degree < size:  # a chunk that is shorter than the others
            at += 1
        found.append((at // per_row, at % per_row // blocks, at % blocks * degree))
        at += 1
    return found


def _window(pieces: Pieces, which: np.ndarray, places: np.ndarray, degree: int, shape: Shape) -> Placement:
    own = Pieces(pieces.row[which], pieces.begin[which], pieces.size[which])
    row = np.array([shape.row_of(at) for at in (places[:, 0] % shape.rows).tolist()], np.int64)
    stream = degree == shape.members
    by_place = np.lexsort((places[:, 2], places[:, 1], row))
    order = np.empty(len(which), np.int64)
    order[by_place] = np.arange(len(which)) - np.searchsorted(row[by_place], row[by_place])
    return Placement(
        shape=shape,
        pieces=own,
        row=row,
        chunk=places[:, 1],
        degree=np.full(len(which), degree),
        member=places[:, 2],
        offset=np.zeros(len(which), np.int64),
        begin=shape.starts[places[:, 1]] if stream else np.full(len(which), -1),
        order=order,
        winner="static",
    )
