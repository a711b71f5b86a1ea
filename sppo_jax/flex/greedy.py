"""Deals documents to blocks of members of cells, longest first; and packs the others into rows in natural order.

Letters: n documents, K cells, R members.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sppo_jax.flex.shape import WindowShape

# Keys of the choice are pairs * 2^shift + slots left; this many bits hold them in an int64.
_KEY_BITS = 61
_NEVER = np.int64(2**62)


@dataclass(frozen=True)
class Dealt:
    """The place of each document, int64 [n] each; `cell` is -1 where a document fits nowhere."""

    cell: np.ndarray
    member: np.ndarray
    degree: np.ndarray
    offset: np.ndarray


@dataclass
class _Placed:
    """What the cells hold so far.

    Args:
        height: slots in use, int64 [K, R].
        pairs: attention, int64 [K, R], in units of 2^drop pairs.
        level: largest level, int64 [K].
    """

    height: np.ndarray
    pairs: np.ndarray
    level: np.ndarray


def deal(
    size_n: np.ndarray, degree_n: np.ndarray, slots_K: np.ndarray, *, members: int, penalty: np.ndarray, largest: int
) -> Dealt:
    """Deals documents to cells.

    Each document goes to the block whose cell then grows least: by the growth of the cell's largest attention, and by
    the penalty of the cell's new level. Of equal blocks it takes the one with the fewest slots left, then the first.

    Args:
        size_n: tokens of each document, longest first.
        degree_n: members of each document, not increasing; 1, 2, 4 .. R / 2.
        slots_K: slots of each cell on one member.
        members: R.
        penalty: cost of each level in pairs, for one slot: int64 [levels].
        largest: largest degree that documents may take that do not fit at their own; 1: none.
    """
    n, num_cells = len(size_n), len(slots_K)
    dealt = Dealt(np.full(n, -1), np.zeros(n, np.int64), degree_n.copy(), np.zeros(n, np.int64))
    if not n or not num_cells:
        return dealt
    empty = np.zeros((num_cells, members), np.int64)
    state = _Placed(empty, empty.copy(), np.zeros(num_cells, np.int64))
    total = int((size_n * (size_n + 1) // 2).sum()) + int(slots_K.max()) * int(penalty[-1])
    shift = (int(slots_K.max()) * members).bit_length()
    bits = shift, max(0, total.bit_length() + shift - _KEY_BITS)
    degrees = sorted(set(degree_n.tolist()), reverse=True)
    phases = [(degree, np.flatnonzero(degree_n == degree)) for degree in degrees]
    for degree, items in phases:
        _phase(state, degree, items, size_n, slots_K, penalty, bits, dealt)
    degree = 2
    while degree <= largest and (dealt.cell < 0).any():
        items = np.flatnonzero((dealt.cell < 0) & (degree_n < degree) & (size_n >= degree))
        _phase(state, degree, items, size_n, slots_K, penalty, bits, dealt)
        degree *= 2
    return dealt


@dataclass
class _Blocks:
    """The blocks of one degree, int64 [K * R / degree] each.

    Args:
        free: tokens that fit, dealt on from where the last document ended.
        held: attention of the member that has most, times 2^shift like `top` and `tail`.
        top: attention of the cell's member that has most.
        tail: what a block's key is beside the cell's new largest attention: less the present one, plus the cost of a
            new level, plus the tokens that fit.
        used: tokens dealt at this degree.
    """

    free: np.ndarray
    held: np.ndarray
    top: np.ndarray
    tail: np.ndarray
    used: list[int]

    def put(self, size: int, pairs: int, key: np.ndarray, full: np.ndarray) -> int:
        """Puts a document into the block with the least key; returns the block, or -1 where it fits nowhere.

        Args:
            size: tokens of the document.
            pairs: attention of a member, times 2^shift.
            key: space for a number of each block.
            full: space for a bool of each block.
        """
        np.add(self.held, pairs, out=key)
        np.maximum(key, self.top, out=key)
        np.add(key, self.tail, out=key)
        np.less(self.free, size, out=full)
        np.copyto(key, _NEVER, where=full)
        at = int(key.argmin())
        if full[at]:
            return -1
        self.used[at] += size
        self.free[at] -= size
        self.held[at] += pairs
        self.tail[at] -= size
        return at

    def raise_top(self, at: int, per_cell: int) -> None:
        """Brings the cell of a block up to date, whose largest attention or level has grown."""
        cell = slice(at // per_cell * per_cell, (at // per_cell + 1) * per_cell)
        self.top[cell] = max(self.top[at], self.held[at])
        self.tail[cell] = self.free[cell] - self.top[cell]


def _phase(
    state: _Placed,
    degree: int,
    items: np.ndarray,
    size_n: np.ndarray,
    slots_K: np.ndarray,
    penalty: np.ndarray,
    bits: tuple[int, int],
    dealt: Dealt,
) -> None:
    """Deals the documents of one degree, and writes their places."""
    if not len(items):
        return
    shift, drop = bits
    num_cells, members = state.height.shape
    per_cell, level = members // degree, degree.bit_length() - 1
    base = state.height.reshape(num_cells, per_cell, degree).max(2).ravel()
    blocks = _make_blocks(state, degree, base, slots_K, penalty, bits)
    key, full = np.empty_like(base), np.empty(len(base), bool)
    sizes = size_n[items]
    costs = ((sizes * (sizes + 1) // 2 // degree) >> drop) << shift
    places, offsets = [], []
    for size, pairs in zip(sizes.tolist(), costs.tolist(), strict=True):
        at = blocks.put(size, pairs, key, full)
        places.append(at)
        offsets.append((blocks.used[at] - size) % degree)
        if at >= 0 and (blocks.held[at] > blocks.top[at] or state.level[at // per_cell] < level):
            blocks.raise_top(at, per_cell)
            state.level[at // per_cell] = max(state.level[at // per_cell], level)
    found = np.array(places)
    some = found >= 0
    which, found = items[some], found[some]
    dealt.cell[which], dealt.member[which] = found // per_cell, found % per_cell * degree
    dealt.degree[which], dealt.offset[which] = degree, np.array(offsets)[some]
    _spread(state, degree, base, np.array(blocks.used), blocks.held >> shift)


def _make_blocks(
    state: _Placed, degree: int, base: np.ndarray, slots_K: np.ndarray, penalty: np.ndarray, bits: tuple[int, int]
) -> _Blocks:
    """Makes the blocks of a degree from what the cells hold; `base`: slots in use of each block's fullest member."""
    shift, drop = bits
    num_cells, members = state.height.shape
    per_cell, level = members // degree, degree.bit_length() - 1
    free = (np.repeat(slots_K, per_cell) - base) * degree
    held = state.pairs.reshape(num_cells, per_cell, degree).max(2).ravel() << shift
    top = np.repeat(state.pairs.max(1), per_cell) << shift
    charge = np.maximum(penalty[level] - penalty[state.level], 0) * slots_K
    tail = free - top + (np.repeat(charge >> drop, per_cell) << shift)
    return _Blocks(free, held, top, tail, [0] * len(free))


def _spread(state: _Placed, degree: int, base: np.ndarray, used: np.ndarray, held: np.ndarray) -> None:
    """Adds what a phase has dealt to the members of its blocks."""
    shape = state.height.shape
    slots = -(-(used[:, None] - np.arange(degree)) // degree)
    touched = np.broadcast_to((used > 0)[:, None], slots.shape).reshape(shape)
    state.height = np.where(touched, (base[:, None] + slots).reshape(shape), state.height)
    state.pairs = np.where(touched, np.broadcast_to(held[:, None], slots.shape).reshape(shape), state.pairs)


@dataclass
class StreamRows:
    """The stream cells of a window by place of the row, see `WindowShape.row_of`: they are the first chunks of each
    row.

    Args:
        chunks: stream chunks of each row, [rows].
        used: tokens that the stream documents of each row have, [rows].
    """

    chunks: list[int]
    used: list[int]

    @classmethod
    def empty(cls, rows: int) -> StreamRows:
        """Returns rows without stream cells."""
        return cls([0] * rows, [0] * rows)

    def put(self, sizes: Sequence[int], shape: WindowShape, *, extend: bool) -> list[tuple[int, int]] | None:
        """Packs documents into the stream cells, and writes what they take.

        A document goes to the row with the fewest tokens left that has space; else a row gets more stream cells. Rows
        that run side by side get them evenly, because they wait for each other.

        Args:
            sizes: tokens of each document, longest first.
            shape: the window.
            extend: whether rows may get more stream cells.

        Returns:
            The place of the row and the first index of each document; None if one does not fit.
        """
        starts, found = shape.starts.tolist(), []
        for size in sizes:
            left = [starts[chunks] - used for chunks, used in zip(self.chunks, self.used, strict=True)]
            fits = [(space, place) for place, space in enumerate(left) if space >= size]
            if not fits and extend:
                fits = self._extend(size, starts, shape)
            if not fits:
                return None
            place = min(fits)[1]
            found.append((place, self.used[place]))
            self.used[place] += size
        return found

    def _extend(self, size: int, starts: list[int], shape: WindowShape) -> list[tuple[int, int]]:
        """Gives a row as many stream cells as a document needs; returns it, or nothing."""
        options = []
        for place, used in enumerate(self.used):
            chunks = next((chunk for chunk, start in enumerate(starts) if start - used >= size), None)
            if chunks is not None:
                options.append((place // shape.data, chunks, place))
        if not options:
            return []
        _, chunks, place = min(options)
        self.chunks[place] = chunks
        return [(starts[chunks] - self.used[place], place)]
