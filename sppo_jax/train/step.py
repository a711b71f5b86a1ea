"""One training step: gradients, optimizer (AdamW with warm-up, cosine decay, clipping), new state."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from sppo_jax.config import OptimizerConfig
from sppo_jax.train.state import TrainState


def make_schedule(config: OptimizerConfig, num_steps: int) -> optax.Schedule:
    """Returns the learning rate by step: linear up to `lr`, then a cosine down to `lr * min_lr_ratio` at the last step.

    Args:
        config: peak, length of the warm-up in steps, and the final share of the peak.
        num_steps: length of the run.
    """
    # A warm-up from 0 would waste its first step, so the first learning rate is lr / warmup_steps.
    first = config.lr / max(config.warmup_steps, 1)
    warm_up = optax.linear_schedule(first, config.lr, max(config.warmup_steps - 1, 1))
    decay = optax.cosine_decay_schedule(config.lr, max(num_steps - config.warmup_steps, 1), config.min_lr_ratio)
    return optax.join_schedules([warm_up, decay], [config.warmup_steps])


def make_optimizer(
    config: OptimizerConfig, schedule: optax.Schedule, params: nnx.State
) -> optax.GradientTransformation:
    """Chains clipping by global norm and AdamW.

    Args:
        config: the coefficients.
        schedule: from `make_schedule`.
        params: in their own shapes, arrays or shapes; say which parameters decay.
    """
    adamw = optax.adamw(
        schedule, b1=config.b1, b2=config.b2, eps=config.eps, weight_decay=config.weight_decay, mask=is_matrix(params)
    )
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), adamw)


def is_matrix(params: nnx.State) -> nnx.State:
    """Marks the parameters that decay: those with two or more dims in one layer, except biases."""

    def mark(path: tuple, leaf: jax.Array) -> bool:
        names = [str(getattr(key, "key", "")) for key in path]
        stacked = names[0] == "layers"
        return leaf.ndim - stacked >= 2 and not any(name.endswith("bias") for name in names)

    return jax.tree_util.tree_map_with_path(mark, params)


ValueAndGrad = Callable[[optax.Params, Mapping[str, jax.Array]], tuple[jax.Array, optax.Params]]
Metrics = dict[str, jax.Array]
TrainStep = Callable[[TrainState, Mapping[str, jax.Array], jax.Array], tuple[TrainState, Metrics]]


def make_train_step(
    value_and_grad: ValueAndGrad, optimizer: optax.GradientTransformation, shardings: TrainState
) -> TrainStep:
    """Joins gradients and optimizer into `step(state, batch, signals) -> (state, metrics)`.

    A step whose loss or gradient is not finite is counted and does not change parameters or optimizer state.

    Args:
        value_and_grad: `f(params, batch) -> (loss, grads)`.
        optimizer: turns gradients into updates.
        shardings: of the state, in and out.

    Returns:
        A jitted function that reuses the memory of the old state for the new state. `signals` is int32, the request of
        each process. Its metrics are scalars `loss` (nats a target), `grad_norm` (before clipping), `num_skipped`,
        `num_skipped_in_row` and `signal`, the largest request.
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

    options = getattr(value_and_grad, "compiler_options", None)  # only the outermost jit can set them
    everywhere = shardings.step
    return jax.jit(step, donate_argnums=0, out_shardings=(shardings, everywhere), compiler_options=options)


def _choose(first: jax.Array, yes: optax.Params, no: optax.Params) -> optax.Params:
    return jax.tree.map(lambda a, b: jnp.where(first, a, b), yes, no)
