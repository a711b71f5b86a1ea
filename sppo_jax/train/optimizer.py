"""AdamW with warm-up, cosine decay, clipping, and weight decay on matrices only."""

from __future__ import annotations

import jax
import optax
from flax import nnx

from sppo_jax.config import OptimizerConfig


def make_schedule(config: OptimizerConfig, num_steps: int) -> optax.Schedule:
    """Return the learning rate by step: linear up to `lr`, then a cosine down to `lr * min_lr_ratio` at the last step.

    Args:
        config: peak, length of the warm-up in steps, and the final share of the peak.
        num_steps: length of the run.
    """
    # The first step of a warm-up from 0 would be lost, so it starts one step up.
    first = config.lr / max(config.warmup_steps, 1)
    warm_up = optax.linear_schedule(first, config.lr, max(config.warmup_steps - 1, 1))
    decay = optax.cosine_decay_schedule(config.lr, max(num_steps - config.warmup_steps, 1), config.min_lr_ratio)
    return optax.join_schedules([warm_up, decay], [config.warmup_steps])


def make_optimizer(config: OptimizerConfig, schedule: optax.Schedule) -> optax.GradientTransformation:
    """Chain clipping by global norm and AdamW.

    Args:
        config: the coefficients.
        schedule: from `make_schedule`.
    """
    adamw = optax.adamw(
        schedule, b1=config.b1, b2=config.b2, eps=config.eps, weight_decay=config.weight_decay, mask=is_matrix
    )
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), adamw)


def is_matrix(params: nnx.State) -> nnx.State:
    """Mark the parameters that decay: those of two or more dims in one layer, biases excepted."""

    def mark(path: tuple, leaf: jax.Array) -> bool:
        names = [str(getattr(key, "key", "")) for key in path]
        stacked = names[0] == "layers"
        return leaf.ndim - stacked >= 2 and not any(name.endswith("bias") for name in names)

    return jax.tree_util.tree_map_with_path(mark, params)
