"""Gradients of a loss that is a function of the tokens' log-probabilities, by the plan's own two programs.

Letters: B sequences, S tokens.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from sppo_jax.pipeline.api import evaluate, value_and_grad
from sppo_jax.pipeline.batch import OF_WEIGHTS, WEIGHTS
from sppo_jax.pipeline.loss_and_grads import TokenLossAndGrads
from sppo_jax.plan.plan import Plan


def token_loss(
    plan: Plan,
    model: nnx.Module,
    loss: Callable[[jax.Array, Mapping[str, Any]], jax.Array],
    mesh: Mesh | None = None,
) -> TokenLossAndGrads:
    """Makes `f(params, batch) -> (loss, grads)` for any smooth function of the tokens' log-probabilities.

    f scores the batch, differentiates `loss` by the log-probabilities, and runs one step in which each token's loss has
    minus this derivative as its weight. By the chain rule the gradients are exact. So DPO, KTO, policy gradients and
    the like train at every length that the plan has.

    Args:
        plan: from `make_plan`.
        model: a `Decoder`; gives the structure, its own values are not read.
        loss: `loss(logp_BS, batch) -> scalar`. `logp_BS`, at least float32, is the log-probability of each target, and
            0 where there is no target. `batch` is the batch that f got, with any arrays of your own in it. Its places
            are those of the plan: with teams, documents lie where the teams need them.
        mesh: axes data, pipe, seq of the plan's sizes; the first devices by default.

    Returns:
        f, jittable as that of `value_and_grad`, with the same parameters, batch and gradients. A penalty that the
        layers add, as the balance of experts, is in the gradients once.

    Raises:
        ValueError: as `value_and_grad`; the batch has weights already, or `loss` returns no single number.
    """
    score, step = evaluate(plan, model, mesh), value_and_grad(plan, model, mesh)
    by_log_probabilities = jax.jit(jax.value_and_grad(_single(loss)))

    def f(params: nnx.State, batch: Mapping):
        given = [key for key in OF_WEIGHTS if key in batch]
        if given:
            raise ValueError(f"batch: the loss must decide the weights, got '{given[0]}'; multiply by it in the loss")
        value, dlogp_BS = by_log_probabilities(-score(params, batch).losses_BS, dict(batch))
        _, *gradients = step(params, {**batch, WEIGHTS: -dlogp_BS})
        return value, *gradients

    f.compiler_options = step.compiler_options  # for a jit around f
    return f


def _single(loss: Callable) -> Callable:
    def single(logp_BS: jax.Array, batch: Mapping) -> jax.Array:
        value = loss(logp_BS, batch)
        if jax.numpy.shape(value) != ():
            raise ValueError(
                f"loss must return one number, got the shape {jax.numpy.shape(value)}; return its sum or its mean"
            )
        return value

    return single
