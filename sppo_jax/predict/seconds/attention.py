"""Seconds of attention in a unit: the (query, key) pairs that a kernel takes the time of for a chunk."""

import math
from collections.abc import Callable
from typing import NamedTuple, Protocol

from sppo_jax.hardware import Cluster
from sppo_jax.hardware.attention_rates import WAYS
from sppo_jax.hardware.measured_figures import block_pairs
from sppo_jax.models.counts import chunk_pairs
from sppo_jax.predict.seconds.documents import PairCounts
from sppo_jax.predict.seconds.tpu_attention import TpuCall, tpu_pairs
from sppo_jax.program.ring import Ring

# What the fused kernel takes longer than its pairs, as keys of each query: the wait for the longest diagonal tiles (in
# waves), and in backward the start and the end of each tile (in tokens). Fitted on the kernel benchmarks that
# `hardware/datasheets.py` names.
_TAIL_WAVES, _BACKWARD_TOKENS = 0.75, 160


class AttentionOfType(NamedTuple):
    """Attention of the layers of one type.

    Attributes:
        share: of all layers, those of the type.
        pair_flops: FLOPs of a query and a key that it attends to, over all heads.
        num_heads: query heads.
        head_dim: elements of a head.
        kv_width: elements of a token's keys over all devices, replicated where `ulysses` needs it.
        window: tokens that a token attends to; 0: all before it.
    """

    share: float
    pair_flops: float
    num_heads: int
    head_dim: int
    kv_width: int
    window: int


class Costs(Protocol):
    """What attention's seconds depend on of a `CostModel`, which says what each is."""

    @property
    def cluster(self) -> Cluster: ...

    @property
    def ring(self) -> Ring: ...

    @property
    def ulysses(self) -> int: ...

    @property
    def compute_bytes(self) -> int: ...

    @property
    def has_bundles(self) -> bool: ...

    @property
    def attended(self) -> PairCounts | None: ...

    @property
    def backward_queries(self) -> int: ...

    def wave_tokens(self, layer_type: AttentionOfType) -> float: ...

    def pair_s_of(self, layer_type: AttentionOfType) -> float: ...

    def backward_times(self, layer_type: AttentionOfType) -> float: ...


def attention_seconds(costs: Costs, layer_type: AttentionOfType, unit: str) -> Callable[[int, int, float], float]:
    """Returns the seconds of a type's attention in a unit; of a backward the last argument says how often a forward is.

    Args:
        costs: seconds of units.
        layer_type: of attention.
        unit: "F" or "B".
    """
    pair_s, pairs_of, backward = (
        costs.pair_s_of(layer_type),
        kernel_pairs(costs, layer_type),
        costs.backward_times(layer_type),
    )
    slower = _slower(costs, layer_type)

    def seconds(start: int, tokens: int, again_times: float) -> float:
        pairs, back_pairs = pairs_of(start, tokens)
        if slower is not None:
            pairs, back_pairs = pairs * slower("forward", start, tokens), back_pairs * slower("backward", start, tokens)
        if unit == "B":
            pairs = backward * back_pairs + again_times * pairs
        return pair_s * pairs

    return seconds


def _slower(costs: Costs, layer_type: AttentionOfType) -> Callable[[str, int, int], float] | None:
    """Returns how often as long as at the fastest measured rate a chunk's attention takes; None without such rates.

    What it returns takes the way, the tokens before the chunk, and those of the chunk. Windows have their own rate.
    """
    rates, members = costs.cluster.device.attention_rates, costs.ring.members
    if rates is None or layer_type.window or costs.has_bundles:
        return None
    fastest = {way: rates.fastest(way) for way in WAYS}
    most = {"forward": math.inf, "backward": costs.backward_queries or math.inf}

    def times(way: str, start: int, tokens: int) -> float:
        return fastest[way] / rates.flops_s(way, min(tokens / members, most[way]), (start + tokens) / members)

    return times


def kernel_pairs(costs: Costs, layer_type: AttentionOfType) -> Callable[[int, int], tuple[float, float]]:
    """Returns the (query, key) pairs that a type's kernel takes the time of for a chunk, forward and backward.

    The blockwise kernel computes whole blocks. The fused kernel's forward deals tiles of queries to the compute
    units. Tiles that meet the whole prefix take equally long, so a last wave of tiles that is not full takes as
    long as a full one. Tiles on the diagonal differ, and the kernel waits for the longest. The fused backward deals
    tiles of keys, of which a long prefix has enough.

    Where sequences hold several documents, no kernel takes the pairs of two documents. What a kernel takes for the
    edges of its mask stays: every document has a diagonal.
    """
    pairs_of, attended, window = _pairs_of_one(costs, layer_type), costs.attended, layer_type.window
    if attended is None or costs.has_bundles:
        return pairs_of
    attended_pairs, wave = attended.pairs, costs.wave_tokens(layer_type)

    def pairs(start: int, tokens: int) -> tuple[float, float]:
        whole, left = chunk_pairs(start, tokens, window), attended_pairs(start, tokens, window)
        forward, backward = pairs_of(start, tokens)
        if wave and whole:
            # Of the prefix the last wave meets what the first document of the chunk has of it.
            forward -= (1 - left / whole) * (math.ceil(tokens / wave) * wave - tokens) * start
        return max(left, forward - whole + left), max(left, backward - whole + left)

    return pairs


def _pairs_of_one(costs: Costs, layer_type: AttentionOfType) -> Callable[[int, int], tuple[float, float]]:
    """Returns the pairs that a kernel takes the time of, those of two documents too but for the kernel for TPUs."""
    if costs.has_bundles:
        num_kv_heads = layer_type.kv_width // layer_type.head_dim
        call = TpuCall(
            head_dim=layer_type.head_dim,
            num_kv_heads=num_kv_heads // costs.ulysses,
            num_groups=max(1, layer_type.num_heads // num_kv_heads),
            window=layer_type.window,
            members=costs.ring.members,
            compute_bytes=costs.compute_bytes,
        )
        return tpu_pairs(costs.cluster.device, call, costs.attended)
    # Every ring member has its own blocks, of tokens that lie `ring` apart.
    block, window = costs.cluster.device.attention_block * costs.ring.members, layer_type.window
    wave = costs.wave_tokens(layer_type)
    if block:
        return lambda start, tokens: (block_pairs(start, tokens, block, window),) * 2
    if not wave:
        return lambda start, tokens: (chunk_pairs(start, tokens, window),) * 2
    tail, ceil = _TAIL_WAVES * wave, math.ceil

    def pairs(start: int, tokens: int) -> tuple[float, float]:
        counted = chunk_pairs(start, tokens) + tail * tokens
        unfilled = ceil(tokens / wave) * wave - tokens
        return counted + unfilled * start, counted + _BACKWARD_TOKENS * tokens

    return pairs
