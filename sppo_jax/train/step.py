"""One training step: gradients, optimizer (AdamW with warm-up, decay of the learning rate, clipping), new state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax

from sppo_jax.compat import is_on_host
from sppo_jax.config import ModelConfig, OptimizerConfig
from sppo_jax.models.leaves import is_matrix, part_of
from sppo_jax.pipeline.measures import Measures
from sppo_jax.pipeline.stash.host_arguments import WithStash
from sppo_jax.train import expert_load
from sppo_jax.train.finite import are_finite, is_bounded
from sppo_jax.train.state import TrainState, on_host
from sppo_jax.train.streamed_update import AdamWRule, Verdict, stays_finite, updated


def make_schedule(config: OptimizerConfig, num_steps: int) -> optax.Schedule:
    """Returns the learning rate by step, from 0: linear up to `lr`, constant, then down towards `lr * min_lr_ratio`.

    The minimum would come at step `num_steps`, one step after the last one, as in transformers, optax and torchtitan.

    Args:
        config: peak, length and start of the warm-up, form and length of the decay, and the final share of the peak.
        num_steps: length of the run.
    """
    warmup_steps, decay_steps = config.num_warmup_steps(num_steps), config.num_decay_steps(num_steps)
    if config.warmup == "from_zero":
        warm_up = optax.linear_schedule(0.0, config.lr, max(warmup_steps, 1))
    else:
        warm_up = optax.linear_schedule(config.lr / max(warmup_steps, 1), config.lr, max(warmup_steps - 1, 1))
    parts, ends = [warm_up, _decay(config, max(decay_steps, 1))], [warmup_steps]
    if warmup_steps + decay_steps < num_steps:
        parts.insert(1, optax.constant_schedule(config.lr))
        ends.append(num_steps - decay_steps)
    return optax.join_schedules(parts, ends)


def _decay(config: OptimizerConfig, num_steps: int) -> optax.Schedule:
    if config.decay == "cosine":
        return optax.cosine_decay_schedule(config.lr, num_steps, config.min_lr_ratio)
    if config.decay == "linear":
        return optax.linear_schedule(config.lr, config.lr * config.min_lr_ratio, num_steps)
    return optax.constant_schedule(config.lr)


class Optimizer(NamedTuple):
    """An optax transformation, `init` and `update`, and its rule for some parameters by themselves.

    Args:
        init: makes the first state.
        update: turns gradients into updates.
        rule: the same without the clipping, for parameters on the host.
        decays: which parameters decay.
        is_bounded: see `finite.is_bounded`; a transformation that does not say so is not.
    """

    init: Callable
    update: Callable
    rule: AdamWRule
    decays: nnx.State
    is_bounded: bool


def make_optimizer(config: OptimizerConfig, schedule: optax.Schedule, params: nnx.State) -> Optimizer:
    """Chains clipping by global norm and AdamW.

    Args:
        config: the coefficients.
        schedule: from `make_schedule`.
        params: in their own shapes, arrays or shapes; say which parameters decay.
    """

    def adamw(decays) -> optax.GradientTransformation:
        moments = dict(b1=config.b1, b2=config.b2, eps=config.eps)
        return optax.adamw(schedule, **moments, weight_decay=config.weight_decay, mask=decays)

    def has_decay(path: tuple, like) -> bool:
        return is_matrix(path, like) and (config.decay_embeddings or part_of(path) != "embedding")

    # Parameters with two or more dims in one layer decay, except biases.
    decays = jax.tree_util.tree_map_with_path(has_decay, params)
    # Without clipping the state has the same parts, so that a run may change the setting.
    clips = optax.identity() if config.clip_norm is None else optax.clip_by_global_norm(config.clip_norm)
    whole = optax.chain(clips, adamw(decays))
    return Optimizer(whole.init, whole.update, AdamWRule(config.clip_norm, adamw), decays, is_bounded(config))


ValueAndGrad = Callable[[optax.Params, Mapping[str, jax.Array]], tuple[jax.Array, optax.Params]]
Metrics = dict[str, jax.Array]
TrainStep = Callable[[TrainState, Mapping[str, jax.Array], jax.Array], tuple[TrainState, Metrics]]


def make_train_step(
    value_and_grad: ValueAndGrad,
    optimizer: optax.GradientTransformation,
    shardings: TrainState,
    model: ModelConfig | None = None,
) -> TrainStep:
    """Joins gradients and optimizer into `step(state, batch, signals) -> (state, metrics)`.

    A step whose loss, gradient or new state is not finite is counted and does not change parameters or optimizer state.

    Args:
        value_and_grad: `f(params, batch) -> (loss, grads)`; its attribute `with_measures`, if it has one, returns also
            the `Measures` of the step.
        optimizer: turns gradients into updates.
        shardings: of the state, in and out.
        model: says whether its experts have biases for their choice; None: no biases.

    Returns:
        A jitted function that reuses the memory of the old state for the new state. `signals` is int32, the request of
        each process. Its metrics are scalars `loss` (nats a target), `grad_norm` (before clipping), `num_targets`
        (with 0 the loss is 0 and says nothing), `is_bad_update` (loss and gradient are finite, the new state would not
        be), `num_skipped`, `num_skipped_in_row` and `signal`, the largest request; `num_hits` and `entropy` of
        `Measures`, with the parameters before the step; and those of `expert_load.metrics_of` where layers share
        something.
    """

    change = _streamed if on_host(shardings) else _whole
    change = partial(change, optimizer, shardings)

    def step(state: TrainState, batch: Mapping[str, jax.Array], signals: jax.Array, *stash) -> tuple:
        if stash:
            gradients, *stash = value_and_grad.with_stash(state.params, batch, *stash)
        else:
            gradients = getattr(value_and_grad, "with_measures", value_and_grad)(state.params, batch)
        loss, *gradients = gradients
        measures = gradients.pop() if isinstance(gradients[-1], Measures) else None
        totals = None if measures is None else measures.totals
        moves_biases = totals is not None and model is not None
        stays = expert_load.biases_stay_finite(state.params, totals, model) if moves_biases else jnp.array(True)
        verdict, params, opt_state = change(state, loss, stays, *gradients)
        if moves_biases:
            params = expert_load.move_biases(params, totals, model, verdict.counts)
        skipped = (~verdict.counts).astype(jnp.int32)
        state = TrainState(
            step=state.step + 1,
            num_skipped=state.num_skipped + skipped,
            num_skipped_in_row=(state.num_skipped_in_row + 1) * skipped,
            params=params,
            opt_state=opt_state,
        )
        metrics = {
            "loss": loss,
            "grad_norm": verdict.norm,
            "num_targets": jnp.sum(batch["targets"] >= 0),
            "is_bad_update": verdict.finite & ~verdict.stays,
            "num_skipped": state.num_skipped,
            "num_skipped_in_row": state.num_skipped_in_row,
            "signal": jnp.max(signals),
            **({} if measures is None else {"num_hits": measures.num_hits, "entropy": measures.entropy}),
            **({} if totals is None else expert_load.metrics_of(totals)),
        }
        return state, metrics, *stash

    options = getattr(value_and_grad, "compiler_options", None)  # only the outermost jit can set them
    of_stash = getattr(value_and_grad, "stash_shapes", None)
    out = (shardings, shardings.step)
    if not of_stash:
        return jax.jit(step, donate_argnums=0, out_shardings=out, compiler_options=options)
    out = (*out, jax.tree.map(lambda piece: piece.sharding, of_stash))
    return WithStash(jax.jit(step, donate_argnums=(0, 3), out_shardings=out, compiler_options=options), of_stash)


def _whole(optimizer, _: TrainState, state: TrainState, loss: jax.Array, stays: jax.Array, grads):
    """Returns the verdict on a step, parameters and the optimizer's state; `stays`: whether the biases stay finite."""

    def changed(before, grads):
        params, opt_state = before
        with jax.numpy_dtype_promotion("standard"):  # the optimizer library relies on implicit promotion
            updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    grad_norm, before = optax.tree.norm(grads), (state.params, state.opt_state)
    if not getattr(optimizer, "is_bounded", False):
        stays &= are_finite(changed(before, grads))
        # Without the barrier XLA may compute the new state once, and hold it beside the old one until the verdict.
        before, grads, stays = lax.optimization_barrier((before, grads, stays))
    verdict = Verdict(grad_norm, jnp.isfinite(loss) & jnp.isfinite(grad_norm), stays)
    return verdict, *_choose(verdict.counts, changed(before, grads), before)


def _streamed(
    optimizer: Optimizer, shardings: TrainState, state: TrainState, loss: jax.Array, stays: jax.Array, grads, squares
):
    """Returns the same as `_whole`, where matrices are on the host.

    `squares` is the sum of the squares of the gradients there.
    """
    here = [leaf for leaf in jax.tree.leaves(grads) if not is_on_host(leaf)]
    grad_norm = jnp.sqrt(squares.astype(jnp.result_type(here[0])) + optax.tree.norm(here, squared=True))
    verdict = Verdict(grad_norm, jnp.isfinite(loss) & jnp.isfinite(grad_norm), stays)
    clipping, adamw_state = state.opt_state
    leaves = jax.tree.leaves(optimizer.decays), jax.tree.leaves(shardings.params)
    given = (optimizer.rule, *leaves, (state.params, adamw_state), grads)
    with jax.named_scope("optimizer_update"):
        if not optimizer.is_bounded:
            verdict = verdict._replace(stays=stays & stays_finite(*given, grad_norm))
        params, adamw_state = updated(*given, verdict)
    return verdict, params, (clipping, adamw_state)


def _choose(first: jax.Array, yes: optax.Params, no: optax.Params) -> optax.Params:
    return jax.tree.map(lambda a, b: jnp.where(first, a, b), yes, no)
