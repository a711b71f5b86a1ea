"""Which rows on the host the counter of a loop tells, and how: as a line, or only by a table of all turns."""

from collections.abc import Mapping, Sequence

import numpy as np

from sppo_jax.program.fold import Loop, in_turns, of_bodies, unfold
from sppo_jax.program.tick_rows import HOST_ROWS

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
        rows: of these ticks, for each of `tick_rows.FIELDS` [turns of each loop around all of them, ticks, stages].
    """
    return any(_is_table(values) for name in HOST_ROWS for values in of_bodies(items, rows[name]))


def with_short_loops(items: Sequence, rows: Mapping[str, np.ndarray]) -> tuple:
    """Cuts loops whose rows need a table into loops of at most MOST_TURNS turns; arguments as `needs_tables`."""
    found: list = []
    place = 0
    for item in items:
        length = len(unfold([item]))
        of_item = {name: rows[name][..., place : place + length, :] for name in HOST_ROWS}
        place += length
        found += _cut(item, of_item) if isinstance(item, Loop) else [item]
    return tuple(found)


def _cut(loop: Loop, rows: Mapping[str, np.ndarray]) -> list[Loop]:
    turns = {name: in_turns(loop, values) for name, values in rows.items()}
    body = with_short_loops(loop.body, turns)
    ticks = [place for place, item in enumerate(_by_ticks(loop.body)) if not isinstance(item, Loop)]
    tables = any(_is_table(values[..., place, :]) for values in turns.values() for place in ticks)
    parts = -(-loop.count // MOST_TURNS) if tables else 1
    ends = [loop.count * part // parts for part in range(parts + 1)]
    return [Loop(end - start, body) for start, end in zip(ends, ends[1:], strict=False)]


def _by_ticks(body: Sequence) -> list:
    """Returns for each tick of a loop's body the item of the body that it belongs to."""
    return [item for item in body for _ in unfold([item])]


def _is_table(values: np.ndarray) -> bool:
    numbers = numbers_of_turns(values)
    return numbers is not None and step_of(numbers) is None
