"""Documents laid out in sequences, once; every epoch reads the same sequences in another order.

A document may be cut into pieces. In its sequence each piece is a document of its own, with positions from 0. The last
token of a piece still has a target: the first token of the next piece.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from sppo_jax.data.best_fit import best_fit
from sppo_jax.data.corpus import Corpus
from sppo_jax.data.mask_bit import split_words
from sppo_jax.data.order import key_of, mix_array, permuted
from sppo_jax.data.rows import Batch

Pack = Literal["whole", "stream", "none"]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The tokens of each sequence.

    Args:
        begins: first token of each piece, int64 [num_pieces]; the pieces of a sequence stand together.
        sizes: tokens of each piece, int32 [num_pieces].
        goes_on: whether the document continues after the piece, bool [num_pieces].
        firsts: first piece of each sequence, and the number of pieces: int64 [num_rows + 1].
        num_split: number of documents in more than one piece.
    """

    begins: np.ndarray
    sizes: np.ndarray
    goes_on: np.ndarray
    firsts: np.ndarray
    num_split: int

    @property
    def num_rows(self) -> int:
        return len(self.firsts) - 1


def lay_out(corpus: Corpus, *, length: int, pack: Pack, seed: int) -> Layout:
    """Gives every token of a corpus its sequence.

    Args:
        corpus: the documents, at least one.
        length: tokens of a sequence.
        pack: "whole" packs documents by best fit and cuts only those that are longer than a sequence; "stream" puts
            documents end to end and cuts wherever a sequence ends; "none" gives each document sequences of its own.
        seed: decides which documents are packed together.
    """
    # Not numpy's generator: a new version may draw other numbers and so change the order of a run.
    numbers = np.arange(corpus.num_documents, dtype=np.uint64) + np.uint64(key_of(seed))
    order = np.argsort(mix_array(numbers), kind="stable")
    starts, ends = corpus.starts[order], corpus.ends[order]
    document, offsets, sizes = _cut(ends - starts, length, stream=pack == "stream")
    begins = starts[document] + offsets
    if pack == "stream":
        firsts = np.searchsorted(np.cumsum(sizes) - sizes, np.arange(0, int(sizes.sum()), length))
        firsts = np.append(firsts, len(sizes))
    elif pack == "none":
        firsts = np.arange(len(sizes) + 1)
    else:
        items, firsts = best_fit(sizes, length)
        document, begins, sizes = document[items], begins[items], sizes[items]
    return Layout(
        begins=begins,
        sizes=sizes.astype(np.int32),
        goes_on=begins + sizes < ends[document],
        firsts=firsts,
        num_split=int((np.bincount(document) > 1).sum()),
    )


def _cut(sizes: np.ndarray, length: int, *, stream: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cuts documents into pieces that fit into sequences.

    Args:
        sizes: tokens of each document, int64 [num_documents].
        length: tokens of a sequence.
        stream: whether documents are put end to end; otherwise each begins a sequence.

    Returns:
        For each piece its document, its first token within the document, and its number of tokens: int64 [num_pieces]
        each.
    """
    begun = (np.cumsum(sizes) - sizes) % length if stream else np.zeros_like(sizes)
    num_pieces = -(-(begun + sizes) // length)
    document = np.repeat(np.arange(len(sizes)), num_pieces)
    number = np.arange(len(document)) - np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)
    offsets = np.maximum(number * length - begun[document], 0)
    stops = np.minimum((number + 1) * length - begun[document], sizes[document])
    return document, offsets, stops - offsets


class PackedRows:
    """The sequences of one corpus, in an order that depends on the seed and the epoch."""

    def __init__(self, corpus: Corpus, *, length: int, pack: Pack = "whole", seed: int = 0, fill: float = 1.0) -> None:
        """Lays out the corpus.

        Args:
            corpus: the documents, at least one.
            length: tokens of a sequence.
            pack: see `lay_out`.
            seed: decides which documents are packed together, and the order of the sequences.
            fill: share of a sequence that may hold tokens; the rest is padding behind them.
        """
        self.layout = lay_out(corpus, length=max(1, int(length * fill)), pack=pack, seed=seed)
        self.corpus, self.length, self._seed = corpus, length, seed

    def __len__(self) -> int:
        """Returns the number of sequences of an epoch."""
        return self.layout.num_rows

    def __getitem__(self, index: int) -> Batch:
        """Returns a sequence, see `Rows`."""
        return self.read(self._place(index))

    def sizes(self, index: int) -> np.ndarray:
        """Returns the tokens of each piece of a sequence, int32 [num_pieces], without reading them."""
        row = self._place(index)
        return self.layout.sizes[self.layout.firsts[row] : self.layout.firsts[row + 1]]

    def read_piece(self, index: int, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the tokens and the targets of one piece of a sequence, int32 [size] each."""
        return self._read_piece(int(self.layout.firsts[self._place(index)]) + number)

    def _place(self, index: int) -> int:
        """Returns the place of a sequence in the layout."""
        epoch, place = divmod(int(index), len(self))
        return permuted(place, len(self), key_of(self._seed, epoch))

    def _read_piece(self, piece: int) -> tuple[np.ndarray, np.ndarray]:
        begin, size = int(self.layout.begins[piece]), int(self.layout.sizes[piece])
        words = self.corpus.read(begin, begin + size + int(self.layout.goes_on[piece]))
        tokens, learned = split_words(words)
        targets = np.full(size, -1, np.int32)
        targets[: len(tokens) - 1] = np.where(learned[1:], tokens[1:].astype(np.int32), -1)
        return tokens[:size], targets

    def read(self, row: int) -> Batch:
        """Returns a sequence by its place in the layout."""
        batch = {name: np.full(self.length, -1, np.int32) for name in ("targets", "document_ids")}
        batch |= {name: np.zeros(self.length, np.int32) for name in ("tokens", "positions")}
        layout, at = self.layout, 0
        for number, piece in enumerate(range(layout.firsts[row], layout.firsts[row + 1])):
            tokens, targets = self._read_piece(piece)
            to = at + len(tokens)
            batch["tokens"][at:to] = tokens
            batch["targets"][at:to] = targets
            batch["positions"][at:to] = np.arange(len(tokens))
            batch["document_ids"][at:to] = number
            at = to
        return batch
