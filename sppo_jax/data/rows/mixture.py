"""Several sources in given shares: the number of a sequence alone decides its source."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sppo_jax.data.rows.protocol import Batch, Rows

BLOCK = 10_000


class Mixture:
    """Sequences of several sources, each source going through its own epochs at its own pace.

    Sequence numbers come in blocks of 10000. Each source has its share of a block, spread evenly. So every batch has
    the shares as nearly as whole sequences can, and a number alone gives the source and the sequence in the source.
    """

    def __init__(self, sources: Sequence[Rows], weights: Sequence[float]) -> None:
        """Mixes sources.

        Args:
            sources: the sources, at least one.
            weights: the weight of each source, above 0; their sum does not matter.

        Raises:
            ValueError: a weight is too small for one sequence in a block.
        """
        self.sources = tuple(sources)
        self._counts = block_counts(weights)
        places = [(np.arange(count) + 0.5) / count for count in self._counts]
        owner = np.repeat(np.arange(len(sources)), self._counts)
        # Sources take turns by the places where they are due; at the same place, in the order in which they are given.
        self._owner = owner[np.argsort(np.concatenate(places), kind="stable")]
        self._before = np.zeros(BLOCK, np.int64)
        for source in range(len(sources)):
            mine = self._owner == source
            self._before[mine] = np.arange(mine.sum())

    def __len__(self) -> int:
        """Returns the number of sequences after which every source has been seen whole, at least once."""
        return max(self._needed(source) for source in range(len(self.sources)))

    def _needed(self, source: int) -> int:
        """Returns the number of sequences with all of a source's first epoch."""
        return int(self._numbers(source, np.array([len(self.sources[source]) - 1]))[0]) + 1

    def _numbers(self, source: int, own: np.ndarray) -> np.ndarray:
        """Returns the numbers in the mixture of sequences of a source, int64."""
        blocks, rest = np.divmod(own.astype(np.int64), int(self._counts[source]))
        return blocks * BLOCK + np.flatnonzero(self._owner == source)[rest]

    def first_epochs(self, num_wanted: int) -> np.ndarray:
        """Returns the first numbers that belong to the first epoch of their source, at most `num_wanted`, int64."""
        epochs = [np.arange(min(len(source), num_wanted)) for source in self.sources]
        return np.sort(np.concatenate([self._numbers(*each) for each in enumerate(epochs)]))[:num_wanted]

    def __getitem__(self, index: int) -> Batch:
        """Returns a sequence, see `Rows`."""
        source, own = self.place(index)
        return self.sources[source][own]

    def place(self, index: int) -> tuple[int, int]:
        """Returns the source of a sequence, and the sequence's number in it."""
        block, at = divmod(int(index), BLOCK)
        source = int(self._owner[at])
        return source, block * int(self._counts[source]) + int(self._before[at])

    def num_drawn(self, num_sequences: int) -> list[int]:
        """Returns how many of the first `num_sequences` come from each source."""
        blocks, rest = divmod(num_sequences, BLOCK)
        within = np.bincount(self._owner[:rest], minlength=len(self.sources))
        return [int(count) for count in blocks * self._counts + within]


def block_counts(weights: Sequence[float]) -> np.ndarray:
    """Shares out the numbers of a block by largest remainders.

    Raises:
        ValueError: a source would get no number.
    """
    exact = np.array(weights, np.float64) / sum(weights) * BLOCK
    counts = np.floor(exact).astype(np.int64)
    counts[np.argsort(counts - exact, kind="stable")[: BLOCK - int(counts.sum())]] += 1
    if not counts.all():
        least = min(weights)
        raise ValueError(
            f"data.source must give every source at least one of {BLOCK} sequences, got a weight of {least:g} where "
            f"all weights sum to {sum(weights):g}; raise the weight or leave out the source"
        )
    return counts
