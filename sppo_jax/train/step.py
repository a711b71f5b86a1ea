"""One training step: gradients, optimizer, new state."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import optax

from sppo_jax.train.state import TrainState

ValueAndGrad = Callable[[optax.Params, Mapping[str, jax.Array]], tuple[jax.Array, optax.Params]]
Metrics = dict[str, jax.Array]
TrainStep = Callable[[TrainState, Mapping[str, jax.Array], jax.Array], tuple[TrainState, Metrics]]


def make_train_step(
    value_and_grad: ValueAndGrad, optimizer: optax.GradientTransformation, shardings: TrainState
) -> TrainStep:
    """Join gradients and optimizer into `step(state, batch, signals) -> (state, metrics)`.

    A step whose loss or gradient is not finite leaves parameters and optimizer as they were, and is counted.

    Args:
        value_and_grad: `f(params, batch) -> (loss, grads)`.
        optimizer: turns gradients into updates.
        shardings: of the state, in and out.

    Returns:
        A jitted function which gives the memory of the old state to the new one. `signals` is int32, what each
        process wants done; every process sees the largest. Its metrics are scalars `loss` (nats a target), `grad_norm`
        (before clipping), `num_skipped`, `num_skipped_in_row` and `signal`.
    """

    def step(state: TrainState, batch: Mapping[str, jax.Array], signals: jax.Array) -> tuple[TrainState, Metrics]:
        loss, grads = value_and_grad(state.params, batch)
        grad_norm = optax.tree.norm(grads)
        finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
        with jax.numpy_dtype_promotion("standard"):  # the optimizer library relies on implicit promotion
            updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        skipped = (~finite).astype(jnp.int32)
        state = TrainState(
            step=state.step + 1,
            num_skipped=state.num_skipped + skipped,
            num_skipped_in_row=(state.num_skipped_in_row + 1) * skipped,
            params=_choose(finite, params, state.params),
            opt_state=_choose(finite, opt_state, state.opt_state),
        )
        metrics = {
            "loss": loss,
            "grad_norm": grad_norm,
            "num_skipped": state.num_skipped,
            "num_skipped_in_row": state.num_skipped_in_row,
            "signal": jnp.max(signals),
        }
        return state, metrics

    options = getattr(value_and_grad, "compiler_options", None)  # the outermost jit's to set
    everywhere = shardings.step
    return jax.jit(step, donate_argnums=0, out_shardings=(shardings, everywhere), compiler_options=options)


def _choose(first: jax.Array, yes: optax.Params, no: optax.Params) -> optax.Params:
    return jax.tree.map(lambda a, b: jnp.where(first, a, b), yes, no)
