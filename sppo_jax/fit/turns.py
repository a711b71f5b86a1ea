"""How often the loops that gather weights, scatter sums, or compute attention again have their one turn.

A program's text does not say.
"""

from collections import Counter

from sppo_jax.program.fold import of_bodies
from sppo_jax.program.program import Program
from sppo_jax.program.tick_rows import FLAGS

# The scope of the loop of each flag of a row, by which the text of a compiled program names it.
SCOPES = {"weights.gathers": "gather_turn", "weights.scatters": "scatter_turn", "stash.attends_again": "attention_turn"}


def turn_shares(program: Program) -> dict[str, float]:
    """Returns by the scope of each such loop the share of its ticks in which it has a turn, over the whole step.

    A tick that has a turn at each of its runs, or at none, has no loop.
    """
    ticks, turns = Counter(), Counter()
    for name in FLAGS:
        for values in of_bodies(program.items, program.rows[name][:, :1]):
            if (values != values.flat[0]).any():
                ticks[name] += values.size
                turns[name] += int(values.sum())
    return {SCOPES[name]: turns[name] / count for name, count in ticks.items()}
