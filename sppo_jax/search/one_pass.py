"""Queries on the ring in every tick, where a breadth-first plan has fewer bodies of ticks for it and loses no time.

Up to 0.1% of a step counts as no time.

By itself a ring sends the fewer bytes tick by tick: keys and values where prefixes are short, then queries. So a pass
of a group of layers has ticks of several bodies and is a loop of loops. Such a program takes longer to compile. On GPUs
kernels copy its stash and not DMA engines, because the counter of one loop does not tell the row on the host.
"""

from dataclasses import replace

from sppo_jax.rules import BREADTH_FIRST
from sppo_jax.search.because import Because
from sppo_jax.search.bodies import bodies_of
from sppo_jax.search.evaluate import Outcome, evaluate

# By what share of itself a step may last longer for fewer bodies.
_MOST_LONGER = 0.001


def with_queries_on_the_ring(chosen: Outcome, limit_s: float) -> tuple[Outcome, str]:
    """Lets queries travel in every tick, where the step then is a tie and its program has fewer bodies of ticks.

    Args:
        chosen: the plan that the search chose.
        limit_s: seconds of the longest step that ties with the fastest one.

    Returns:
        The outcome, with the reason; the given one and no reason where nothing is gained.
    """
    choice, layout = chosen.choice, chosen.choice.layout
    request, sequence = layout.request, layout.request.config.sequence
    is_open = choice.schedule == BREADTH_FIRST and layout.split.ring > 1 and sequence.ring_pass == "auto"
    if not is_open or not chosen.memory.fits(request.cluster):
        return chosen, ""
    config = replace(request.config, sequence=replace(sequence, ring_pass="q"))
    found = evaluate(replace(choice, layout=replace(layout, request=replace(request, config=config))))
    is_tie = found.step_s <= min(limit_s, chosen.step_s * (1 + _MOST_LONGER))
    if not is_tie or not found.memory.fits(request.cluster) or bodies_of(found) >= bodies_of(chosen):
        return chosen, ""
    change = found.step_s / chosen.step_s - 1
    return found, Because.QUERIES_ON_RING(change=change, fewer=bodies_of(found), more=bodies_of(chosen))
