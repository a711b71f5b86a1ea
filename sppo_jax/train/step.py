"""One training step: gradients, optimizer, new state."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import optax

from sppo_jax.train.state import TrainState

ValueAndGrad = Callable[[optax.Params, Mapping[str, jax.Array]], tuple[jax.Array, optax.Params]]
TrainStep = Callable[[TrainState, Mapping[str, jax.Array]], tuple[TrainState, dict[str, jax.Array]]]


def make_train_step(
    value_and_grad: ValueAndGrad, optimizer: optax.GradientTransformation, shardings: TrainState
) -> TrainStep:
    """Join gradients and optimizer into `step(state, batch) -> (state, metrics)`.

    Args:
        value_and_grad: `f(params, batch) -> (loss, grads)`.
        optimizer: turns gradients into updates.
        shardings: of the state, in and out.

    Returns:
        A jitted function which gives the memory of the old state to the new one; its metrics are scalars `loss`
        (nats a target) and `grad_norm` (before clipping).
    """

    def step(state: TrainState, batch: Mapping[str, jax.Array]) -> tuple[TrainState, dict[str, jax.Array]]:
        loss, grads = value_and_grad(state.params, batch)
        with jax.numpy_dtype_promotion("standard"):  # the optimizer library relies on implicit promotion
            updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics = {"loss": loss, "grad_norm": optax.tree.norm(grads)}
        return TrainState(state.step + 1, params, opt_state), metrics

    options = getattr(value_and_grad, "compiler_options", None)  # the outermost jit's to set
    return jax.jit(step, donate_argnums=0, out_shardings=(shardings, None), compiler_options=options)
