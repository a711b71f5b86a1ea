"""The rules of a rearranged row, checked on the host: what attention within chunks and over teams depends on.

1. Along each member's column of a chunk, document ids do not decrease and positions rise within a document.
2. Ids rise from chunk to chunk, except for a document that continues.
3. A chunk with a document that crosses its ends or spans all members is in natural order, each document in one run.
4. In any other chunk, padding lies behind the documents in each column, or the chunk is in natural order. Where tokens
   must be dealt, token p of a document lies on member (o + p) mod g of its aligned block of g members.

Letters: w rows, S tokens of a row, T slots of a chunk, R members, D documents of a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from sppo_jax.flex.placement import bit_length
from sppo_jax.flex.shape import WindowShape


def check_columns(batch: Mapping[str, np.ndarray], shape: WindowShape, dealing: bool) -> None:
    """Checks rearranged rows.

    Args:
        batch: int32 arrays [w, S] under positions and document_ids (-1: padding).
        shape: the chunks and the members.
        dealing: whether to check that tokens are dealt cyclically (rule 4), on which the fused kernel depends.

    Raises:
        ValueError: a row breaks a rule; the message gives the rule, the row and the chunk, and the change to make.
    """
    ids_wS, positions_wS = (np.asarray(batch[name]) for name in ("document_ids", "positions"))
    for name, got in (("document_ids", ids_wS.shape), ("positions", positions_wS.shape)):
        if len(got) != 2 or got[1] != shape.length:
            raise ValueError(
                f"'{name}' of rearranged rows must be [rows, {shape.length}], got {list(got)}; give whole rows"
            )
    for row, (ids, positions) in enumerate(zip(ids_wS, positions_wS, strict=True)):
        documents = _find_documents(ids, shape)
        last_id = -1
        for chunk in range(shape.num_chunks):
            span = slice(int(shape.starts[chunk]), int(shape.starts[chunk + 1]))
            where = f"in chunk {chunk} of row {row}"
            _check_chunk(ids[span], positions[span], documents, shape, where)
            last_id = _check_rise(ids[span], last_id, where)
            if dealing:
                _check_dealing(ids[span], positions[span], documents, shape, where)


def far_cells(ids_wS: np.ndarray, shape: WindowShape) -> tuple[np.ndarray, np.ndarray]:
    """Finds the mode of each cell from document ids, as the devices do.

    Args:
        ids_wS: document ids, -1 for padding.
        shape: the chunks and the members.

    Returns:
        Whether each cell runs as stream, bool [w, C]; and its level, int64 [w, C], 0 where it is stream.
    """
    far = np.zeros((len(ids_wS), shape.num_chunks), bool)
    level = np.zeros(far.shape, np.int64)
    for row, ids in enumerate(ids_wS):
        documents = _find_documents(ids, shape)
        for chunk in range(shape.num_chunks):
            own = np.unique(ids[shape.starts[chunk] : shape.starts[chunk + 1]])
            which = np.searchsorted(documents.ids, own[own >= 0])
            far[row, chunk] = documents.far[which].any()
            level[row, chunk] = 0 if far[row, chunk] else documents.level[which].max(initial=0)
    return far, level


@dataclass(frozen=True)
class _Documents:
    """The documents of a row, by rising id: [D] each.

    Args:
        ids: the document ids.
        level: log2 of the smallest aligned block that holds the document.
        far: whether the document crosses a chunk's end or spans all members.
        whole: whether its tokens are one run of indices.
    """

    ids: np.ndarray
    level: np.ndarray
    far: np.ndarray
    whole: np.ndarray


def _find_documents(ids_S: np.ndarray, shape: WindowShape) -> _Documents:
    index = np.flatnonzero(ids_S >= 0)
    ids, which, count = np.unique(ids_S[index], return_inverse=True, return_counts=True)
    member = shape.member_of[index % shape.members]
    low, high = np.full(len(ids), shape.members), np.zeros(len(ids), np.int64)
    first, last = np.full(len(ids), shape.length), np.zeros(len(ids), np.int64)
    for least, most, values in ((low, high, member), (first, last, index)):
        np.minimum.at(least, which, values)
        np.maximum.at(most, which, values)
    level = bit_length(low ^ high)
    chunk = np.searchsorted(shape.starts, np.stack([first, last]), side="right")
    far = (chunk[0] != chunk[1]) | (level == shape.levels)
    return _Documents(ids, level, far, last - first + 1 == count)


def _check_chunk(ids: np.ndarray, positions: np.ndarray, documents: _Documents, shape: WindowShape, where: str) -> None:
    """Checks rules 1, 3 and 4 of one chunk, dealing aside."""
    for columns in range(shape.members):
        own = slice(int(shape.columns[columns]), None, shape.members)
        problem = _disorder(ids[own], positions[own])
        if problem:
            raise ValueError(
                f"a member's column must have rising document ids, and positions that rise within a document, got "
                f"{problem} on member {columns} {where}; write the documents of a chunk in the order of their ids"
            )
    own_documents = np.searchsorted(documents.ids, np.unique(ids[ids >= 0]))
    natural = not _disorder(ids, positions) and bool(documents.whole[own_documents].all())
    if documents.far[own_documents].any() and not natural:
        raise ValueError(
            "a chunk with a document that crosses its ends or spans all members must be in natural order, got "
            f"{_disorder(ids, positions) or 'padding within a document'} {where}; write the chunk as stream, or deal "
            "its documents to smaller blocks"
        )
    real = (ids >= 0).reshape(-1, shape.members)
    if not natural and (real[1:] & ~real[:-1]).any():
        raise ValueError(
            f"padding of a team chunk must lie behind the documents of each member's column, got padding before a "
            f"document {where}; move the document forward in the column"
        )


def _disorder(ids: np.ndarray, positions: np.ndarray) -> str:
    """Returns in what (document id, position) do not rise along some tokens, padding aside; empty if they do."""
    real = ids >= 0
    step, stride = np.diff(ids[real]), np.diff(positions[real])
    if (step < 0).any():
        return "a step down of the document id"
    return "a repeated or smaller position" if ((step == 0) & (stride <= 0)).any() else ""


def _check_rise(ids: np.ndarray, last_id: int, where: str) -> int:
    """Checks rule 2; returns the largest id so far."""
    real = ids[ids >= 0]
    if not len(real):
        return last_id
    if real.min() < last_id:
        raise ValueError(
            f"document ids must rise from chunk to chunk, got {real.min()} behind {last_id} {where}; number the "
            "documents of a row chunk by chunk"
        )
    return int(real.max())


def _check_dealing(
    ids: np.ndarray, positions: np.ndarray, documents: _Documents, shape: WindowShape, where: str
) -> None:
    """Checks that the documents of a team chunk are dealt; one with a token a member at most may lie in any order.

    Then any two members' tokens of a document interleave, so that each sees a triangle of the other's.
    """
    index = np.flatnonzero(ids >= 0)
    which = np.searchsorted(documents.ids, ids[index])
    near = ~documents.far[which]
    index, which = index[near], which[near]
    by_place = np.lexsort((positions[index], which))
    which, member = which[by_place], shape.member_of[index[by_place] % shape.members]
    first = np.searchsorted(which, which)
    rank = np.arange(len(which)) - first
    degree = 1 << documents.level[which]
    wanted = member // degree * degree + (member[first] + rank) % degree if len(which) else member
    tokens = np.bincount(which * shape.members + member, minlength=len(documents.ids) * shape.members)
    several = tokens.reshape(len(documents.ids), shape.members).max(1, initial=0) > 1
    wrong = np.flatnonzero((member != wanted) & several[which])
    if len(wrong):
        token = int(wrong[0])
        raise ValueError(
            f"token p of a document must lie on member (o + p) mod {degree[token]} of its block for the fused kernel, "
            f"got token {rank[token]} of document {documents.ids[which[token]]} on member {member[token]} {where}; "
            "deal the tokens cyclically"
        )
