"""Attention outputs of late chunks: those whose attention takes longest to compute again get the memory that is left.

The attention outputs of a chunk take the same memory wherever the chunk lies in the sequence, but the time to compute
them grows with the chunk's prefix. The last 38% of the chunks, of equal length, have 62% of the (query, key) pairs.
"""

from bisect import bisect_left
from dataclasses import replace
from functools import cache

from sppo_jax.rules import BREADTH_FIRST
from sppo_jax.search.because import Because
from sppo_jax.search.evaluate import Choice, Outcome, evaluate, size
from sppo_jax.search.request import Request


def late_attention_is_open(request: Request, chosen: Outcome) -> bool:
    """Returns whether a plan could stash attention outputs of late chunks: breadth-first, and it computes all again."""
    choice = chosen.choice
    open_to = request.config.stash.attention == "auto" and request.config.sequence.groups == "static"
    inputs, attention, rest = choice.places
    stashes = (attention, rest) == ("recompute", "recompute") and inputs != "recompute"
    return choice.schedule == BREADTH_FIRST and open_to and stashes and chosen.memory.fits(request.cluster)


def with_late_attention(request: Request, chosen: Outcome) -> tuple[Outcome, str]:
    """Stashes the attention outputs of as many late chunks as there is memory for, where this makes a step shorter.

    Only where a breadth-first plan that fits stashes layer inputs and leaves the place of attention outputs open. Fewer
    chunks take less memory, and a chunk pays less the earlier it is, so that a bisection finds the first chunk.

    Args:
        request: what was asked for.
        chosen: the plan that the search chose; backward computes all attention again.

    Returns:
        The outcome, with the reason; the given one and no reason where nothing is gained.
    """
    if not late_attention_is_open(request, chosen):
        return chosen, ""
    choice, (inputs, _, rest) = chosen.choice, chosen.choice.places
    num_chunks = len(choice.chunk_lengths)

    def late(first: int) -> Choice:
        return replace(choice, places=(inputs, inputs, rest), attention_from=first)

    def fits(first: int) -> bool:
        sized = size(late(first))
        return sized.memory.fits(request.cluster) and (sized.all_away or not chosen.all_away)

    @cache
    def from_chunk(first: int) -> Outcome:
        return evaluate(late(first))

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
    return found, Because.LATE(chunks=chunks, gain=gain)
