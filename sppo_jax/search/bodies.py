"""Fewer tick shapes for chunks of equal cost, where their program would have too many bodies of ticks to compile."""

from dataclasses import replace

from sppo_jax.program.program import num_bodies
from sppo_jax.schedule.shapes import tick_shapes
from sppo_jax.search.chunks import equal_lengths
from sppo_jax.search.evaluate import Choice, Outcome, evaluate, outline_of
from sppo_jax.search.space import chunk_counts

# The most bodies that chunks of equal cost may have, for one of equal chunks.
MOST_TIMES = 3


def with_fewer_bodies(outcome: Outcome) -> Outcome:
    """Returns the outcome of chunks of equal cost in as many tick shapes as its bodies of ticks allow.

    It has at most MOST_TIMES the bodies of about as many equal chunks on the same layout, as far as fewer shapes fit
    in memory and have fewer bodies.
    """
    choice, multiple = outcome.choice, outcome.choice.layout.multiple_tokens
    limit = MOST_TIMES * bodies_of(evaluate(_in_equal_chunks(choice)))
    while len(outcome.choice.shapes) > 1 and bodies_of(outcome) > limit:
        shapes = tick_shapes(choice.chunk_lengths, multiple, len(outcome.choice.shapes) - 1)
        fewer = evaluate(replace(choice, shapes=shapes))
        if not fewer.memory.fits(choice.layout.request.cluster):
            break
        outcome = fewer
    return outcome


def bodies_of(outcome: Outcome) -> int:
    """Returns the bodies of ticks that the program of an outcome compiles; what sequences repeat is counted once."""
    choice = outcome.choice
    layout, ring = choice.layout, choice.layout.costs(choice.places).ring
    return num_bodies(outline_of(choice), outcome.stash, ring, layout.mesh.seq, layout.weights)


def _in_equal_chunks(choice: Choice) -> Choice:
    """Returns a choice with the nearest number of chunks that cuts the sequence evenly, or as evenly as it can be."""
    layout, count = choice.layout, len(choice.chunk_lengths)
    length, multiple = layout.request.config.sequence.length, layout.multiple_tokens
    counts = [one for one in chunk_counts(layout) if length // multiple % one == 0] or [count]
    nearest = min(counts, key=lambda one: max(one, count) / min(one, count))
    return replace(choice, chunk_lengths=equal_lengths(length, nearest, multiple), shapes=())
