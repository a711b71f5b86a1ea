"""Whether a step leaves a state that is finite: found before anything is written, or known from the settings.

The square of an element above 2^64 is no float32, so a gradient whose norm is finite has none. Moments are means of
gradients and of their squares, and stay finite too. AdamW moves a weight by at most lr * 2^64 / ((1 - b1) * eps) in a
step, and decay makes no weight larger where lr * weight_decay is at most 1. With usual settings no run has enough steps
to leave float32, and the check costs nothing. With others the new state is computed twice: first to be looked at.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from sppo_jax.config import OptimizerConfig

# The largest element of a gradient; the most steps of a run; half of the largest float32: the rest is left to weights.
_GRADIENT, _STEPS, _ROOM = 2.0**64, 2.0**31, 2.0**127


def is_bounded(config: OptimizerConfig) -> bool:
    """Returns whether the settings alone tell that AdamW makes no weight that is not finite, in any run.

    Args:
        config: the coefficients of AdamW.
    """
    lr = config.lr * max(1.0, config.min_lr_ratio)
    direction = _GRADIENT / ((1 - config.b1) * config.eps)
    decays = config.weight_decay <= 1 and lr * config.weight_decay <= 1
    return decays and direction < _ROOM and lr * direction * _STEPS < _ROOM


def are_finite(tree: Any) -> jax.Array:
    """Returns whether all numbers of a tree are finite."""
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]))
