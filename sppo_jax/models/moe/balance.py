"""The losses that balance the load of experts, as functions of sums over tokens.

Each token has shares of the sums of its layer. Whoever runs layers adds the shares of all real tokens up, over chunks
and devices. The cotangent of each share is then the gradient of the loss at the whole sums. So neither the loss nor its
gradient depends on how tokens are cut, and a recomputed layer counts nothing twice.

Letters: L layers, E experts, B sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from sppo_jax.models.moe.router import Shares

if TYPE_CHECKING:
    from sppo_jax.config.experts import ExpertsConfig


class Penalty(Protocol):
    """A loss of sums over tokens, which a layer's attribute `penalty` adds to the tokens' loss in training.

    Attributes:
        over: whose tokens one loss is of: those of a packed "sequence" (each weighs by its real tokens, see
            `sequence_weights`), or of the whole "batch".
    """

    over: Literal["sequence", "batch"]

    def __call__(self, sums: Any) -> jax.Array:
        """Returns the scalar loss of sums [L, ...] over the real tokens of a sequence or of the batch."""


@dataclass(frozen=True)
class Balance:
    """Balance loss and z-loss of a router, with their coefficients.

    Args:
        coefficient: of the balance loss.
        form: "model" (transformers) or "layer" (Megatron).
        top_k: experts of a token.
        z: coefficient of the z-loss.
        over: see `Penalty`.
    """

    coefficient: float
    form: Literal["model", "layer"]
    top_k: int
    z: float
    over: Literal["sequence", "batch"]

    @classmethod
    def of(cls, config: ExpertsConfig) -> Balance | None:
        """Returns the penalty of a config; None where its coefficients are zero."""
        if not config.is_penalised:
            return None
        return cls(config.balance, config.balance_form, config.chosen, config.z, config.balance_over)

    def __call__(self, sums: Shares) -> jax.Array:
        """Returns the loss of sums [L, ...]; 0 where there is no token.

        "model" is E sum_e f_e p_e with f and p the means of choices and probabilities over the tokens of all layers
        together; transformers counts k choices a token. "layer" is sum_l E / k sum_e f_le p_le.
        """
        tokens_L = jnp.maximum(sums.tokens, 1)
        num_experts = sums.probs.shape[-1]
        if self.form == "model":
            rows = jnp.sum(tokens_L)
            loss = num_experts * jnp.sum(sums.probs.sum(0) * sums.chosen.sum(0)) / (rows * rows)
        else:
            products_L = jnp.sum(sums.probs * sums.chosen, axis=-1) / (tokens_L * tokens_L)
            loss = num_experts / self.top_k * jnp.sum(products_L)
        return self.coefficient * loss + self.z * jnp.sum(sums.z / tokens_L)


def sequence_weights(tokens_B: jax.Array, dtype: Any) -> jax.Array:
    """Returns the weight of each sequence's loss: its share of the real tokens of the batch.

    Args:
        tokens_B: real tokens of each packed sequence of the batch.
        dtype: of the weights.
    """
    return tokens_B.astype(dtype) / jnp.maximum(tokens_B.sum(), 1).astype(dtype)


class Loads(NamedTuple):
    """How evenly a step's tokens used the experts; each is a mean over layers.

    Args:
        max_over_mean: tokens of the fullest expert over the mean of all.
        entropy: of the router's probabilities, as a share of the largest possible.
        dead_fraction: share of experts that no token used.
    """

    max_over_mean: jax.Array
    entropy: jax.Array
    dead_fraction: jax.Array


def loads_of(sums: Shares) -> Loads:
    """Returns the loads of sums [L, ...] over a batch."""
    mean_L = jnp.maximum(sums.chosen.mean(-1), jnp.finfo(sums.chosen.dtype).tiny)
    largest = jnp.log(jnp.asarray(max(sums.probs.shape[-1], 2), sums.entropy.dtype))
    return Loads(
        jnp.mean(sums.chosen.max(-1) / mean_L),
        jnp.mean(sums.entropy / jnp.maximum(sums.tokens, 1)) / largest,
        jnp.mean((sums.chosen == 0).astype(sums.chosen.dtype)),
    )


def moved_bias(choice_bias_LE: jax.Array, chosen_LE: jax.Array, rate: float) -> jax.Array:
    """Returns choice biases moved by `rate` towards experts with less than the mean load, as DeepSeek-V3 does.

    Args:
        choice_bias_LE: the biases.
        chosen_LE: how often each expert was chosen in the step.
        rate: the step.
    """
    error_LE = chosen_LE.mean(-1, keepdims=True) - chosen_LE
    return choice_bias_LE + rate * jnp.sign(error_LE).astype(choice_bias_LE.dtype)
