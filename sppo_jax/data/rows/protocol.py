"""What a run reads: sequences by number, each a pure function of that number.

The numbers continue over epochs: `epoch, row = divmod(index, len(rows))`. So one integer is the place of a run in its
data, whatever the batch size, the number of processes and the number of stops.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

Batch = dict[str, np.ndarray]


class Rows(Protocol):
    """Endless sequences with random access; safe to read from several threads."""

    def __len__(self) -> int:
        """Returns the number of sequences of an epoch, which is the same for every epoch."""
        ...

    def __getitem__(self, index: int) -> Batch:
        """Returns sequence `index`, whose number continues over epochs.

        Returns:
            int32 [length] each of tokens, targets (-1: no loss), positions within the document, and document_ids (-1:
            padding).
        """
        ...
