"""What a training step reports of its experts, and how it moves the biases of their choice.

Letters: L layers, E experts.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from sppo_jax.config import ModelConfig
from sppo_jax.models.moe.balance import loads_of, moved_bias
from sppo_jax.models.moe.router import Shares
from sppo_jax.pipeline.layers.token_sums import Totals
from sppo_jax.pipeline.params.layout import arrange
from sppo_jax.train.finite import are_finite


def metrics_of(totals: Totals) -> dict[str, jax.Array]:
    """Returns scalars: `penalty`, and of experts `expert_load` (max over mean), `expert_entropy` and `dead_experts`."""
    found = {"penalty": totals.penalty}
    if isinstance(totals.sums, Shares):
        loads = loads_of(totals.sums)
        found |= {
            "expert_load": loads.max_over_mean,
            "expert_entropy": loads.entropy,
            "dead_experts": loads.dead_fraction,
        }
    return found


def biases_stay_finite(params: nnx.State, totals: Totals, model: ModelConfig) -> jax.Array:
    """Returns whether `move_biases` leaves biases that are finite."""
    if not model.routed.choice_bias:
        return jnp.array(True)
    moved = jax.tree_util.tree_leaves_with_path(move_biases(params, totals, model, jnp.array(True)))
    return are_finite([leaf for path, leaf in moved if _is_choice_bias(path)])


def move_biases(params: nnx.State, totals: Totals, model: ModelConfig, is_finite: jax.Array) -> nnx.State:
    """Returns parameters with the choice biases moved against the load of the step.

    The biases have no gradient, so an optimizer leaves them as they are.

    Args:
        params: after the optimizer's update, stored or in their own shapes.
        totals: of the step.
        model: the model's shape.
        is_finite: whether the step counts.
    """
    config = model.routed
    if not config.choice_bias:
        return params
    layers = zip(model.type_names, model.stack_names, strict=True)
    stacks = [stack for layer_type, stack in layers if model.of_type(layer_type).experts.count]

    def move(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
        if not _is_choice_bias(path):
            return leaf
        chosen_LE = totals.sums.chosen
        if len(set(model.type_names)) > 1:
            chosen_LE = chosen_LE[np.flatnonzero(np.array(stacks) == path[1].key)]
        change_LE = moved_bias(jnp.zeros(chosen_LE.shape, leaf.dtype), chosen_LE, config.bias_rate)
        return jnp.where(is_finite, leaf + arrange(change_LE, leaf.shape), leaf)

    return jax.tree_util.tree_map_with_path(move, params)


def _is_choice_bias(path: tuple[Any, ...]) -> bool:
    return any(getattr(key, "key", "") == "choice_bias" for key in path)
