"""Seconds of one unit of a schedule, as functions of its chunk with all else worked out beforehand.

The search asks for the seconds of hundreds of thousands of chunks. So what does not depend on the chunk is a constant
of the function. Every function takes the same arguments:

    start: tokens of the sequence before the chunk.
    tokens: tokens of the chunk.
    padded: tokens of the tick, where it is longer than the chunk; else at most `tokens`.
    reach: tokens of the sequence up to the end of the tick's furthest chunk, where that is another one.
    has_ends: whether the tick may meet the vocabulary (`plan.table.TickShape`).
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from sppo_jax.hardware.measured_figures import block_pairs
from sppo_jax.models.counts import chunk_pairs

if TYPE_CHECKING:
    from sppo_jax.planner.costs import CostModel

# What the fused kernel takes longer than its pairs, as keys of each query: the wait for the longest diagonal tiles (in
# waves), and in backward the start and the end of each tile (in tokens). Fitted on the kernel benchmarks that
# `hardware/cluster.py` names.
_TAIL_WAVES, _BACKWARD_TOKENS = 0.75, 160

UnitSeconds = Callable[..., float]


def whole_seconds(costs: "CostModel", kind: str) -> UnitSeconds:
    """Returns the seconds of a unit of a kind: its compute, what it sends, and what any tick takes."""
    compute_s, transfer_s = costs.compute_of[kind], costs.transfer_of[kind]
    overhead_s = costs.cluster.device.overhead_s

    def seconds(start: int, tokens: int, padded: int = 0, reach: int = 0, has_ends: bool = True) -> float:
        sent_s = transfer_s(start, tokens, padded, reach, has_ends)
        return compute_s(start, tokens, padded, reach, has_ends) + sent_s + overhead_s

    return seconds


def compute_seconds(costs: "CostModel", kind: str) -> UnitSeconds:
    """Returns the seconds in which a unit of a kind computes."""
    device, seq = costs.cluster.device, costs.mesh.seq
    linear_s, pair_s = costs.token_s(kind), costs.pair_s(kind)
    extra_s = linear_s * device.overhead_tokens  # a short matmul waits for its weights, as if it had some tokens more
    linear_s /= seq

    def head_seconds(start: int, tokens: int, padded: int = 0, reach: int = 0, has_ends: bool = True) -> float:
        return linear_s * max(tokens, padded) + extra_s

    if kind == "H":
        return head_seconds
    once, again = ([amount / device.hbm_bytes_s for amount in costs.memory_bytes(kind, one)] for one in (False, True))
    recomputes, recompute_reach = costs.recompute_attention, costs.recompute_reach
    pairs_of, backward = kernel_pairs(costs), device.attention_backward

    def seconds(start: int, tokens: int, padded: int = 0, reach: int = 0, has_ends: bool = True) -> float:
        end = start + tokens
        recomputed = recomputes and max(end, reach) <= recompute_reach
        prefix_s, fixed_s = again if recomputed else once
        pairs, back_pairs = pairs_of(start, tokens)
        if kind == "B":
            pairs = backward * back_pairs + (pairs if recomputed else 0.0)
        linear = linear_s * (tokens if tokens > padded else padded)
        return linear + extra_s + prefix_s * end + fixed_s + pair_s * pairs

    return seconds


def kernel_pairs(costs: "CostModel") -> Callable[[int, int], tuple[float, float]]:
    """Returns the (query, key) pairs that the kernel takes the time of for a chunk, forward and backward.

    The blockwise kernel computes whole blocks. The fused kernel's forward deals tiles of queries to the compute
    units. Tiles that meet the whole prefix take equally long, so a last wave of tiles that is not full takes as
    long as a full one. Tiles on the diagonal differ, and the kernel waits for the longest. The fused backward deals
    tiles of keys, of which a long prefix has enough.
    """
    # Every ring member has its own blocks, of tokens that lie `ring` apart.
    block, wave = costs.cluster.device.attention_block * costs.ring.members, costs.wave_tokens
    if block:
        return lambda start, tokens: (block_pairs(start, tokens, block),) * 2
    if not wave:
        return lambda start, tokens: (chunk_pairs(start, tokens),) * 2
    tail, ceil = _TAIL_WAVES * wave, math.ceil

    def pairs(start: int, tokens: int) -> tuple[float, float]:
        counted = chunk_pairs(start, tokens) + tail * tokens
        unfilled = ceil(tokens / wave) * wave - tokens
        return counted + unfilled * start, counted + _BACKWARD_TOKENS * tokens

    return pairs


def transfer_seconds(costs: "CostModel", kind: str) -> UnitSeconds:
    """Returns the seconds in which a unit of a kind sends to other devices.

    That is the all-to-all of ulysses and the hops of the ring in every layer, the hop to the next stage, and the
    sums over the stages: the head's, and where a tick has ends those of the embedding and of both gradients; and
    tables that are gathered and scattered. Copies to the host are not in it: they hide.
    """
    seq, layers, link = costs.mesh.seq, costs.layers, costs.cluster.link_bytes_s(costs.mesh.seq)
    recomputes, recompute_reach = costs.recompute_attention, costs.recompute_reach
    by_again = {ends: [costs.token_transfer_s[kind, ends, again] for again in (False, True)] for ends in (False, True)}
    rates = {ends: [rate / seq for rate in of_again] for ends, of_again in by_again.items()}
    table_s, on_ring = costs.table_s[kind], costs.ring.members > 1 and kind != "H"

    def seconds(start: int, tokens: int, padded: int = 0, reach: int = 0, has_ends: bool = True) -> float:
        reach = max(start + tokens, reach)
        longer = tokens if tokens > padded else padded
        sent_s = rates[has_ends][recomputes and reach <= recompute_reach] * longer
        if has_ends or kind == "H":
            sent_s += table_s
        if on_ring:
            sent_s += layers * costs.ring_bytes(kind, math.ceil(longer / seq), reach) / link
        return sent_s

    return seconds
