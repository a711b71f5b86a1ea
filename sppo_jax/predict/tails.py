"""What a device holds of layers with a window that have keys and values of a tail and a chunk; see `rules.has_tails`.

The groups of a stage take turns in the same buffers, which have room for the most layers of any group.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from sppo_jax.config import ModelConfig
from sppo_jax.models.state_counts import state_counts
from sppo_jax.plan.parts import StashPlan
from sppo_jax.predict.group_layers import most_layers, types_of_groups
from sppo_jax.predict.shape import MemoryShape
from sppo_jax.predict.workspace import kv_heads_per_device
from sppo_jax.rules import has_tails


def holds_tails(shape: MemoryShape, stash: StashPlan) -> bool:
    """Returns whether layers with a window have tails."""
    return has_tails(stash.inputs, stash.kv, shape.layers, flexible=shape.groups)


def tail_keys(model: ModelConfig, shape: MemoryShape) -> int:
    """Returns the keys of a tail on one ring member, in layers of a type; 0 for a type without a window or a state."""
    if not shape.length or state_counts(model):
        return 0
    return model.window_within(shape.length) // (shape.seq // shape.ulysses)


@lru_cache(maxsize=4096)
def tail_bytes(shape: MemoryShape) -> int:
    """Returns the bytes of the tails of a stash."""

    def of_type(layer_type: ModelConfig) -> tuple[int, int, int] | None:
        keys = tail_keys(layer_type, shape)
        return (kv_heads_per_device(layer_type, shape.ulysses), keys, layer_type.head_dim) if keys else None

    tails = most_layers(shape, of_type)
    return sum(2 * count * heads * keys * dim * shape.compute_bytes for (heads, keys, dim), count in tails.items())


@lru_cache(maxsize=4096)
def token_key_values(shape: MemoryShape) -> int:
    """Returns the elements of a token's keys and values in layers of a group that have no tail, all heads."""

    def of_type(layer_type: ModelConfig) -> Any:
        is_left_out = state_counts(layer_type) or tail_keys(layer_type, shape)
        return None if is_left_out else (layer_type.num_kv_heads, layer_type.head_dim)

    return sum(2 * count * heads * dim for (heads, dim), count in most_layers(shape, of_type).items())


def inputs_made_again(shape: MemoryShape) -> int:
    """Returns of how many layers the inputs come back before keys and values are computed from them.

    Of those with a tail they do not, where all groups have as many of these.
    """
    counts = {sum(tail_keys(one, shape) > 0 for one in layer_types) for layer_types in types_of_groups(shape)}
    return shape.layers - (counts.pop() if len(counts) == 1 else 0)


def key_value_elements(shape: MemoryShape, prefix_tokens: int, chunk_tokens: int, padded: Callable[[int], int]) -> int:
    """Returns the elements of a slot of keys and values of all layers of a group on one device.

    Args:
        shape: of the model on a stage.
        prefix_tokens: which layers without a window have.
        chunk_tokens: of a longest tick after the all-to-all, which a tail has behind it.
        padded: the elements that a head of so many takes.
    """
    return sum(
        2 * count * heads * padded(dim) * (keys + chunk_tokens if keys else prefix_tokens)
        for (heads, dim, keys), count in _caches(shape)
    )


@lru_cache(maxsize=4096)
def _caches(shape: MemoryShape) -> tuple[tuple[tuple[int, int, int], int], ...]:
    """Returns heads, their elements and keys of a tail of the layers of a group that have keys and values, counted."""

    def of_cache(layer_type: ModelConfig) -> tuple[int, int, int] | None:
        if state_counts(layer_type):
            return None
        return kv_heads_per_device(layer_type, shape.ulysses), layer_type.head_dim, tail_keys(layer_type, shape)

    return tuple(most_layers(shape, of_cache).items())


@lru_cache(maxsize=4096)
def ends_in_windows(shape: MemoryShape) -> bool:
    """Returns whether some layers have keys and values of the whole prefix, but none of the last group."""
    model, names = shape.model, shape.model.type_names
    is_whole = [not tail_keys(one, shape) and state_counts(one) is None for one in map(model.of_type, names)]
    last = (len(names) - 1) // shape.layers * shape.layers
    return any(is_whole) and not any(is_whole[last:])
