"""What a mixer with a state takes of a token, keeps of a sequence and gives, by heads; counts, no jax."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from sppo_jax.config import ModelConfig


class HeadArrays(NamedTuple):
    """Arrays of one number of heads.

    Args:
        heads: of each.
        elements: of a head, in all of these arrays.
        is_sum: whether they have the dtype of sums.
    """

    heads: int
    elements: int
    is_sum: bool = False


class StateCounts(NamedTuple):
    """A layer's mixer with a state.

    Args:
        takes: operands of a token.
        keeps: the state.
        gives: a token's output.
    """

    takes: tuple[HeadArrays, ...]
    keeps: tuple[HeadArrays, ...]
    gives: HeadArrays


def state_counts(model: ModelConfig) -> StateCounts | None:
    """Returns the counts of a model whose layers are alike; None where they have attention."""
    if model.mixer != "delta":
        return None
    delta = model.delta
    keys, values, before = 2 * delta.key_size, delta.value_size, delta.taps - 1
    return StateCounts(
        takes=(
            HeadArrays(delta.key_heads, keys),
            HeadArrays(delta.value_heads, values),
            HeadArrays(delta.value_heads, 2, is_sum=True),
        ),
        keeps=(
            HeadArrays(delta.key_heads, before * keys),
            HeadArrays(delta.value_heads, before * values),
            HeadArrays(delta.value_heads, delta.key_size * values, is_sum=True),
        ),
        gives=HeadArrays(delta.value_heads, values),
    )


def device_bytes(parts: Iterable[HeadArrays], seq: int, compute_bytes: int, sum_bytes: int) -> int:
    """Returns the bytes of one device's heads of `seq` devices; fewer heads than devices are replicated."""
    return sum(
        math.lcm(part.heads, seq) // seq * part.elements * (sum_bytes if part.is_sum else compute_bytes)
        for part in parts
    )


def state_heads(model: ModelConfig) -> int | None:
    """Returns the heads that the devices of a stage must divide in every layer with a state; None without any."""
    found = [counts for one, _ in model.counts(model.num_layers) if (counts := state_counts(one)) is not None]
    return math.gcd(*(counts.gives.heads for counts in found)) if found else None


def has_attention(model: ModelConfig) -> bool:
    """Returns whether any layer has attention."""
    return any(state_counts(layer_type) is None for layer_type, _ in model.counts(model.num_layers))
