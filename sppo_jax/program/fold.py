"""Folding a row of ticks into nested loops: ticks that look alike become one scan body."""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Loop:
    """`count` repetitions of `body`; the items of a body are signatures or loops."""

    count: int
    body: tuple


def fold(signatures: Sequence[Hashable]) -> tuple:
    """Finds a short nested-loop form of a sequence.

    Greedy: at each place the period that saves most items is folded, and its body is folded in turn. A body of one
    repeated signature is a segment; a body of several is what repeats from sequence to sequence.

    Args:
        signatures: what distinguishes the ticks, in order.

    Returns:
        A tuple of signatures and Loops that unrolls to `signatures`.
    """
    # Numbers are compared faster than signatures.
    numbers: dict[Hashable, int] = {}
    return _fold([numbers.setdefault(signature, len(numbers)) for signature in signatures], list(numbers))


def _fold(numbers: list[int], signatures: list[Hashable]) -> tuple:
    items, place = [], 0
    while place < len(numbers):
        period, count = _best_period(numbers, place)
        if count == 1:
            items.append(signatures[numbers[place]])
        else:
            items.append(Loop(count, _fold(numbers[place : place + period], signatures)))
        place += period * count
    return tuple(items)


def _best_period(signatures: list[int], place: int) -> tuple[int, int]:
    row = signatures[place:]
    best, saved = (1, 1), 0
    for period, match in enumerate(_matches(row)[: len(row) // 2 + 1]):
        count = match // period + 1 if period else 1
        # A run that starts a longer period belongs inside it: a longer period must save strictly more.
        if period * (count - 1) > saved:
            best, saved = (period, count), period * (count - 1)
    return best


def _matches(row: list[int]) -> list[int]:
    """Returns for each place how many items from there on are those from the start on.

    A stretch that is known to repeat the start tells the places within it (the Z algorithm), so each item is compared
    once.
    """
    matches, begin, end = [len(row)], 0, 0
    for place in range(1, len(row)):
        match = min(end - place, matches[place - begin]) if place < end else 0
        while place + match < len(row) and row[match] == row[place + match]:
            match += 1
        matches.append(match)
        if place + match > end:
            begin, end = place, place + match
    return matches


def unfold(items: Sequence) -> list:
    """Writes the loops out again."""
    flat = []
    for item in items:
        flat += unfold(item.body) * item.count if isinstance(item, Loop) else [item]
    return flat


def of_bodies(items: Sequence, values: np.ndarray) -> Iterator[np.ndarray]:
    """Yields for each tick body the values of all its runs.

    Args:
        items: from `fold`.
        values: of all ticks, [iterations of each loop around all of them, ticks, stages].

    Yields:
        [iterations of each loop around the body, outermost first, stages].
    """
    place = 0
    for item in items:
        length = len(unfold([item]))
        part = values[..., place : place + length, :]
        place += length
        if isinstance(item, Loop):
            yield from of_bodies(item.body, in_iterations(item, part))
        else:
            yield part[..., 0, :]


def in_iterations(loop: Loop, values: np.ndarray) -> np.ndarray:
    """Splits a loop's values by iterations: [..., ticks, stages] -> [..., iterations, ticks of one, stages]."""
    *around, ticks, stages = values.shape
    return values.reshape(*around, loop.count, ticks // loop.count, stages)


def num_segments(items: Sequence) -> int:
    """Counts the tick bodies that are compiled."""
    return sum(num_segments(item.body) if isinstance(item, Loop) else 1 for item in items)
