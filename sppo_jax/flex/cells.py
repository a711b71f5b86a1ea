"""The planner of a window: candidates for the places of its documents, and the one with the least predicted step.

Candidates: the packed rows; every single degree; and for some alpha, for each document the least degree at which its
share of attention is at most alpha times that of a member of a mean cell. Documents that no block takes become stream.
All is integer arithmetic on lengths, so every process that plans a window makes the same placement.

Letters: n documents, K cells, R members.
"""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from math import isqrt

import numpy as np

from sppo_jax.flex.greedy import Dealt, StreamRows, deal
from sppo_jax.flex.placement import Pieces, Placement
from sppo_jax.flex.shape import Shape

ALPHAS = (Fraction(1, 2), Fraction(1), Fraction(3))
TODAY = "packed"
# More stream cells leave fewer places for groups, so that planning is repeated; after so many rounds it gives up.
_ROUNDS = 8


def plan_cells(pieces: Pieces, shape: Shape) -> Placement:
    """Places the documents of a window so that the predicted step is the shortest of all candidates.

    Args:
        pieces: the documents of the window's rows.
        shape: the window.

    Returns:
        The placement; the packed rows where no candidate is faster.
    """
    found = candidates(pieces, shape)
    costs = {name: placement.cost for name, placement in found.items()}
    winner = min(costs, key=lambda name: costs[name])  # of equal costs, the first: the packed rows
    return dataclasses.replace(found[winner], winner=winner, costs=costs)


def candidates(pieces: Pieces, shape: Shape) -> dict[str, Placement]:
    """Returns all placements that `plan_cells` compares, by name, the packed rows first.

    The alphas come twice: with any degree, and with none above the best single degree. Where a large group must reach
    over a slow link, its documents are cheaper as stream.
    """
    found, seen = {TODAY: today(pieces, shape)}, set()
    degrees = [2**level for level in range(shape.levels)]
    for degree in degrees:
        degree_n = _one_degree(pieces, shape, degree)
        _add(found, f"degree {degree}", place(pieces, shape, degree_n, largest=1))
        seen.add((1, degree_n.tobytes()))
    single = [degree for degree in degrees if f"degree {degree}" in found]
    best = min(single, key=lambda degree: found[f"degree {degree}"].cost, default=0)
    for most, words in ((shape.members // 2, ""), (best, f" up to degree {best}")):
        for alpha in ALPHAS if most else ():
            degree_n = _least_degrees(pieces, shape, alpha, most)
            if (most, degree_n.tobytes()) not in seen:
                _add(found, f"alpha {alpha}{words}", place(pieces, shape, degree_n, largest=most))
            seen.add((most, degree_n.tobytes()))
    return found


def _add(found: dict[str, Placement], name: str, placement: Placement | None) -> None:
    if placement is not None:
        found[name] = placement


def today(pieces: Pieces, shape: Shape) -> Placement:
    """Returns the placement that leaves every document where it lies."""
    n = len(pieces)
    order = np.arange(n) - np.searchsorted(pieces.row, pieces.row)
    zero = np.zeros(n, np.int64)
    return Placement(
        shape=shape,
        pieces=pieces,
        row=pieces.row,
        chunk=np.searchsorted(shape.starts, pieces.begin, side="right") - 1,
        degree=np.full(n, shape.members),
        member=zero,
        offset=zero,
        begin=pieces.begin,
        order=order,
        winner=TODAY,
    )


def _one_degree(pieces: Pieces, shape: Shape, degree: int) -> np.ndarray:
    """Returns one degree for every document, all members for those that do not fit: int64 [n]."""
    fits = pieces.size <= degree * int(shape.slots.max())
    return _at_most_size(np.where(fits, degree, shape.members), pieces.size, shape)


def _least_degrees(pieces: Pieces, shape: Shape, alpha: Fraction, most: int) -> np.ndarray:
    """Returns the least degree at which each document fits and has little attention a member: int64 [n].

    Little: s^2 / (2 g) <= alpha * (pairs of the window) / (cells * members). Documents that need more than `most`
    members become stream.
    """
    size_n, slots = pieces.size, int(shape.slots.max())
    total = int((size_n * (size_n + 1) // 2).sum())
    cells = shape.rows * shape.num_chunks * shape.members
    degrees = [2**level for level in range(most.bit_length())]
    limits = [min(g * slots, isqrt(2 * g * alpha.numerator * total // (alpha.denominator * cells))) for g in degrees]
    return _at_most_size(np.array([*degrees, shape.members])[np.searchsorted(limits, size_n)], size_n, shape)


def _at_most_size(degree_n: np.ndarray, size_n: np.ndarray, shape: Shape) -> np.ndarray:
    """Returns degrees that are no larger than the documents, where not stream: each member has a token of its own."""
    most = 1 << (np.frexp(size_n.astype(np.float64))[1].astype(np.int64) - 1)
    return np.where(degree_n == shape.members, degree_n, np.minimum(degree_n, most))


def place(pieces: Pieces, shape: Shape, degree_n: np.ndarray, *, largest: int, stream: bool = True) -> Placement | None:
    """Places documents at given degrees; those that no block takes become stream.

    Args:
        pieces: the documents.
        shape: the window.
        degree_n: wanted degree of each document; all members: stream.
        largest: largest degree that a document may take before it becomes stream; 1: none but its own.
        stream: whether to make stream cells for documents that fit nowhere; the placement fails otherwise.

    Returns:
        The placement; None if the window is too small for it.
    """
    by_size = np.argsort(-pieces.size, kind="stable")
    is_stream = degree_n == shape.members
    for repeat in range(_ROUNDS):
        rows, streamed = StreamRows.empty(shape.rows), by_size[is_stream[by_size]]
        begins = rows.put(pieces.size[streamed].tolist(), shape, extend=True)
        if begins is None:
            return None
        dealt_n = by_size[~is_stream[by_size]]
        dealt_n = dealt_n[np.argsort(-degree_n[dealt_n], kind="stable")]
        cells = _grouped_cells(rows, shape)
        dealt = deal(
            pieces.size[dealt_n],
            degree_n[dealt_n],
            shape.slots[cells[:, 1]],
            members=shape.members,
            penalty=_penalty(shape),
            largest=largest,
        )
        left = dealt_n[dealt.cell < 0]
        left = left[np.argsort(-pieces.size[left], kind="stable")]
        more = rows.put(pieces.size[left].tolist(), shape, extend=False)
        if more is not None:
            chosen = np.concatenate([streamed, left])
            return _write(pieces, shape, (chosen, [*begins, *more]), (dealt_n, dealt, cells))
        if not stream:
            return None
        is_stream[left] = True
        # More stream cells displace more documents: the longest of the others go along, more of them each time.
        is_stream[dealt_n[: repeat * len(left)]] = True
    return None


def _penalty(shape: Shape) -> np.ndarray:
    """Returns the cost of each level for one slot, in pairs: int64 [levels]."""
    forward, backward = shape.weights.forward, shape.weights.backward
    pair = max(1, forward.pair + backward.pair)
    return np.array([(f + b) // pair for f, b in zip(forward.sent, backward.sent, strict=True)], np.int64)


def _grouped_cells(rows: StreamRows, shape: Shape) -> np.ndarray:
    """Returns the cells that are not stream, (place of the row, chunk) each: int64 [K, 2]."""
    cells = [(at, chunk) for at, first in enumerate(rows.chunks) for chunk in range(first, shape.num_chunks)]
    return np.array(cells, np.int64).reshape(-1, 2)


def _write(
    pieces: Pieces,
    shape: Shape,
    stream: tuple[np.ndarray, list[tuple[int, int]]],
    grouped: tuple[np.ndarray, Dealt, np.ndarray],
) -> Placement:
    """Makes a placement of stream documents with their (place, index), and of dealt documents with their cells."""
    n = len(pieces)
    which, begins = stream
    at, begin = np.zeros(n, np.int64), np.full(n, -1)
    at[which], begin[which] = np.array(begins, np.int64).reshape(-1, 2).T
    dealt_n, dealt, cells = grouped
    some = dealt.cell >= 0
    dealt_n = dealt_n[some]
    degree, member, offset = np.full(n, shape.members), np.zeros(n, np.int64), np.zeros(n, np.int64)
    degree[dealt_n], member[dealt_n], offset[dealt_n] = dealt.degree[some], dealt.member[some], dealt.offset[some]
    chunk = np.searchsorted(shape.starts, begin, side="right") - 1
    cell = _side_by_side(cells, dealt.cell[some], pieces.size[dealt_n], dealt.degree[some], shape)
    at[dealt_n], chunk[dealt_n] = cells[cell, 0], cells[cell, 1]
    row_of = np.array([shape.row_of(order) for order in range(shape.rows)])
    placement = Placement(
        shape=shape,
        pieces=pieces,
        row=row_of[at],
        chunk=chunk,
        degree=degree,
        member=member,
        offset=offset,
        begin=begin,
        order=np.zeros(n, np.int64),
    )
    return dataclasses.replace(placement, order=_numbers(placement))


def _side_by_side(
    cells: np.ndarray, cell: np.ndarray, size: np.ndarray, degree: np.ndarray, shape: Shape
) -> np.ndarray:
    """Moves whole cells so that those of similar level and attention run at the same time.

    A grouped cell does not depend on its row, so it can change places with any other of its length. Cells are ordered
    by level, then attention; the largest of each length run first, `data` of them side by side.

    Args:
        cells: (place of the row, chunk) of each cell, int64 [K, 2].
        cell: the cell of each document, int64 [n].
        size: tokens of each document.
        degree: members of each document.
        shape: the window.

    Returns:
        The new cell of each document, int64 [n].
    """
    level, pairs = np.zeros(len(cells), np.int64), np.zeros(len(cells), np.int64)
    np.maximum.at(level, cell, degree)
    np.add.at(pairs, cell, size * (size + 1) // 2)
    moved = np.zeros(len(cells), np.int64)
    lengths = shape.slots[cells[:, 1]] if len(cells) else np.zeros(0, np.int64)
    for length in np.unique(lengths).tolist():
        same = np.flatnonzero(lengths == length)
        in_time = same[np.lexsort((cells[same, 0], cells[same, 1], cells[same, 0] // shape.data))]
        largest_first = same[np.lexsort((same, -pairs[same], -level[same]))]
        moved[largest_first] = in_time
    return moved[cell]


def _numbers(placement: Placement) -> np.ndarray:
    """Returns the number of each document in its row: by chunk, in stream by index, else in the order of dealing.

    Dealing goes by degree first, then by length; what was dealt at a larger degree afterwards has a smaller number,
    which changes no member's attention.
    """
    size, n = placement.pieces.size, len(placement.pieces)
    keys: tuple[np.ndarray, ...] = (np.arange(n), -size, -placement.degree, placement.begin, placement.chunk)
    by_place = np.lexsort((*keys, placement.row))
    numbers = np.empty(n, np.int64)
    rows = placement.row[by_place]
    numbers[by_place] = np.arange(n) - np.searchsorted(rows, rows)
    return numbers
