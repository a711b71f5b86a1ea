"""Where each document of a window lies: the result of the planner, and the figures that follow from it exactly.

A cell is one chunk of one row. A document is dealt over an aligned block of members of one cell, or lies in natural
order (stream) over all members. A device runs a cell as stream ("far") if a document crosses into or out of the cell or
spans all members; this module finds the same answer from the documents' places.

Letters: n documents, w rows, C chunks, R members.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from sppo_jax.flex.shape import WindowShape
from sppo_jax.flex.step_cost import Cells, step_cost, tick_levels


@dataclass(frozen=True)
class Pieces:
    """The documents, or parts of documents, of a window as they lie in its rows today.

    Args:
        row: of each piece, not decreasing, int64 [n].
        begin: first index of each piece in its row, int64 [n].
        size: tokens of each piece, at least 1, int64 [n].
    """

    row: np.ndarray
    begin: np.ndarray
    size: np.ndarray

    @classmethod
    def packed(cls, lengths: Sequence[Sequence[int]]) -> Pieces:
        """Makes the pieces of rows whose documents follow each other without padding.

        Args:
            lengths: tokens of each document, row by row.
        """
        row = np.repeat(np.arange(len(lengths)), [len(of_row) for of_row in lengths]).astype(np.int64)
        sizes = [np.asarray(of_row, np.int64) for of_row in lengths]
        empty = [np.zeros(0, np.int64)]
        begin = np.concatenate(empty + [np.cumsum(size) - size for size in sizes])
        return cls(row, begin, np.concatenate(empty + sizes))

    def __len__(self) -> int:
        return len(self.size)


class Segments(NamedTuple):
    """The parts of stream documents by chunk, int64 [s] each."""

    piece: np.ndarray
    chunk: np.ndarray
    first: np.ndarray  # first index in the row
    rank: np.ndarray  # tokens of the document before the part
    tokens: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The place of every document of a window.

    Args:
        shape: the window.
        pieces: the documents as they lie in the rows today.
        row: the new row of each document, int64 [n].
        chunk: its chunk, or the first of its chunks, int64 [n].
        degree: members that share it; all members where it is stream, int64 [n].
        member: first member of its block, int64 [n]; 0 where it is stream.
        offset: its token p lies on member `member + (offset + p) mod degree`, int64 [n]; 0 where it is stream.
        begin: its first index in the row where it is stream, else -1, int64 [n].
        order: its number in the row, which is its document id, int64 [n].
        winner: the candidate that this placement is.
        costs: the predicted cost of each candidate.
    """

    shape: WindowShape
    pieces: Pieces
    row: np.ndarray
    chunk: np.ndarray
    degree: np.ndarray
    member: np.ndarray
    offset: np.ndarray
    begin: np.ndarray
    order: np.ndarray
    winner: str = ""
    costs: dict[str, int] = field(default_factory=dict)

    @cached_property
    def segments(self) -> Segments:
        """The parts of the stream documents by chunk."""
        return cut(np.flatnonzero(self.begin >= 0), self.begin, self.pieces.size, self.shape)

    @cached_property
    def attention(self) -> np.ndarray:
        """The (query, key) pairs of each member's queries: int64 [w, C, R]."""
        shape = self.shape
        pairs = np.zeros((shape.rows, shape.num_chunks, shape.members), np.int64)
        seg = self.segments
        found = dealt_pairs(seg.rank, seg.tokens, shape.members)
        column = (seg.first[:, None] + np.arange(shape.members)) % shape.members
        np.add.at(pairs, (self.row[seg.piece][:, None], seg.chunk[:, None], shape.member_of[column]), found)
        in_teams = self.begin < 0
        for degree in np.unique(self.degree[in_teams]).tolist():
            which = np.flatnonzero(in_teams & (self.degree == degree))
            found = dealt_pairs(np.zeros(len(which), np.int64), self.pieces.size[which], degree)
            member = self.member[which][:, None] + (self.offset[which][:, None] + np.arange(degree)) % degree
            np.add.at(pairs, (self.row[which][:, None], self.chunk[which][:, None], member), found)
        return pairs

    @cached_property
    def cells(self) -> Cells:
        """The largest attention, the level and the mode of each cell."""
        shape = self.shape
        level = np.zeros((shape.rows, shape.num_chunks), np.int64)
        in_teams = np.flatnonzero(self.begin < 0)
        most = np.minimum(self.degree, self.pieces.size)[in_teams]  # fewer tokens than members: all begin the block
        np.maximum.at(level, (self.row[in_teams], self.chunk[in_teams]), bit_length(most - 1))
        seg = self.segments
        np.maximum.at(level, (self.row[seg.piece], seg.chunk), self._stream_levels(seg))
        far = level == shape.levels
        return Cells(self.attention.max(2), np.where(far, 0, level), far & (shape.levels > 0))

    def _stream_levels(self, seg: Segments) -> np.ndarray:
        """Returns the level that a device finds for each part of a stream document."""
        shape = self.shape
        taken = np.arange(shape.members) < np.minimum(seg.tokens, shape.members)[:, None]
        member = shape.member_of[(seg.first[:, None] + np.arange(shape.members)) % shape.members]
        first = np.where(taken, member, shape.members).min(1, initial=shape.members)
        last = np.where(taken, member, -1).max(1, initial=-1)
        crosses = np.bincount(seg.piece, minlength=len(self.row))[seg.piece] > 1
        return np.where(crosses, shape.levels, bit_length(first ^ last))

    @cached_property
    def cost(self) -> int:
        """The predicted cost of a step, in units of `shape.weights`."""
        return step_cost(self.cells, self.shape)

    @property
    def exchanges(self) -> np.ndarray:
        """The level that each tick executes, and the level of all members where a tick has a stream cell: [ticks]."""
        return tick_levels(self.cells, self.shape)

    @property
    def fill(self) -> float:
        """The share of the window's places that hold tokens."""
        return int(self.pieces.size.sum()) / (self.shape.rows * self.shape.length)

    @property
    def balance(self) -> float:
        """The sum over cells of the largest attention of a member, divided by that of the mean; 1 is the least."""
        total = int(self.attention.sum())
        return int(self.attention.max(2).sum()) * self.shape.members / total if total else 1.0

    def describe(self) -> str:
        """Returns the placement in words: cells by level, attention, cost of each candidate, exchanges by tick."""
        shape, cells = self.shape, self.cells
        tokens = self.tokens()
        size = f"{shape.rows} rows of {shape.num_chunks} chunks"
        lines = [f"{len(self.pieces)} documents in {size}, {self.fill:.1%} full"]
        for name, which in self._sorts_of_cells():
            most, mean = cells.top[which].sum(), self.attention[which].sum() / shape.members
            places = int((shape.members * np.broadcast_to(shape.slots, which.shape))[which].sum())
            lines.append(
                f"{name}: {int(which.sum())} cells, {tokens[which].sum() / places:.1%} full, "
                f"attention max {most:.4g} and mean {mean:.4g} pairs a member"
            )
        for name, cost in sorted(self.costs.items(), key=lambda item: item[1]):
            lines.append(f"predicted {name}: {cost}{' (chosen)' if name == self.winner else ''}")
        levels, counts = np.unique(self.exchanges[shape.ops != "H"], return_counts=True)
        names = ["stream" if level == shape.levels else f"level {level}" for level in levels.tolist()]
        ticks = ", ".join(f"{count} {name}" for name, count in zip(names, counts.tolist(), strict=True))
        return "\n".join([*lines, f"ticks: {ticks}"])

    def tokens(self) -> np.ndarray:
        """Returns the tokens of each cell, padding not counted: int64 [w, C]."""
        tokens = np.zeros((self.shape.rows, self.shape.num_chunks), np.int64)
        in_teams, seg = self.begin < 0, self.segments
        np.add.at(tokens, (self.row[in_teams], self.chunk[in_teams]), self.pieces.size[in_teams])
        np.add.at(tokens, (self.row[seg.piece], seg.chunk), seg.tokens)
        return tokens

    def _sorts_of_cells(self) -> list[tuple[str, np.ndarray]]:
        cells = self.cells
        found = [("stream", cells.far)]
        for level in range(max(1, self.shape.levels)):
            found.append((f"teams of {2**level}", ~cells.far & (cells.level == level)))
        return [(name, which) for name, which in found if which.any()]


def cut(piece: np.ndarray, begin: np.ndarray, size: np.ndarray, shape: WindowShape) -> Segments:
    """Cuts stream documents where chunks end.

    Args:
        piece: the stream documents, int64 [s].
        begin: first index of each document of the window, int64 [n].
        size: tokens of each document of the window, int64 [n].
        shape: the window.
    """
    starts = shape.starts
    first = np.searchsorted(starts, begin[piece], side="right") - 1
    last = np.searchsorted(starts, begin[piece] + size[piece], side="left") - 1
    parts = last - first + 1
    owner = np.repeat(piece, parts)
    chunk = np.arange(len(owner)) - np.repeat(np.cumsum(parts) - parts, parts) + np.repeat(first, parts)
    index = np.maximum(starts[chunk], begin[owner])
    stop = np.minimum(starts[chunk + 1], begin[owner] + size[owner])
    return Segments(owner, chunk, index, index - begin[owner], stop - index)


def dealt_pairs(rank_s: np.ndarray, count_s: np.ndarray, degree: int) -> np.ndarray:
    """Returns the pairs of every degree-th token of runs of a document: int64 [s, degree].

    Args:
        rank_s: tokens of the document before each run.
        count_s: tokens of each run.
        degree: over how many members the run is dealt; result a is that of tokens a, a + degree, ...
    """
    first = np.arange(degree)
    tokens = np.maximum(count_s[:, None] - first + degree - 1, 0) // degree
    return tokens * (rank_s[:, None] + first + 1) + degree * (tokens * (tokens - 1) // 2)


def bit_length(values: np.ndarray) -> np.ndarray:
    """Returns the number of bits of each value, at least 0 and below 2^53: int64."""
    return np.frexp(values.astype(np.float64))[1].astype(np.int64)
