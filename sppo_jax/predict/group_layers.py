"""The layers of a group, as its buffers have room for them.

The groups of a stage take turns in the same buffers. Where every group has as many layers of each shape, the buffers
have the layers of a group. Groups of one layer may have parameters of other shapes. Then arrays of one shape share a
buffer, and a group leaves the buffers of other shapes alone.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

from sppo_jax.config import ModelConfig
from sppo_jax.models.counts import expert_arrays, layer_costs, layer_params
from sppo_jax.models.state_counts import StateCounts, state_counts
from sppo_jax.predict.shape import MemoryShape


class GroupCosts(NamedTuple):
    """The sizes of `counts.LayerCosts`, of all layers that the buffers of a group have."""

    params: int
    attention_elements: int
    lse_elements: int
    rest_elements: int
    rest_sums: int
    choices: int
    kv_elements: int


def are_unlike(model: ModelConfig, layers: int) -> bool:
    """Returns whether groups of so many layers have other shapes: lone layers, or a last group that is smaller."""
    return bool(model.layers) and len(model.stacks) > 1 and (layers == 1 or model.num_layers % layers > 0)


@lru_cache(maxsize=1024)
def group_costs(shape: MemoryShape) -> GroupCosts:
    """Returns the sizes of a group's buffers."""
    if not are_unlike(shape.model, shape.layers):
        mean = layer_costs(shape.model)  # times the layers of a group it is whole
        return GroupCosts(*(int(shape.layers * getattr(mean, name)) for name in GroupCosts._fields))

    def total(key: Callable[[ModelConfig], Any]) -> int:
        return sum(count * sum(one) for one, count in most_layers(shape, key).items())

    def own(*names: str) -> Callable[[ModelConfig], Any]:
        return lambda layer_type: tuple(getattr(layer_costs(layer_type), name) for name in names)

    rest = most_layers(shape, own("rest_elements", "rest_sums"))
    return GroupCosts(
        params=sum(count * layer_params(layer_type) for layer_type, count in group_stacks(shape)),
        attention_elements=total(own("attention_elements")),
        lse_elements=total(own("lse_elements")),
        rest_elements=sum(count * elements for (elements, _), count in rest.items()),
        rest_sums=sum(count * sums for (_, sums), count in rest.items()),
        choices=total(own("choices")),
        kv_elements=total(own("kv_elements")),
    )


@lru_cache(maxsize=1024)
def group_states(shape: MemoryShape) -> tuple[tuple[StateCounts, int], ...]:
    """Returns the states of a group, and the layers that have each."""
    if are_unlike(shape.model, shape.layers):
        return tuple(most_layers(shape, state_counts).items())
    found = ((state_counts(layer_type), count) for layer_type, count in shape.model.counts(shape.layers))
    return tuple((counts, count) for counts, count in found if counts is not None)


@lru_cache(maxsize=1024)
def group_caches(shape: MemoryShape) -> tuple[tuple[ModelConfig, int], ...]:
    """Returns a type for each shape of keys and values in a group, and the layers that have some of this shape."""
    if not are_unlike(shape.model, shape.layers):
        return tuple((one, count) for one, count in shape.model.counts(shape.layers) if state_counts(one) is None)
    layer_types = {(one.num_kv_heads, one.head_dim): one for one in shape.model.attention_types}
    found = most_layers(shape, lambda one: None if state_counts(one) is not None else (one.num_kv_heads, one.head_dim))
    return tuple((layer_types[key], count) for key, count in found.items())


def group_experts(shape: MemoryShape) -> list[tuple[int, ...]]:
    """Returns the dims of the arrays of experts in a group's buffers of weights."""
    if are_unlike(shape.model, shape.layers):
        of_types = group_stacks(shape)
    else:
        of_types = shape.model.counts(shape.layers)
    return [dims for layer_type, count in of_types for dims in expert_arrays(layer_type) * count]


def group_stacks(shape: MemoryShape) -> list[tuple[ModelConfig, int]]:
    """Returns a type of each stack, whose parameters have one shape, and the layers of a group in the stack."""
    model, names = shape.model, shape.model.stack_names
    groups = (names[begin : begin + shape.layers] for begin in range(0, len(names), shape.layers))
    found: Counter[str] = Counter()
    for group in groups:
        found |= Counter(group)
    return [(model.of_type(layer_types[0]), found[name]) for name, layer_types in model.stacks.items()]


def most_layers(shape: MemoryShape, key: Callable[[ModelConfig], Any]) -> dict[Any, int]:
    """Returns for each key the most layers of a group whose types have it; types with None are left out."""
    found: dict[Any, int] = {}
    for group in types_of_groups(shape):
        counts = Counter(key(layer_type) for layer_type in group)
        found = {one: max(counts[one], found.get(one, 0)) for one in {*counts, *found}}
    return {one: count for one, count in found.items() if one is not None}


def types_of_groups(shape: MemoryShape) -> Iterator[list[ModelConfig]]:
    """Yields the types of the layers of each group, of groups that are alike once."""
    model, size = shape.model, shape.layers
    names = model.type_names
    for group in dict.fromkeys(names[begin : begin + size] for begin in range(0, len(names), size)):
        yield [model.of_type(name) if model.layers else model for name in group]
