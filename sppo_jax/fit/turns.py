"""How often the loops that gather weights, scatter sums, or compute attention again have their one turn.

A program's text does not say.
"""

from collections import Counter

import numpy as np

from sppo_jax.plan.fold import Loop, unfold
from sppo_jax.plan.program import Program
from sppo_jax.plan.tick_rows import FLAGS

# The scope of the loop of each flag of a row, by which the text of a compiled program names it.
SCOPES = {"gathers": "gather_turn", "scatters": "scatter_turn", "attends_again": "attention_turn"}


def turn_shares(program: Program) -> dict[str, float]:
    """Returns by the scope of each such loop the share of its ticks in which it has a turn, over the whole step.

    A tick that has a turn at each of its runs, or at none, has no loop.
    """
    ticks, turns = Counter(), Counter()
    for name in FLAGS:
        for values in _of_segments(program.items, program.rows[name][:, 0]):
            if (values != values[0]).any():
                ticks[name] += values.size
                turns[name] += int(values.sum())
    return {SCOPES[name]: turns[name] / count for name, count in ticks.items()}


def _of_segments(items: tuple, values: np.ndarray) -> list[np.ndarray]:
    """Returns for each body of a tick the values of all its runs; `values` has [turns of loops around, ticks]."""
    values, found, place = values.reshape(-1, values.shape[-1]), [], 0
    for item in items:
        length = len(unfold([item]))
        part = values[:, place : place + length]
        place += length
        if isinstance(item, Loop):
            found += _of_segments(item.body, part.reshape(-1, length // item.count))
        else:
            found.append(part.reshape(-1))
    return found
