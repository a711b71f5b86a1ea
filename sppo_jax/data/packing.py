"""Documents laid end to end and cut into sequences, each sequence readable on its own.

An epoch is a stream: the documents in a seeded order, one behind another. Sequence r is the stream's tokens
[r * length, (r + 1) * length). A document that reaches over the end of a sequence goes on in the next one as a
document of its own, its positions counted from 0 again. Nothing is copied before it is asked for.
"""

from __future__ import annotations

import numpy as np

from sppo_jax.data.sources import Corpus

Batch = dict[str, np.ndarray]


class Packing:
    """The sequences of one epoch."""

    def __init__(self, corpus: Corpus, *, length: int, pack: bool = True, seed: int = 0, epoch: int = 0) -> None:
        """Lay out the epoch.

        Args:
            corpus: the documents, at least one.
            length: tokens of a sequence.
            pack: False gives every document sequences of its own, padded at their end.
            seed: with the epoch, decides the order of documents and sequences.
            epoch: how many times the corpus has been seen before.
        """
        generator = np.random.default_rng([seed, epoch])
        order = generator.permutation(corpus.num_documents)
        self._tokens = corpus.tokens
        self._starts, self._ends = corpus.starts[order], corpus.ends[order]
        sizes = self._ends - self._starts
        room = sizes if pack else -(-sizes // length) * length
        self._stream_ends = np.cumsum(room)
        self._stream_starts = self._stream_ends - room
        self._length = length
        num_rows = -(-int(self._stream_ends[-1]) // length)
        # Pieces of a long document would else come one after another, all in the same few steps.
        self._rows = generator.permutation(num_rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Batch:
        """Return one sequence: int32 [length] each of tokens, targets, positions, document_ids.

        A target is the next token of the same document, -1 at its end (no loss). Padding has document_id -1.
        """
        first = int(self._rows[index]) * self._length
        row = {name: np.full(self._length, -1, np.int32) for name in ("targets", "document_ids")}
        row |= {name: np.zeros(self._length, np.int32) for name in ("tokens", "positions")}
        from_document = np.searchsorted(self._stream_ends, first, side="right")
        to_document = np.searchsorted(self._stream_starts, first + self._length)
        for piece, document in enumerate(range(from_document, to_document)):
            self._copy(row, document, first, piece)
        return row

    def _copy(self, row: Batch, document: int, first: int, piece: int) -> None:
        """Copy into the sequence that starts at `first` of the stream what of a document lies in it."""
        start, end = self._starts[document], self._ends[document]
        skipped = max(0, first - int(self._stream_starts[document]))
        at = int(self._stream_starts[document]) + skipped - first
        size = min(int(end - start) - skipped, self._length - at)
        begin = int(start) + skipped
        following = self._tokens[begin + 1 : min(begin + size + 1, int(end))]
        row["tokens"][at : at + size] = self._tokens[begin : begin + size]
        row["targets"][at : at + len(following)] = following
        row["positions"][at : at + size] = np.arange(size)
        row["document_ids"][at : at + size] = piece
