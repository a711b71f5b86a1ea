"""How documents lie in sequences, and the pairs of a query and a key that they leave by position; imports no jax.

A token attends to the tokens of its own document alone. So the chunks of a sequence have fewer pairs than in a sequence
of one document, and each chunk has a share of its own: the first chunk keeps nearly all of its pairs, a late one few.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from sppo_jax.config import ModelConfig
from sppo_jax.models.counts import chunk_pairs, layer_costs
from sppo_jax.models.state_counts import state_counts

# The equal parts of a sequence of which the pairs are known, and how many sequences stand for those of a run.
CELLS, NUM_ROWS = 128, 8
# The most sequences of all sources together of which pairs are counted by position.
_MOST_COUNTED = 2048


@dataclass(frozen=True, kw_only=True)
class PairCounts:
    """The pairs of a query and a key within one document, by the place of the query in a sequence.

    Args:
        length: tokens of a sequence.
        shares: for each window (the tokens that a token attends to at most; 0: all before it), the share that is left
            of the pairs of each cell of a sequence of one document: CELLS values, 0..1.
    """

    length: int
    shares: dict[int, tuple[float, ...]] = field(hash=False)

    def pairs(self, start: int, tokens: int, window: int = 0) -> float:
        """Returns the pairs of a chunk.

        Args:
            start: tokens of the sequence before the chunk.
            tokens: tokens of the chunk.
            window: a key of `shares`.
        """
        key = window, start, tokens
        found = self._known.get(key)
        if found is None:
            found = self._before(start + tokens, window) - self._before(start, window)
            self._known[key] = found = max(0.0, found)
        return found

    def _before(self, place: float, window: int) -> float:
        """Returns the pairs of the queries before a place."""
        cell = min(CELLS - 1, int(place * CELLS / self.length))
        edge = cell * self.length / CELLS
        return self._sums[window][cell] + self.shares[window][cell] * chunk_pairs(edge, place - edge, window)

    @cached_property
    def _known(self) -> dict[tuple[int, int, int], float]:
        return {}

    @cached_property
    def _sums(self) -> dict[int, list[float]]:
        """The pairs of the queries before each cell, by window."""
        found: dict[int, list[float]] = {}
        for window, shares in self.shares.items():
            of_cells = np.array(shares) * _whole_cells(self.length, window)
            found[window] = [0.0, *np.cumsum(of_cells).tolist()]
        return found


@dataclass(frozen=True, kw_only=True)
class Documents:
    """How documents lie in sequences.

    Args:
        mean_tokens: tokens of a document, in the mean; a document that is cut counts as its pieces.
        attended: pairs of a query and a key within one document, relative to a sequence of one document; 0..1.
        rows: the sequences by rising number of their pairs, as NUM_ROWS groups of equal weight; of each the mean.
    """

    mean_tokens: float
    attended: float
    rows: tuple[PairCounts, ...]

    @cached_property
    def mean(self) -> PairCounts:
        """The mean of all sequences."""
        return self._mixed(np.full((1, NUM_ROWS), 1 / NUM_ROWS))[0]

    def of_slowest(self, data: int, sequences: int) -> Documents:
        """Returns the sequences of the slowest pipeline of a step, for which the others wait at its end.

        Of one sequence a pipeline, it is the one with the most pairs. The pairs of many sequences together differ less
        from their mean, by the root of their number.

        Args:
            data: pipelines.
            sequences: sequences of a pipeline in a step.
        """
        if data == 1:
            return self
        if (data, sequences) not in self._of_slowest:
            edges = (np.arange(NUM_ROWS + 1) / NUM_ROWS) ** data
            apart = sequences**-0.5
            groups = _in_groups(apart * np.diff(edges) + (1 - apart) / NUM_ROWS)
            self._of_slowest[data, sequences] = replace(self, rows=self._mixed(groups))
        return self._of_slowest[data, sequences]

    @cached_property
    def _of_slowest(self) -> dict[tuple[int, int], Documents]:
        return {}

    def _mixed(self, weights: np.ndarray) -> tuple[PairCounts, ...]:
        """Returns means of the groups by some weights, [num_means, NUM_ROWS]."""
        first = self.rows[0]
        mixed = {window: (weights @ [row.shares[window] for row in self.rows]).tolist() for window in first.shares}
        return tuple(
            PairCounts(length=first.length, shares={window: tuple(values[number]) for window, values in mixed.items()})
            for number in range(len(weights))
        )


class Packed(NamedTuple):
    """The sequences of a source.

    Attributes:
        weight: share of the sequences of a run that are the source's; those of all sources sum to 1.
        sizes: tokens of each piece of a document, [num_pieces]; the pieces of a sequence stand together.
        firsts: first piece of each sequence, and the number of pieces, [num_sequences + 1].
    """

    weight: float
    sizes: np.ndarray
    firsts: np.ndarray


class _PairsOfType(NamedTuple):
    """The pairs of the layers of a type.

    Attributes:
        flops: of a pair in all of these layers.
        window: tokens that a token attends to; 0: all before it.
    """

    flops: float
    window: int


def documents_of(sources: Sequence[Packed], model: ModelConfig, length: int) -> Documents:
    """Counts documents in the sequences of some sources; of many sequences a sample counts by position.

    Args:
        sources: the sequences of each.
        model: the model shape.
        length: tokens of a sequence.
    """
    sums, chosen, layer_types = np.zeros(3), [], _pairs_of_types(model, length)
    for source in sources:
        sizes, num_rows = source.sizes.astype(np.float64), len(source.firsts) - 1
        pairs = _pairs(sizes, layer_types, length)
        sums += source.weight / num_rows * np.array([sizes.sum(), len(sizes), pairs.sum()])
        of_rows = np.add.reduceat(pairs, source.firsts[:-1])
        # Evenly spaced among the sequences by rising pairs, so that few stand for all.
        order = np.argsort(of_rows, kind="stable")[:: -(-num_rows * len(sources) // _MOST_COUNTED)]
        weights = np.full(len(order), source.weight / len(order))
        chosen.append((of_rows[order], weights, _cells_of(source, order, layer_types, length)))
    of_rows, weights, cells = (np.concatenate(parts) for parts in zip(*chosen, strict=True))
    order = np.argsort(of_rows, kind="stable")
    in_group = _in_groups(weights[order])
    tokens, pieces, pairs_of_row = sums.tolist()
    whole = _pairs(np.array([length], float), layer_types, length).item()
    windows = list(dict.fromkeys(layer_type.window for layer_type in layer_types))
    rows = [
        PairCounts(length=length, shares={window: tuple(row) for window, row in zip(windows, of_group, strict=True)})
        for of_group in np.tensordot(in_group, cells[order], 1).tolist()
    ]
    # A model without attention has no pairs.
    attended = pairs_of_row / whole if whole else 1.0
    return Documents(mean_tokens=tokens / pieces, attended=attended, rows=tuple(rows))


def _pairs_of_types(model: ModelConfig, length: int) -> list[_PairsOfType]:
    """Returns the pairs of the layers of each type with attention."""
    layer_types = model.counts(model.num_layers)
    attends = [(layer_type, count) for layer_type, count in layer_types if state_counts(layer_type) is None]
    return [_PairsOfType(count * layer_costs(one).pair_flops, one.window_within(length)) for one, count in attends]


def _pairs(sizes: np.ndarray, layer_types: Sequence[_PairsOfType], length: int) -> np.ndarray:
    """Returns the pairs of documents of some sizes over all layers, each pair times its FLOPs."""
    total = np.zeros(len(sizes))
    for flops, window in layer_types:
        reach = window or length
        growing = np.minimum(sizes, reach)
        total += flops * (growing * (growing + 1) / 2 + (sizes - growing) * growing)
    return total


def _smooth_pairs(tokens: np.ndarray, window: int) -> np.ndarray:
    """Returns the pairs of the first tokens of a document, as `chunk_pairs` counts them."""
    growing = np.minimum(tokens, window) if window else tokens
    return growing * growing / 2 + (tokens - growing) * growing


def _whole_cells(length: int, window: int) -> np.ndarray:
    """Returns the pairs of each cell of a sequence of one document: [CELLS]."""
    return np.diff(_smooth_pairs(_edges(length), window))


def _edges(length: int) -> np.ndarray:
    return np.arange(CELLS + 1) * (length / CELLS)


def _cells_of(source: Packed, rows: np.ndarray, layer_types: Sequence[_PairsOfType], length: int) -> np.ndarray:
    """Returns the shares of some sequences of a source: [num_rows, num_windows, CELLS]."""
    windows, edges = list(dict.fromkeys(layer_type.window for layer_type in layer_types)), _edges(length)
    firsts = source.firsts.astype(np.int64)
    ends = np.concatenate([[0], np.cumsum(source.sizes, dtype=np.int64)])
    row, piece = _ranges(firsts[rows], firsts[rows + 1])
    begins = ends[piece] - ends[firsts[rows]][row]
    stops = begins + source.sizes[piece]
    first = np.searchsorted(edges, begins, "right") - 1
    last = np.maximum(np.searchsorted(edges, stops, "left"), first + 1)
    which, cell = _ranges(first, last)
    low = np.maximum(begins[which], edges[cell]) - begins[which]
    high = np.minimum(stops[which], edges[cell + 1]) - begins[which]
    place, size = row[which] * CELLS + cell, len(rows) * CELLS
    found = np.empty((len(rows), len(windows), CELLS))
    for number, window in enumerate(windows):
        pairs = _smooth_pairs(high, window) - _smooth_pairs(low, window)
        of_cells = np.bincount(place, pairs, size).reshape(len(rows), CELLS)
        found[:, number] = of_cells / _whole_cells(length, window)
    return found


def _ranges(firsts: np.ndarray, lasts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the numbers of ranges one range after another, each after the place of its range."""
    counts = lasts - firsts
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - (np.cumsum(counts) - counts)[owner] + firsts[owner]


def _in_groups(weights: np.ndarray) -> np.ndarray:
    """Returns the share of each sequence in each of NUM_ROWS groups of equal weight: [NUM_ROWS, num_rows]."""
    ends = np.cumsum(weights) / weights.sum() * NUM_ROWS
    begins = np.concatenate([[0.0], ends[:-1]])
    groups = np.arange(NUM_ROWS)[:, None]
    return np.clip(np.minimum(ends, groups + 1) - np.maximum(begins, groups), 0.0, None)
