"""Rows whose documents are rearranged, window by window, so that short documents need few devices.

A window is some consecutive rows. `flex.cells` places the documents of exactly these rows, from their lengths alone,
and the same number of rows comes out. So one integer, a multiple of the window, stays the place of a run in its data,
and a window holds the same tokens, targets and positions as before. At the end of an epoch a window goes on into the
next epoch.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np

from sppo_jax.data.rows.mixture import Mixture
from sppo_jax.data.rows.packing import PackedRows
from sppo_jax.data.rows.protocol import Batch, Rows
from sppo_jax.flex.cells import TODAY, plan_cells
from sppo_jax.flex.placement import Pieces, Placement
from sppo_jax.flex.rows import PACKED_ROWS, Content, documents_of, write_row
from sppo_jax.flex.shape import WindowShape

# Windows whose placements are kept: those that the loader's threads read at once.
_KEPT = 4


@dataclass
class _Window:
    """A window: a lock that one thread plans behind, the placement, and the first document of each row."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    placement: Placement | None = None
    firsts: np.ndarray | None = None


class FlexRows:
    """The rows of another `Rows`, rearranged; safe to read from several threads, each window is planned once."""

    def __init__(self, rows: Rows, *, window: int, shape: WindowShape, per_step: int, start: int = 0) -> None:
        """Plans nothing before the first row is asked for.

        Args:
            rows: the rows as they are packed; each has `shape.length` tokens.
            window: rows of a window.
            shape: the window on the mesh.
            per_step: rows of a step, over all processes.
            start: the first row that will be read.

        Raises:
            ValueError: the window is not that of the shape, does not divide a step, or the start lies inside a window.
        """
        if window != shape.rows:
            raise ValueError(f"the window must have the rows of its shape, {shape.rows}, got {window}; make both alike")
        if per_step % window:
            raise ValueError(
                f"the window must divide the rows of a step, {per_step}, got {window}; change sequence.per_step or the "
                "window"
            )
        check_start(start, window)
        self.shape, self._rows, self._window = shape, rows, window
        self._kept: OrderedDict[int, _Window] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Returns the number of rows of an epoch."""
        return len(self._rows)

    def __getitem__(self, index: int) -> Batch:
        """Returns a row, see `Rows`, with the packed row of the window from which each token comes.

        Only its own documents are read. Where no plan is faster, the row is unchanged.
        """
        number, row = divmod(int(index), self._window)
        window = self._planned(number)
        placement, firsts = window.placement, window.firsts
        assert placement is not None and firsts is not None
        if placement.winner == TODAY:
            unmoved = self._rows[index]
            return {**unmoved, PACKED_ROWS: np.full_like(unmoved["tokens"], row)}
        wanted: dict[int, list[int]] = {}
        for piece in documents_of(placement, row).tolist():
            wanted.setdefault(int(placement.pieces.row[piece]), []).append(piece)
        contents: dict[int, Content] = {}
        for source, pieces in wanted.items():
            own = [piece - int(firsts[source]) for piece in pieces]
            found = _read_pieces(self._rows, number * self._window + source, own)
            contents.update(zip(pieces, found, strict=True))
        return write_row(placement, row, contents)

    def placement(self, number: int) -> Placement:
        """Returns the placement of a window; window n holds the rows from n * window on."""
        placement = self._planned(number).placement
        assert placement is not None
        return placement

    def _planned(self, number: int) -> _Window:
        with self._lock:
            window = self._kept.setdefault(number, _Window())
            self._kept.move_to_end(number)
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        with window.lock:
            if window.placement is None:
                pieces = window_pieces(self._rows, number, self._window)
                window.firsts = np.searchsorted(pieces.row, np.arange(self._window + 1))
                window.placement = plan_cells(pieces, self.shape)
        return window


def check_start(start: int, window: int) -> None:
    """Checks that a run starts with a whole window.

    Raises:
        ValueError: the first row lies inside a window.
    """
    if start % window:
        raise ValueError(
            f"with sequence.groups=flex a run must resume at a multiple of the {window} sequences of a step, got "
            f"sequence {start}; set sequence.per_step to a divisor of {start}, or sequence.groups=static"
        )


def window_pieces(rows: Rows, number: int, window: int) -> Pieces:
    """Returns the documents of a window as they lie in its rows; reads tokens only where it must.

    Args:
        rows: the rows as they are packed.
        number: window n holds the rows from n * window on.
        window: rows of a window.
    """
    found = [_row_pieces(rows, number * window + row) for row in range(window)]
    begin, size = (np.concatenate(parts).astype(np.int64) for parts in zip(*found, strict=True))
    return Pieces(np.repeat(np.arange(window), [len(size) for _, size in found]), begin, size)


def _source(rows: Rows, index: int) -> tuple[Rows, int]:
    """Returns the rows that a row of a mixture comes from, and its number there."""
    while isinstance(rows, Mixture):
        source, index = rows.place(index)
        rows = rows.sources[source]
    return rows, index


def _row_pieces(rows: Rows, index: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the first index and the tokens of each document of a row; reads tokens only where it must."""
    rows, index = _source(rows, index)
    if isinstance(rows, PackedRows):
        size = rows.sizes(index).astype(np.int64)
        return np.cumsum(size) - size, size
    ids = rows[index]["document_ids"]
    _, begin, size = np.unique(ids[ids >= 0], return_index=True, return_counts=True)
    return np.flatnonzero(ids >= 0)[begin], size


def _read_pieces(rows: Rows, index: int, numbers: list[int]) -> list[Content]:
    """Reads documents of a row by their numbers in it."""
    rows, index = _source(rows, index)
    if isinstance(rows, PackedRows):
        found = [rows.read_piece(index, number) for number in numbers]
        return [Content(*parts, np.arange(len(parts[0]), dtype=np.int32)) for parts in found]
    row = rows[index]
    ids = np.unique(row["document_ids"][row["document_ids"] >= 0])
    places = [np.flatnonzero(row["document_ids"] == ids[number]) for number in numbers]
    return [Content(row["tokens"][at], row["targets"][at], row["positions"][at]) for at in places]
