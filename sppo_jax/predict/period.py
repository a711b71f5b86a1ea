"""What a device holds where groups of layers run again from their first layer's input (`stash.inputs=period`).

The groups of a stage take turns in the same buffers, which have room for the most layers of any group.
"""

from collections.abc import Callable
from typing import Any

from sppo_jax.config import ModelConfig
from sppo_jax.models.counts import layer_costs
from sppo_jax.models.state_counts import device_bytes, state_counts
from sppo_jax.plan.parts import StashPlan
from sppo_jax.predict.group_layers import group_costs, most_layers
from sppo_jax.predict.shape import MemoryShape
from sppo_jax.predict.tails import tail_bytes, tail_keys, token_key_values
from sppo_jax.program.stash import TokenBytes

# Of an int16, which says which expert.
CHOICE_BYTES = 2


def period_bytes(shape: MemoryShape, stash: StashPlan) -> TokenBytes:
    """Returns the bytes that a virtual stage stashes of a token, and those of the tails of a stash."""
    size = shape.compute_bytes

    def that_attend(key: Callable[[ModelConfig], Any], *, windows: bool) -> dict:
        def own(layer_type: ModelConfig) -> Any:
            left_out = state_counts(layer_type) or (tail_keys(layer_type, shape) and not windows)
            return None if left_out else key(layer_type)

        return most_layers(shape, own)

    # Arrays of one shape share a buffer, those of outputs and of their LSE by themselves. A layer with a window runs
    # again for the layers behind it, so a lone one stashes its output too.
    is_lone = shape.layers == 1
    outputs = that_attend(lambda layer_type: (layer_type.num_heads, layer_type.head_dim), windows=is_lone)
    lses = that_attend(lambda layer_type: layer_type.num_heads, windows=is_lone)
    choices = most_layers(shape, lambda layer_type: layer_costs(layer_type).choices or None)
    states = most_layers(shape, state_counts)
    attention = sum(count * heads * dim * size for (heads, dim), count in outputs.items())
    attention += sum(count * heads * shape.sum_bytes for heads, count in lses.items())
    inputs = shape.model.hidden_size * size + sum(count * CHOICE_BYTES * chosen for chosen, count in choices.items())
    kept = attention if stash.attention == "keep" else 0
    shared = attention if stash.attention == "host" else 0
    return TokenBytes(
        kept=kept,
        shared=inputs + shared,
        rest=0,
        kv=token_key_values(shape) * size if stash.kv == "host" else 0,
        kept_attention=kept,
        shared_attention=shared,
        tails=tail_bytes(shape),
        states=sum(
            count * device_bytes(of_type.keeps, shape.seq, size, shape.sum_bytes) for of_type, count in states.items()
        ),
    )


def made_again_bytes(shape: MemoryShape, tokens: int) -> int:
    """Returns the bytes of what a group that runs again makes: inputs, outputs and LSE of all its layers."""
    group, size = group_costs(shape), shape.compute_bytes
    inputs = shape.layers * shape.model.hidden_size
    return tokens * ((inputs + group.attention_elements) * size + shape.sum_bytes * group.lse_elements)
