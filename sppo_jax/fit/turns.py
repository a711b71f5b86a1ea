"""How often the loops that gather weights, scatter sums, attend again or run a pattern of layers have their one turn.

A program's text does not say.
"""

from collections import Counter

from sppo_jax.program.fold import of_bodies
from sppo_jax.program.program import Program
from sppo_jax.program.tick_rows import FLAGS, PATTERNS

# The scope of the loop of each flag of a row, which the text of a compiled program has; those of patterns are numbered.
SCOPES = {"weights.gathers": "gather_turn", "weights.scatters": "scatter_turn", "stash.attends_again": "attention_turn"}


def turn_shares(program: Program) -> dict[str, float]:
    """Returns by the scope of each such loop the share of its ticks in which it has a turn, over the whole step.

    A tick that has a turn at each of its runs, or at none, has no loop.
    """
    ticks, turns = Counter(), Counter()
    for name in FLAGS:
        for values in of_bodies(program.items, program.rows[name][:, :1]):
            if (values == values.flat[0]).all():
                continue
            scopes = {f"{name}_{i}_turn": i for i in range(program.rows[name].max() + 1)}
            for scope, number in scopes.items() if name in PATTERNS else [(SCOPES[name], 1)]:
                ticks[scope] += values.size
                turns[scope] += int((values == number).sum())
    return {scope: turns[scope] / count for scope, count in ticks.items()}
