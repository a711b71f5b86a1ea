"""What a run reads: sequences by number, each a pure function of that number.

Numbers count on over epochs: `epoch, row = divmod(index, len(rows))`. So one integer says where a run stands in its
data, whatever the batch size, the number of processes and how often it was stopped.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

Batch = dict[str, np.ndarray]


class Rows(Protocol):
    """Endless sequences with random access; safe to read from several threads."""

    def __len__(self) -> int:
        """Returns the number of sequences of an epoch; every epoch has as many."""
        ...

    def __getitem__(self, index: int) -> Batch:
        """Returns sequence `index`, counted on over epochs.

        Returns:
            int32 [length] each of tokens, targets (-1: no loss), positions within the document, and document_ids (-1:
            padding).
        """
        ...
