"""Endless batches of this process's sequences, read ahead by grain's threads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import grain
import numpy as np

from sppo_jax.data.rows.protocol import Batch, Rows

# The numbers of batches continue over all epochs; grain needs a length.
_ENDLESS = 1 << 62


class Loader(Iterator[Batch]):
    """Iterates over batches; a batch may span the end of an epoch, so no sequence is left out."""

    def __init__(
        self,
        rows: Rows,
        *,
        num_sequences: int,
        local_rows: Sequence[int],
        sequence: int = 0,
        num_batches_ahead: int = 2,
        num_threads: int = 2,
    ) -> None:
        """Starts at a sequence; nothing is read before the first batch is asked for.

        Args:
            rows: the sequences.
            num_sequences: sequences of a batch, over all processes.
            local_rows: which of these this process gets, each in 0..num_sequences-1.
            sequence: the first sequence of the first batch.
            num_batches_ahead: batches that are read ahead; 0: none, and no threads.
            num_threads: number of threads that read ahead.
        """
        self._rows, self._num_sequences, self._local_rows = rows, num_sequences, tuple(local_rows)
        self._options = grain.ReadOptions(num_threads=num_threads, prefetch_buffer_size=num_batches_ahead)
        self._start(sequence)

    def _start(self, sequence: int) -> None:
        batches = _Batches(self._rows, self._num_sequences, self._local_rows, sequence)
        self._first = sequence
        self._batches = iter(grain.MapDataset.source(batches).to_iter_dataset(self._options))

    @property
    def rows(self) -> Rows:
        """The sequences of all processes."""
        return self._rows

    @property
    def state(self) -> dict[str, int]:
        """The number of sequences handed out to all processes; sequences that were only read ahead do not count."""
        return {"sequence": self._first + self._batches.get_state()["next_index"] * self._num_sequences}

    @state.setter
    def state(self, state: dict[str, int]) -> None:
        self.close()
        self._start(state["sequence"])

    def __next__(self) -> Batch:
        """Returns int32 [len(local_rows), length] each of tokens, targets, positions, document_ids."""
        return next(self._batches)

    def close(self) -> None:
        """Stops reading ahead."""
        self._batches.close()


class _Batches:
    """This process's part of every batch, by the batch's number."""

    def __init__(self, rows: Rows, num_sequences: int, local_rows: tuple[int, ...], sequence: int) -> None:
        self._rows, self._num_sequences, self._local_rows, self._sequence = rows, num_sequences, local_rows, sequence

    def __len__(self) -> int:
        return _ENDLESS

    def __getitem__(self, index: int) -> Batch:
        first = self._sequence + index * self._num_sequences
        rows = [self._rows[first + row] for row in self._local_rows]
        return {name: np.stack([row[name] for row in rows]) for name in rows[0]}
