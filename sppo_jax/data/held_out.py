"""One pass over held-out sequences: which of them are measured, in which order, and in which batches.

The order depends on the data alone, not on the mesh or the processes. Each sequence is read once. All batches have one
shape: rows of padding, which have no targets, fill up the last one.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from itertools import islice

import numpy as np

from sppo_jax.data.loader import Loader
from sppo_jax.data.rows.mixture import Mixture
from sppo_jax.data.rows.needles import NeedleRows
from sppo_jax.data.rows.protocol import Batch, Rows
from sppo_jax.data.rows.recall import RecallRows, with_distances

# What a row of padding holds in each array; 0 in the others.
_PADDING = {"targets": -1, "document_ids": -1}


class OnePass:
    """The first held-out sequences as `Rows`, each once; the rows behind them are padding."""

    def __init__(self, rows: Rows, *, num_wanted: int) -> None:
        """Chooses the sequences; reads none.

        Args:
            rows: the sequences held out; those of the recall task also get `distances`.
            num_wanted: most sequences to measure.
        """
        self.num_held_out = num_held_out(rows)
        self._rows, self._numbers = with_distances(rows), first_numbers(rows, num_wanted)

    def __len__(self) -> int:
        """Returns the number of sequences to measure."""
        return len(self._numbers)

    def __getitem__(self, index: int) -> Batch:
        """Returns a sequence, see `Rows`; padding behind the last."""
        if index < len(self):
            return self._rows[int(self._numbers[index])]
        return {name: np.full_like(row, _PADDING.get(name, 0)) for name, row in self._rows[0].items()}

    def batches(self, num_sequences: int) -> Generator[Batch]:
        """Yields all sequences in batches of `num_sequences` rows, the same in every process."""
        with closing(Loader(self, num_sequences=num_sequences, local_rows=range(num_sequences))) as loader:
            yield from islice(loader, -(-len(self) // num_sequences))


def num_held_out(rows: Rows) -> int | None:
    """Returns the number of sequences held out; None if they are drawn without end."""
    if isinstance(rows, RecallRows | NeedleRows):
        return None
    return sum(map(len, rows.sources)) if isinstance(rows, Mixture) else len(rows)


def first_numbers(rows: Rows, num_wanted: int) -> np.ndarray:
    """Returns the numbers of the first sequences to measure, each sequence once, int64 [num_sequences].

    The sequences of a mixture come in the order in which training would read them, by the weights of the sources. A
    source that is read whole drops out, and the others go on.
    """
    if isinstance(rows, Mixture):
        return rows.first_epochs(num_wanted)
    return np.arange(min(len(rows), num_wanted))
