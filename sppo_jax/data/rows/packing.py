"""Documents laid out in sequences, once; every epoch reads the same sequences in another order.

A document may be cut into pieces. In its sequence each piece is a document of its own, with positions from 0. The last
token of a piece still has a target: the first token of the next piece.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from sppo_jax.data.rows.best_fit import best_fit, index_dtype
from sppo_jax.data.rows.corpus import Corpus
from sppo_jax.data.rows.order import key_of, mix_array, permuted
from sppo_jax.data.rows.protocol import Batch
from sppo_jax.data.tokens.mask_bit import split_words
from sppo_jax.processes import distributed

_BLOCK = 1 << 18

Pack = Literal["whole", "stream", "none"]


@dataclass(frozen=True, kw_only=True)
class PackedLayout:
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


def lay_out(corpus: Corpus, *, length: int, pack: Pack, seed: int) -> PackedLayout:
    """Gives every token of a corpus its sequence.

    Args:
        corpus: the documents, at least one.
        length: tokens of a sequence.
        pack: "whole" packs documents by best fit and cuts only those that are longer than a sequence; "stream" puts
            documents end to end and cuts wherever a sequence ends; "none" gives each document sequences of its own.
        seed: decides which documents are packed together.
    """
    order = _drawn_order(corpus.num_documents, seed)
    pieces = _cut(corpus, order, length, stream=pack == "stream")
    items = None
    if pack == "stream":
        ends = np.cumsum(pieces.sizes, dtype=np.int64)
        firsts = np.searchsorted(ends - pieces.sizes, np.arange(0, int(ends[-1]), length))
        firsts = np.append(firsts, len(pieces.sizes))
    elif pack == "none":
        firsts = np.arange(len(pieces.sizes) + 1)
    else:
        items, firsts = best_fit(pieces.sizes, length)
    return _laid(corpus, order, pieces, items, firsts)


@dataclass(frozen=True, kw_only=True)
class _Pieces:
    """Pieces of documents, before they have sequences.

    Args:
        sizes: tokens of each piece, int32 [num_pieces].
        documents: place of its document in the drawn order, [num_pieces]; None: each document is one piece.
        offsets: its first token within the document, [num_pieces]; None where documents is.
        num_split: number of documents in more than one piece.
    """

    sizes: np.ndarray
    documents: np.ndarray | None
    offsets: np.ndarray | None
    num_split: int


def _blocks(count: int) -> Iterator[slice]:
    """Yields slices of a number of items: what is computed for each item takes memory of a block alone."""
    listener = distributed.Listener()
    for first in range(0, count, _BLOCK):
        listener.check()
        yield slice(first, min(first + _BLOCK, count))


def _drawn_order(count: int, seed: int) -> np.ndarray:
    """Returns the documents in an order that depends on the seed, uint32 or int64 [num_documents]."""
    # Not numpy's generator: a new version may draw other numbers and so change the order of a run.
    keys = np.empty(count, np.uint64)
    for block in _blocks(count):
        keys[block] = mix_array(np.arange(block.start, block.stop, dtype=np.uint64) + np.uint64(key_of(seed)))
    return np.argsort(keys, kind="stable").astype(index_dtype(count))


def _cut(corpus: Corpus, order: np.ndarray, length: int, *, stream: bool) -> _Pieces:
    """Cuts documents into pieces that fit into sequences.

    Args:
        corpus: the documents.
        order: the documents in their drawn order.
        length: tokens of a sequence.
        stream: whether documents are put end to end; otherwise each begins a sequence.
    """
    count = len(order)
    sizes: np.ndarray = np.empty(count, np.int64 if stream else np.int32)
    most = 0
    for block in _blocks(count):
        found = corpus.ends[order[block]] - corpus.starts[order[block]]
        most = max(most, int(found.max()))
        if most > np.iinfo(sizes.dtype).max:
            sizes = sizes.astype(np.int64)
        sizes[block] = found
    if most <= length and not stream:
        return _Pieces(sizes=sizes.astype(np.int32, copy=False), documents=None, offsets=None, num_split=0)
    begun = (np.cumsum(sizes) - sizes) % length if stream else None
    num_pieces: np.ndarray = -(-(sizes if begun is None else begun + sizes) // length)
    total = int(num_pieces.sum(dtype=np.int64))
    dtype = index_dtype(total)
    documents = np.repeat(np.arange(count, dtype=dtype), num_pieces)
    firsts = (np.cumsum(num_pieces, dtype=np.int64) - num_pieces).astype(dtype)
    num_split = int(np.count_nonzero(num_pieces > 1))
    del num_pieces
    offsets = np.empty(total, np.uint32 if most < 1 << 32 else np.int64)
    out = np.empty(total, np.int32)
    for block in _blocks(total):
        document = documents[block]
        number = np.arange(block.start, block.stop) - firsts[document].astype(np.int64)
        before = 0 if begun is None else begun[document]
        first = np.maximum(number * length - before, 0)
        offsets[block] = first
        out[block] = np.minimum((number + 1) * length - before, sizes[document]) - first
    return _Pieces(sizes=out, documents=documents, offsets=offsets, num_split=num_split)


def _laid(
    corpus: Corpus, order: np.ndarray, pieces: _Pieces, items: np.ndarray | None, firsts: np.ndarray
) -> PackedLayout:
    """Returns the layout of pieces; `items` are the pieces in the order of the sequences, None: as they are."""
    count = len(pieces.sizes)
    begins, sizes, goes_on = np.empty(count, np.int64), np.empty(count, np.int32), np.empty(count, bool)
    for block in _blocks(count):
        item = np.arange(block.start, block.stop) if items is None else items[block]
        document = order[item if pieces.documents is None else pieces.documents[item]]
        sizes[block] = pieces.sizes[item]
        begins[block] = corpus.starts[document]
        if pieces.offsets is not None:
            begins[block] += pieces.offsets[item]
        goes_on[block] = begins[block] + sizes[block] < corpus.ends[document]
    return PackedLayout(begins=begins, sizes=sizes, goes_on=goes_on, firsts=firsts, num_split=pieces.num_split)


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

    @property
    def has_one_document(self) -> bool:
        """Whether each sequence holds one document, or one piece of a document."""
        return len(self.layout.sizes) == self.layout.num_rows

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
