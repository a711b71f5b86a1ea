"""The cells of a placement: teams, documents, tokens and attention of each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sppo_jax.flex.placement import Placement


@dataclass(frozen=True, kw_only=True)
class CellFigures:
    """One chunk of one row.

    Args:
        row: of the window.
        chunk: of the row.
        stream: whether the cell is a stream chunk.
        level: log2 of the members that exchange keys; 0 where stream.
        groups: of the teams: members, blocks and documents of each degree, largest degree first; empty where stream.
        documents: documents that have tokens in the cell.
        tokens: without padding.
        slots: places of the cell, over all members.
        attention_max: (query, key) pairs of the member that has most.
        attention_mean: pairs of the mean member.
    """

    row: int
    chunk: int
    stream: bool
    level: int
    groups: tuple[tuple[int, int, int], ...]
    documents: int
    tokens: int
    slots: int
    attention_max: int
    attention_mean: float


def cells_of(placement: Placement) -> list[CellFigures]:
    """Returns the cells of a placement by row and chunk."""
    shape, cells, tokens = placement.shape, placement.cells, placement.tokens()
    counts = _documents(placement)
    teams = _teams(placement)
    return [
        CellFigures(
            row=row,
            chunk=chunk,
            stream=bool(cells.far[row, chunk]),
            level=int(cells.level[row, chunk]),
            groups=() if cells.far[row, chunk] else teams.get((row, chunk), ()),
            documents=int(counts[row, chunk]),
            tokens=int(tokens[row, chunk]),
            slots=int(shape.slots[chunk]) * shape.members,
            attention_max=int(cells.top[row, chunk]),
            attention_mean=float(placement.attention[row, chunk].mean()),
        )
        for row in range(shape.rows)
        for chunk in range(shape.num_chunks)
    ]


def _documents(placement: Placement) -> np.ndarray:
    """Returns the documents that have tokens in each cell: int64 [rows, chunks]."""
    counts = np.zeros((placement.shape.rows, placement.shape.num_chunks), np.int64)
    in_teams, parts = placement.begin < 0, placement.segments
    np.add.at(counts, (placement.row[in_teams], placement.chunk[in_teams]), 1)
    np.add.at(counts, (placement.row[parts.piece], parts.chunk), 1)
    return counts


def _teams(placement: Placement) -> dict[tuple[int, int], tuple[tuple[int, int, int], ...]]:
    """Returns members, blocks and documents of each degree of each cell with documents in teams."""
    which = np.flatnonzero(placement.begin < 0)
    columns = (placement.row[which], placement.chunk[which], placement.degree[which], placement.member[which])
    blocks, documents = np.unique(np.stack(columns, axis=1), axis=0, return_counts=True)
    found: dict[tuple[int, int], dict[int, tuple[int, int]]] = {}
    for (row, chunk, degree, _), count in zip(blocks.tolist(), documents.tolist(), strict=True):
        by_degree = found.setdefault((row, chunk), {})
        before = by_degree.get(degree, (0, 0))
        by_degree[degree] = before[0] + 1, before[1] + count
    return {
        cell: tuple((degree, *by_degree[degree]) for degree in sorted(by_degree, reverse=True))
        for cell, by_degree in found.items()
    }
