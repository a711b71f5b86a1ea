"""Tick shapes: the few token counts that ticks may have where chunks have many lengths; see `Table.shapes`."""

from bisect import bisect_left
from collections.abc import Callable, Sequence

from sppo_jax.rules import MOST_SHAPES


def rounded_up(tokens: int, shapes: Sequence[int]) -> int:
    """Returns the least of some rising shapes that holds so many tokens; without shapes, the tokens."""
    return shapes[bisect_left(shapes, tokens)] if shapes else tokens


def tick_shapes(lengths: Sequence[int], multiple: int, most: int = MOST_SHAPES) -> tuple[int, ...]:
    """Returns the shapes that pad chunks least, each rounded up to the least shape that holds it.

    The longest chunk is a shape, and so is each other one that helps: between two lengths a shape pads more than the
    lower one. Found by dynamic programming over the distinct lengths.

    Args:
        lengths: tokens of each chunk.
        multiple: tokens that each shape is a multiple of.
        most: the most shapes.

    Returns:
        The shapes, rising; with as few as pad least.
    """
    rounded = [-(-tokens // multiple) * multiple for tokens in lengths]
    values = sorted(set(rounded))
    if len(values) <= most:
        return tuple(values)
    number, tokens_of = [0], [0]  # chunks with the first so many values, and their tokens
    for value in values:
        count = rounded.count(value)
        number.append(number[-1] + count)
        tokens_of.append(tokens_of[-1] + count * value)

    def padding(start: int, stop: int) -> int:
        """Returns the padding of the values from start to stop in the shape of the last of them."""
        return (number[stop] - number[start]) * values[stop - 1] - (tokens_of[stop] - tokens_of[start])

    # Of the first so many values: the least padding with one shape more each round, and where the last shape begins.
    least = [padding(0, stop) for stop in range(len(values) + 1)]
    begins = [[0] * (len(values) + 1)]
    for _ in range(most - 1):
        least, found = _one_more(least, padding)
        begins.append(found)
    shapes, stop = [], len(values)
    while stop:
        shapes.append(values[stop - 1])
        stop = begins.pop()[stop]
    return tuple(reversed(shapes))


def _one_more(least: list[int], padding: Callable[[int, int], int]) -> tuple[list[int], list[int]]:
    """Returns the least padding with one shape more, and where the last shape begins, for each number of values.

    The best begin does not fall as the number grows, so that halves need only look on their side of it.
    """
    grown, begins = list(least), [0] * len(least)
    parts = [(1, len(least) - 1, 0, len(least) - 1)]
    while parts:
        low, high, first, last = parts.pop()
        if low > high:
            continue
        stop = (low + high) // 2
        grown[stop], begins[stop] = min(
            (least[start] + padding(start, stop), start) for start in range(first, min(last, stop - 1) + 1)
        )
        parts += [(low, stop - 1, first, begins[stop]), (stop + 1, high, begins[stop], last)]
    return grown, begins
