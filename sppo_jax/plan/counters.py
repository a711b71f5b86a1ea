"""Which rows on the host the counter of a loop tells, and how: as a line, or only by a table of all turns."""

from collections.abc import Mapping, Sequence

import numpy as np

from sppo_jax.plan.fold import Loop, of_bodies, unfold
from sppo_jax.plan.tick_rows import HOST_ROWS

# XLA for GPUs writes tables of at most so many turns (measured on jaxlib 0.12.0.1).
MOST_TURNS = 1024


def numbers_of_turns(values: np.ndarray) -> np.ndarray | None:
    """Returns the number of each turn of the innermost loop.

    Args:
        values: of all runs of a tick, [turns of each loop around, outermost first, stages].

    Returns:
        [turns]; None where the counter of the innermost loop alone does not tell the number, or no loop is around.
    """
    if values.ndim == 1:
        return None
    turns = values.reshape(-1, *values.shape[-2:])
    return None if (turns != turns[:1, :, :1]).any() else turns[0, :, 0]


def step_of(numbers: np.ndarray) -> int | None:
    """Returns by how much a number grows each turn; None where that differs, so that the numbers are no line."""
    steps = np.diff(numbers)
    if not steps.size:
        return 0
    return int(steps[0]) if (steps == steps[0]).all() else None


def needs_tables(items: Sequence, rows: Mapping[str, np.ndarray]) -> bool:
    """Returns whether a tick copies a row on the host that a counter tells, but not as a line.

    Args:
        items: nested loops of ticks, from `fold`.
        rows: of these ticks, for each of `tick_rows.FIELDS` [ticks, stages].
    """
    found = [numbers_of_turns(values) for name in HOST_ROWS for values in of_bodies(items, rows[name])]
    return any(numbers is not None and step_of(numbers) is None for numbers in found)


def with_short_loops(items: Sequence, rows: Mapping[str, np.ndarray]) -> tuple:
    """Cuts loops whose rows need a table into loops of at most MOST_TURNS turns; arguments as `needs_tables`."""
    found: list = []
    place = 0
    for item in items:
        length = len(unfold([item]))
        of_item = {name: value[place : place + length] for name, value in rows.items()}
        place += length
        if isinstance(item, Loop) and item.count > MOST_TURNS and needs_tables([item], of_item):
            parts = -(-item.count // MOST_TURNS)
            ends = [item.count * part // parts for part in range(parts + 1)]
            found += [Loop(end - start, item.body) for start, end in zip(ends, ends[1:], strict=False)]
        else:
            found.append(item)
    return tuple(found)
