"""Sequences of documents of which only the lengths are known: packed as a run packs them, without tokens."""

from __future__ import annotations

import dataclasses

import numpy as np

from sppo_jax.data.rows.corpus import Corpus
from sppo_jax.data.rows.packing import Pack, PackedRows
from sppo_jax.flex.lengths import Quantiles, sample_lengths

_MOST_PIECES = 10_000_000


def rows_of_lengths(lengths: np.ndarray, *, length: int, pack: Pack, seed: int, fill: float = 1.0) -> PackedRows:
    """Packs documents by their lengths. The tokens of the result cannot be read.

    Args:
        lengths: tokens of each document, integer [num_documents], at least one document, each at least 1.
        length: tokens of a sequence.
        pack: how documents fill sequences, see `packing.lay_out`.
        seed: decides which documents are packed together, and the order of the sequences.
        fill: share of a sequence that may hold tokens, in (0, 1]; the rest is padding.

    Raises:
        ValueError: the share leaves no place, or the documents fill more sequences than can be counted here.
    """
    capacity = int(fill * length)
    if capacity < 1:
        raise ValueError(
            f"the places that documents may take must be at least 1 of the {length} of a sequence, got fill {fill}; "
            "raise the fill"
        )
    pieces = len(lengths) + float(lengths.astype(np.float64).sum()) / capacity
    if pieces > _MOST_PIECES:
        raise ValueError(
            f"documents must be at most {_MOST_PIECES:,} pieces of {capacity} tokens, got about {pieces:.3g}; give "
            "fewer or shorter documents, or a longer sequence.length"
        )
    ends = np.cumsum(lengths.astype(np.int64))
    corpus = Corpus(parts=(), starts=ends - lengths, ends=ends, hashes=np.zeros(len(lengths)))
    return PackedRows(corpus, length=length, pack=pack, seed=seed, fill=fill)


def rows_of_corpus(quantiles: Quantiles, *, tokens: int, length: int, pack: Pack, seed: int, fill: float) -> PackedRows:
    """Packs lengths drawn from a distribution, as if these were a part of a large corpus.

    The last sequence of a packing has what is left over. In a large corpus nearly no step reads this sequence, so the
    emptiest sequence is left out here.

    Args:
        quantiles: the distribution.
        tokens: least sum of the lengths.
        length, pack, seed, fill: as for `rows_of_lengths`; the seed also selects the lengths.
    """
    lengths = enough_lengths(quantiles, tokens=tokens, seed=seed)
    rows = rows_of_lengths(lengths, length=length, pack=pack, seed=seed, fill=fill)
    layout = rows.layout
    if layout.num_rows == 1:
        return rows
    row = int(np.add.reduceat(layout.sizes, layout.firsts[:-1]).argmin())
    begin, end = layout.firsts[row], layout.firsts[row + 1]
    rows.layout = dataclasses.replace(
        layout,
        begins=np.delete(layout.begins, slice(begin, end)),
        sizes=np.delete(layout.sizes, slice(begin, end)),
        goes_on=np.delete(layout.goes_on, slice(begin, end)),
        firsts=np.concatenate([layout.firsts[: row + 1], layout.firsts[row + 2 :] - (end - begin)]),
    )
    return rows


def enough_lengths(quantiles: Quantiles, *, tokens: int, seed: int) -> np.ndarray:
    """Draws document lengths until they have a number of tokens.

    Args:
        quantiles: the distribution.
        tokens: least sum of the lengths.
        seed: selects the random numbers.

    Returns:
        int64 [number of documents].
    """
    count = 64
    while True:
        # More lengths from the same seed begin with the same lengths.
        lengths = sample_lengths(quantiles, count=count, seed=seed)
        total = np.cumsum(lengths)
        if total[-1] >= tokens:
            return lengths[: int(np.searchsorted(total, tokens)) + 1]
        count *= 2
