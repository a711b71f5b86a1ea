"""Best-fit-decreasing bin packing of very many documents, by sizes instead of one document at a time."""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np

_BLOCK = 1 << 20


def best_fit(sizes: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Packs items into as few bins as best-fit-decreasing finds.

    Items of the same size are interchangeable, and so are bins with the same free space. Each step therefore fills a
    whole range of bins of equal free space with as many items of one size as these bins take. The result is the same as
    that of placing one item at a time.

    Args:
        sizes: integer [num_items], each in 1..capacity.
        capacity: the size of a bin.

    Returns:
        The items in the order of their bins, uint32 or int64 [num_items]; and the index of each bin's first item in
        this order, followed by the number of items, int64 [num_bins + 1].
    """
    count = len(sizes)
    order = np.argsort(-sizes, kind="stable").astype(index_dtype(count))
    values, counts = np.unique(sizes, return_counts=True)
    bins = _Bins(capacity)
    for size, number in zip(values[::-1].tolist(), counts[::-1].tolist(), strict=True):
        bins.place(size, number)
    bin_of = _bins_of_items(np.array(bins.moves, np.int64).reshape(-1, 3), count)
    firsts = np.zeros(bins.num_bins + 1, np.int64)
    for first in range(0, count, _BLOCK):
        firsts[1:] += np.bincount(bin_of[first : first + _BLOCK], minlength=bins.num_bins)
    np.cumsum(firsts, out=firsts)
    by_bin = np.argsort(bin_of, kind="stable")
    del bin_of
    return order[by_bin], firsts


def index_dtype(count: int) -> np.dtype:
    """Returns the dtype of indices of so many items, which takes few bytes."""
    return np.dtype(np.uint32 if count < 1 << 32 else np.int64)


def _bins_of_items(moves: np.ndarray, count: int) -> np.ndarray:
    """Returns the bin of each item, [num_items].

    Args:
        moves: first bin, number of bins and items to a bin of each move, int64 [num_moves, 3]: the next items go to
            neighbouring bins, so many to each.
        count: number of items.
    """
    ends = np.cumsum(moves[:, 1] * moves[:, 2])
    starts = ends - moves[:, 1] * moves[:, 2]
    found = np.empty(count, np.int32 if count < 1 << 31 else np.int64)
    for first in range(0, count, _BLOCK):
        items = np.arange(first, min(first + _BLOCK, count))
        move = np.searchsorted(ends, items, side="right")
        found[first : first + _BLOCK] = moves[move, 0] + (items - starts[move]) // moves[move, 2]
    return found


class _Bins:
    """Bins by their free space, as ranges of neighbouring bins with equal free space."""

    def __init__(self, capacity: int) -> None:
        self.num_bins = 0
        self.moves: list[tuple[int, int, int]] = []
        self._capacity = capacity
        self._rooms: list[int] = []
        self._ranges: dict[int, list[tuple[int, int]]] = {}

    def place(self, size: int, count: int) -> None:
        """Places `count` items of one size, each into the bin with the least free space that the item fits into."""
        while count:
            at = bisect_left(self._rooms, size)
            if at == len(self._rooms):
                num_bins = -(-count // (self._capacity // size))
                first, room = self.num_bins, self._capacity
                self.num_bins += num_bins
            else:
                room = self._rooms[at]
                first, num_bins = self._take(at)
            count -= self._fill(first, num_bins, room, size, count)

    def _take(self, at: int) -> tuple[int, int]:
        ranges = self._ranges[self._rooms[at]]
        taken = ranges.pop()
        if not ranges:
            del self._ranges[self._rooms.pop(at)]
        return taken

    def _fill(self, first: int, num_bins: int, room: int, size: int, count: int) -> int:
        """Fills a range of bins as far as the items go; returns how many were placed."""
        each = room // size
        num_full = min(num_bins, count // each)
        placed = self._move(first, num_full, each, room - each * size)
        rest = min(each, count - placed) if num_full < num_bins else 0
        if rest:
            placed += self._move(first + num_full, 1, rest, room - rest * size)
        untouched = num_bins - num_full - bool(rest)
        self._keep(first + num_bins - untouched, untouched, room)
        return placed

    def _move(self, first: int, num_bins: int, each: int, room: int) -> int:
        if num_bins:
            self.moves.append((first, num_bins, each))
            self._keep(first, num_bins, room)
        return num_bins * each

    def _keep(self, first: int, num_bins: int, room: int) -> None:
        if not num_bins or not room:
            return
        if room not in self._ranges:
            self._ranges[room] = []
            insort(self._rooms, room)
        self._ranges[room].append((first, num_bins))
