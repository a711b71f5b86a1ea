"""What a plan gets behind the search: attention outputs of late chunks, and fewer bodies of ticks to compile.

The attention outputs of a chunk take the same memory wherever the chunk lies in the sequence, but the time to compute
them grows with the chunk's prefix. The last 38% of the chunks, of equal length, have 62% of the (query, key) pairs. So
the chunks whose attention takes longest to compute again get the memory that is left.

Chunks of equal cost may have so many tick shapes that their program has too many bodies. And by itself a ring sends the
fewer bytes tick by tick: keys and values where prefixes are short, then queries. So a pass of a group of layers has
ticks of several bodies and is a loop of loops. Such a program takes longer to compile. On GPUs kernels copy its stash
and not DMA engines, because the counter of one loop does not tell the row on the host.
"""

from bisect import bisect_left
from dataclasses import replace
from functools import cache

from sppo_jax.program.program import num_bodies
from sppo_jax.search.because import Because
from sppo_jax.search.evaluate import Outcome, Sized, evaluate, outline_of, size
from sppo_jax.search.space.partitions import Partition, chunk_counts

# The most bodies that chunks of equal cost may have, for one of equal chunks.
MOST_TIMES = 3
# By what share of itself a step may last longer for queries on the ring in every tick.
_MOST_LONGER = 0.001


def late_attention_is_open(chosen: Outcome) -> bool:
    """Returns whether a plan could stash attention outputs of late chunks: breadth-first, and it computes all again."""
    candidate, request = chosen.candidate, chosen.candidate.layout.request
    open_to = request.config.stash.attention == "auto" and request.config.sequence.groups == "static"
    inputs, attention, rest = candidate.places
    stashes = (attention, rest) == ("recompute", "recompute") and inputs != "recompute"
    return candidate.partition.is_breadth_first and open_to and stashes and chosen.memory.fits(request.cluster)


def with_late_attention(chosen: Outcome) -> tuple[Outcome, str]:
    """Stashes the attention outputs of as many late chunks as there is memory for, where this makes a step shorter.

    Only where a breadth-first plan that fits stashes layer inputs and leaves the place of attention outputs open. Fewer
    chunks take less memory, and a chunk pays less the earlier it is, so that a bisection finds the first chunk.

    Args:
        chosen: the plan that the search chose; backward computes all attention again.

    Returns:
        The outcome, with the reason; the given one and no reason where nothing is gained.
    """
    if not late_attention_is_open(chosen):
        return chosen, ""
    candidate, (inputs, _, rest) = chosen.candidate, chosen.candidate.places
    num_chunks, attention = len(candidate.partition.chunk_lengths), "keep" if inputs == "keep" else "host"

    @cache
    def late(first: int) -> Sized:
        return size(candidate._replace(places=(inputs, attention, rest), attention_from=first))

    def fits(first: int) -> bool:
        fitting = late(first).memory.fits(candidate.layout.request.cluster)
        return fitting and (late(first).all_away or not chosen.all_away)

    @cache
    def from_chunk(first: int) -> Outcome:
        return evaluate(late(first).candidate, late(first))

    def pays(first: int) -> bool:
        """Whether a chunk is worth its copies."""
        return first == num_chunks - 1 or from_chunk(first).step_s <= from_chunk(first + 1).step_s

    first = bisect_left(range(num_chunks), True, lo=1, key=fits)
    if first < num_chunks and not pays(first):
        first = bisect_left(range(num_chunks), True, lo=first + 1, key=pays)
    if first == num_chunks or from_chunk(first).step_s >= chosen.step_s:
        return chosen, ""
    found = from_chunk(first)
    gain, count = 1 - found.step_s / chosen.step_s, num_chunks - first
    chunks = f"the last of {num_chunks} chunks" if count == 1 else f"the last {count} of {num_chunks} chunks"
    return found, Because.LATE(chunks=chunks, gain=gain, whom=candidate.layout.request.whom)


def with_queries_on_the_ring(chosen: Outcome, limit_s: float) -> tuple[Outcome, str]:
    """Lets queries travel in every tick, where the step then is a tie and its program has fewer bodies of ticks.

    Only in a breadth-first plan, and for at most 0.1% of a step.

    Args:
        chosen: the plan that the search chose.
        limit_s: seconds of the longest step that ties with the fastest one.

    Returns:
        The outcome, with the reason; the given one and no reason where nothing is gained.
    """
    candidate, layout = chosen.candidate, chosen.candidate.layout
    config, cluster = layout.request.config, layout.request.cluster
    is_open = candidate.partition.is_breadth_first and layout.split.ring > 1 and config.sequence.ring_pass == "auto"
    if not is_open or not chosen.memory.fits(cluster):
        return chosen, ""
    found = evaluate(candidate._replace(ring_pass="q"))
    is_tie = found.step_s <= min(limit_s, chosen.step_s * (1 + _MOST_LONGER))
    if not is_tie or not found.memory.fits(cluster) or (fewer := bodies_of(found)) >= (more := bodies_of(chosen)):
        return chosen, ""
    change = found.step_s / chosen.step_s - 1
    return found, Because.QUERIES_ON_RING(change=change, fewer=fewer, more=more, whom=layout.request.whom)


def with_fewer_bodies(outcome: Outcome) -> Outcome:
    """Returns the outcome of chunks of equal cost in as many tick shapes as its bodies of ticks allow.

    It has at most MOST_TIMES the bodies of about as many equal chunks on the same layout, as far as fewer shapes fit
    in memory and have fewer bodies.
    """
    candidate, partition = outcome.candidate, outcome.candidate.partition
    equal = candidate._replace(partition=_in_equal_chunks(partition))
    limit = MOST_TIMES * bodies_of(evaluate(equal))
    while len(shapes := outcome.candidate.partition.shapes) > 1 and bodies_of(outcome) > limit:
        fewer = candidate._replace(partition=replace(partition, most_shapes=len(shapes) - 1))
        sized = size(fewer)
        if not sized.memory.fits(candidate.layout.request.cluster):
            break
        outcome = evaluate(fewer, sized)
    return outcome


def bodies_of(outcome: Outcome) -> int:
    """Returns the bodies of ticks that the program of an outcome compiles; what sequences repeat is counted once."""
    candidate, layout = outcome.candidate, outcome.candidate.layout
    ring = layout.costs(candidate.places, ring_pass=candidate.ring_pass).ring
    return num_bodies(outline_of(candidate), outcome.stash, ring, layout.mesh.seq, layout.weights)


def _in_equal_chunks(partition: Partition) -> Partition:
    """Returns a partition of the nearest number of chunks that cuts the sequence evenly, or as evenly as can be."""
    layout, count = partition.layout, partition.num_chunks
    units = layout.request.config.sequence.length // layout.multiple_tokens
    counts = [one for one in chunk_counts(layout) if units % one == 0] or [count]
    nearest = min(counts, key=lambda one: max(one, count) / min(one, count))
    return replace(partition, num_chunks=nearest, balance="equal", longest=0.0)
