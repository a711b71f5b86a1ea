"""Endless batches in an order that depends on the seed alone, and that goes on where it stopped."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from sppo_jax.data.packing import Batch, Packing
from sppo_jax.data.sources import Corpus


class Loader(Iterator[Batch]):
    """Iterates over batches; a batch may span the end of an epoch, so no sequence is left out."""

    def __init__(
        self, corpus: Corpus, *, num_sequences: int, sequence_length: int, pack: bool = True, seed: int = 0
    ) -> None:
        """Start at the first sequence of the first epoch.

        Args:
            corpus: the documents, at least one.
            num_sequences: sequences of a batch, over all devices and processes.
            sequence_length: tokens of a sequence.
            pack: see `Packing`.
            seed: order of documents and sequences.
        """
        self._corpus, self._num_sequences = corpus, num_sequences
        self._settings = {"length": sequence_length, "pack": pack, "seed": seed}
        self._epoch, self._index = 0, 0
        self._packing = self._lay_out()

    def _lay_out(self) -> Packing:
        return Packing(self._corpus, epoch=self._epoch, **self._settings)

    @property
    def state(self) -> dict[str, int]:
        """Return where the next batch starts: the epoch, and the sequence in it."""
        return {"epoch": self._epoch, "index": self._index}

    @state.setter
    def state(self, state: dict[str, int]) -> None:
        self._epoch, self._index = state["epoch"], state["index"]
        self._packing = self._lay_out()

    def __next__(self) -> Batch:
        """Return int32 [num_sequences, sequence_length] each of tokens, targets, positions, document_ids."""
        rows = [self._next_row() for _ in range(self._num_sequences)]
        return {name: np.stack([row[name] for row in rows]) for name in rows[0]}

    def _next_row(self) -> Batch:
        if self._index == len(self._packing):
            self._epoch, self._index = self._epoch + 1, 0
            self._packing = self._lay_out()
        self._index += 1
        return self._packing[self._index - 1]
