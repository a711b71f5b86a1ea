"""A placement written as the arrays of a batch, and attention counted back from these arrays.

Index i * R + column(m) of a chunk is slot i of member m; `WindowShape.columns` has the columns.

Letters: w rows, S tokens of a row, C chunks, R members.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from sppo_jax.flex.placement import Placement

# The packed row of the window from which each token comes: what a loss over a sequence is of.
PACKED_ROWS = "packed_rows"
# The arrays of a batch, and what padding has in them.
PADDING = {"tokens": 0, "targets": -1, "positions": 0, "document_ids": -1, PACKED_ROWS: 0}


class Content(NamedTuple):
    """The tokens of a document, their targets and their positions: int32 [size] each."""

    tokens: np.ndarray
    targets: np.ndarray
    positions: np.ndarray


def write(placement: Placement, contents: Sequence[Content]) -> dict[str, np.ndarray]:
    """Writes a window.

    Args:
        placement: the place of each document.
        contents: each document, in the order of `placement.pieces`.

    Returns:
        int32 [w, S] each of tokens, targets, positions, document_ids and packed_rows.
    """
    rows = [write_row(placement, row, dict(enumerate(contents))) for row in range(placement.shape.rows)]
    return {name: np.stack([row[name] for row in rows]) for name in PADDING}


def write_row(placement: Placement, row: int, contents: Mapping[int, Content]) -> dict[str, np.ndarray]:
    """Writes one row of a window.

    Args:
        placement: the place of each document.
        row: the row.
        contents: at least the documents of this row, by their number in `placement.pieces`.

    Returns:
        int32 [S] each of tokens, targets, positions, document_ids and packed_rows.
    """
    batch = {name: np.full(placement.shape.length, value, np.int32) for name, value in PADDING.items()}
    for number, (piece, index) in enumerate(indices(placement, row)):
        content = contents[piece]
        batch["tokens"][index] = content.tokens
        batch["targets"][index] = content.targets
        batch["positions"][index] = content.positions
        batch["document_ids"][index] = number
        batch[PACKED_ROWS][index] = placement.pieces.row[piece]
    return batch


def documents_of(placement: Placement, row: int) -> np.ndarray:
    """Returns the documents of a new row in the order of their document ids: int64."""
    which = np.flatnonzero(placement.row == row)
    return which[np.argsort(placement.order[which])]


def indices(placement: Placement, row: int) -> list[tuple[int, np.ndarray]]:
    """Returns the documents of a new row in the order of their ids, each with the index of each of its tokens."""
    shape, found = placement.shape, []
    height = np.zeros((shape.num_chunks, shape.members), np.int64)
    for piece in documents_of(placement, row).tolist():
        size, begin = int(placement.pieces.size[piece]), int(placement.begin[piece])
        if begin >= 0:
            found.append((piece, begin + np.arange(size)))
            continue
        degree, chunk = int(placement.degree[piece]), int(placement.chunk[piece])
        index = np.empty(size, np.int64)
        for first in range(min(degree, size)):
            member = placement.member[piece] + (placement.offset[piece] + first) % degree
            count = -(-(size - first) // degree)
            slot = height[chunk, member] + np.arange(count)
            index[first::degree] = shape.starts[chunk] + slot * shape.members + shape.columns[member]
            height[chunk, member] += count
        found.append((piece, index))
    return found
