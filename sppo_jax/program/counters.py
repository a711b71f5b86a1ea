"""How a row on the host follows from the counter of a loop: an affine function, or a lookup table of all iterations."""

from collections.abc import Mapping, Sequence

import numpy as np

from sppo_jax.program.fold import Loop, in_iterations, of_bodies, unfold
from sppo_jax.program.tick_rows import HOST_ROWS

# XLA for GPUs writes lookup tables of at most so many iterations (measured on jaxlib 0.12.0.1).
MOST_ITERATIONS = 1024


def numbers_of_iterations(values: np.ndarray) -> np.ndarray | None:
    """Returns the number of each iteration of the innermost loop.

    Args:
        values: of all runs of a tick, [iterations of each loop around, outermost first, stages].

    Returns:
        [iterations]; None where the number depends on more than the counter of the innermost loop, or no loop is
        around.
    """
    if values.ndim == 1:
        return None
    iterations = values.reshape(-1, *values.shape[-2:])
    return None if (iterations != iterations[:1, :, :1]).any() else iterations[0, :, 0]


def step_of(numbers: np.ndarray) -> int | None:
    """Returns by how much a number grows each iteration; None where that differs: the numbers are not affine."""
    steps = np.diff(numbers)
    if not steps.size:
        return 0
    return int(steps[0]) if (steps == steps[0]).all() else None


def needs_tables(items: Sequence, rows: Mapping[str, np.ndarray]) -> bool:
    """Returns whether a tick copies a row on the host that follows from a counter by a lookup table alone.

    Args:
        items: nested loops of ticks, from `fold`.
        rows: of these ticks, for each of `tick_rows.FIELDS` [iterations of each loop around all of them, ticks,
            stages].
    """
    return any(_is_table(values) for name in HOST_ROWS for values in of_bodies(items, rows[name]))


def with_short_loops(items: Sequence, rows: Mapping[str, np.ndarray]) -> tuple:
    """Cuts loops whose rows need a lookup table to at most MOST_ITERATIONS each; arguments as `needs_tables`."""
    found: list = []
    place = 0
    for item in items:
        length = len(unfold([item]))
        of_item = {name: rows[name][..., place : place + length, :] for name in HOST_ROWS}
        place += length
        found += _cut(item, of_item) if isinstance(item, Loop) else [item]
    return tuple(found)


def _cut(loop: Loop, rows: Mapping[str, np.ndarray]) -> list[Loop]:
    iterations = {name: in_iterations(loop, values) for name, values in rows.items()}
    body = with_short_loops(loop.body, iterations)
    ticks = [place for place, item in enumerate(_by_ticks(loop.body)) if not isinstance(item, Loop)]
    tables = any(_is_table(values[..., place, :]) for values in iterations.values() for place in ticks)
    parts = -(-loop.count // MOST_ITERATIONS) if tables else 1
    ends = [loop.count * part // parts for part in range(parts + 1)]
    return [Loop(end - start, body) for start, end in zip(ends, ends[1:], strict=False)]


def _by_ticks(body: Sequence) -> list:
    """Returns for each tick of a loop's body the item of the body that it belongs to."""
    return [item for item in body for _ in unfold([item])]


def _is_table(values: np.ndarray) -> bool:
    numbers = numbers_of_iterations(values)
    return numbers is not None and step_of(numbers) is None
