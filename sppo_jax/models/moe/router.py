"""The router of a mixture of experts: which experts a token goes to, with which weights, and its shares of sums.

A choice is made once, in the forward, and handed to the backward as integers: in bfloat16 a recomputed choice differs
for some tokens, and then forward and backward would be of different functions.

Letters: T tokens, D hidden size, E experts, k experts of a token, G groups of experts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

if TYPE_CHECKING:
    from sppo_jax.config.experts import ExpertsConfig

# dtype in which choices wait for the backward.
CHOICE = jnp.int16
# What keeps a sum of sigmoids from being zero, as in DeepSeek-V3.
_TINY = 1e-20


class Shares(NamedTuple):
    """What one token adds to the sums of a layer, or these sums: the balance of experts is a function of them.

    Args:
        probs: the router's probabilities [..., E], which add up to 1.
        chosen: how often each expert was chosen [..., E]; no gradient.
        z: the square of log sum exp of the router's products.
        entropy: of the probabilities, in nats; no gradient.
        tokens: 1.
    """

    probs: jax.Array
    chosen: jax.Array
    z: jax.Array
    entropy: jax.Array
    tokens: jax.Array


def scores_of(logits_TE: jax.Array, config: ExpertsConfig) -> jax.Array:
    """Returns the score of each expert for each token, all at least 0."""
    return jax.nn.sigmoid(logits_TE) if config.scores == "sigmoid" else jax.nn.softmax(logits_TE, axis=-1)


def choose(logits_TE: jax.Array, choice_bias_E: jax.Array | None, config: ExpertsConfig) -> jax.Array:
    """Returns the experts of each token, [T, k], best first; of equal ones the first.

    Args:
        logits_TE: the router's products, at least float32.
        choice_bias_E: is added to the scores for the choice alone; None: nothing is.
        config: of the experts.
    """
    wanted_TE = logits_TE if config.scores == "softmax_of_chosen" else scores_of(logits_TE, config)
    if choice_bias_E is not None:
        wanted_TE = wanted_TE + choice_bias_E.astype(wanted_TE.dtype)
    if config.expert_groups > 1:
        wanted_TE = _within_groups(wanted_TE, config)
    return lax.top_k(wanted_TE, config.chosen)[1].astype(CHOICE)


def _within_groups(wanted_TE: jax.Array, config: ExpertsConfig) -> jax.Array:
    """Lowers the experts outside of a token's groups below all others. A group's score is the sum of its two best."""
    wanted_TGe = wanted_TE.reshape(*wanted_TE.shape[:-1], config.expert_groups, -1)
    best_TG = lax.top_k(wanted_TGe, min(2, wanted_TGe.shape[-1]))[0].sum(-1)
    groups_Tg = lax.top_k(best_TG, config.chosen_groups)[1]
    open_TG = jax.nn.one_hot(groups_Tg, config.expert_groups, dtype=jnp.int32).sum(-2, dtype=jnp.int32) > 0
    return jnp.where(open_TG[..., None], wanted_TGe, -jnp.inf).reshape(wanted_TE.shape)


def weigh(logits_TE: jax.Array, chosen_Tk: jax.Array, config: ExpertsConfig) -> jax.Array:
    """Returns the weight of each of a token's experts, [T, k]."""
    chosen_Tk = chosen_Tk.astype(jnp.int32)
    if config.scores == "softmax_of_chosen":
        return config.scaling * jax.nn.softmax(jnp.take_along_axis(logits_TE, chosen_Tk, axis=-1), axis=-1)
    weights_Tk = jnp.take_along_axis(scores_of(logits_TE, config), chosen_Tk, axis=-1)
    if config.normalized:
        weights_Tk = weights_Tk / (weights_Tk.sum(-1, keepdims=True) + (_TINY if config.scores == "sigmoid" else 0))
    return config.scaling * weights_Tk


def shares_of(logits_TE: jax.Array, chosen_Tk: jax.Array, config: ExpertsConfig) -> Shares:
    """Returns each token's shares of the sums of its layer."""
    scores_TE = scores_of(logits_TE, config)
    probs_TE = scores_TE / (scores_TE.sum(-1, keepdims=True) + _TINY) if config.scores == "sigmoid" else scores_TE
    chosen_TE = jax.nn.one_hot(chosen_Tk.astype(jnp.int32), config.count, dtype=probs_TE.dtype).sum(-2)
    kept_TE = lax.stop_gradient(probs_TE)
    entropy_T = -jnp.sum(kept_TE * jnp.log(jnp.maximum(kept_TE, jnp.finfo(kept_TE.dtype).tiny)), axis=-1)
    z_T = jnp.square(jax.nn.logsumexp(logits_TE, axis=-1))
    return Shares(probs_TE, lax.stop_gradient(chosen_TE), z_T, entropy_T, jnp.ones_like(z_T))
