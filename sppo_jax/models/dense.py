"""Loss and gradients of the dense model on one device: the baseline that parallel runs are compared with.

Shape letters: B sequences, S tokens of a sequence, T tokens of a tile, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from sppo_jax.arrays.dtypes import accumulator
from sppo_jax.models.decoder import Decoder
from sppo_jax.models.moe.balance import sequence_weights

_TILE_TOKENS = 2048


def _tiled(array: jax.Array, tile_tokens: int, fill: int) -> jax.Array:
    """Joins the two leading axes and cuts them into tiles; the last tile is padded with `fill`."""
    flat = array.reshape(-1, *array.shape[2:])
    pad = -flat.shape[0] % tile_tokens
    flat = jnp.pad(flat, [(0, pad)] + [(0, 0)] * (flat.ndim - 1), constant_values=fill)
    return flat.reshape(-1, tile_tokens, *flat.shape[1:])


def tiled_loss_sum(
    model: Decoder, x_BSD: jax.Array, targets_BS: jax.Array, *, tile_tokens: int = _TILE_TOKENS
) -> jax.Array:
    """Sums the cross-entropy over all targets, holding the logits of one tile of tokens at a time.

    Args:
        model: gives final norm and head.
        x_BSD: the residual stream after the last layer.
        targets_BS: the next token of each position; -1 for no loss.
        tile_tokens: tokens whose logits are held at once, forward and backward.

    Returns:
        The sum in nats, in at least float32.
    """
    tile_tokens = min(tile_tokens, targets_BS.size)

    @jax.checkpoint
    def add_tile(total: jax.Array, tile: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        x_TD, targets_T = tile
        logits_TV = model.logits(x_TD)
        wanted_T = jnp.take_along_axis(logits_TV, jnp.maximum(targets_T, 0)[:, None], axis=-1)[:, 0]
        loss_T = jax.nn.logsumexp(logits_TV, axis=-1) - wanted_T
        return total + jnp.sum(jnp.where(targets_T >= 0, loss_T, jnp.zeros_like(loss_T))), None

    tiles = _tiled(x_BSD, tile_tokens, 0), _tiled(targets_BS, tile_tokens, -1)
    return jax.lax.scan(add_tile, jnp.zeros((), accumulator(x_BSD.dtype)), tiles)[0]


def dense_losses(model: Decoder, params: nnx.State, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Computes the mean cross-entropy over the targets of a batch, and the penalty of the layers' sums.

    Layers are checkpointed and logits are in tiles.

    Args:
        model: gives the structure; its own parameter values are not read.
        params: values, with the tree of `nnx.state(model, nnx.Param)`.
        batch: int32 [B, S] each: tokens, targets (-1 = no loss), positions, document_ids.

    Returns:
        Scalar loss in nats a target, in at least float32, 0 if the batch has no target; and the scalar penalty, 0 where
        layers have none.
    """
    graphdef, _, rest = nnx.split(model, nnx.Param, ...)
    model = nnx.merge(graphdef, params, rest)
    tokens = batch["tokens"], batch["positions"], batch["document_ids"]
    x_BSD, sums = model.hidden_states_and_sums(*tokens, checkpoint_layers=True)
    total = tiled_loss_sum(model, x_BSD, batch["targets"])
    num_targets = jnp.sum(batch["targets"] >= 0)
    loss = total / jnp.maximum(num_targets, 1).astype(total.dtype)
    return loss, _penalty(model, sums, batch["document_ids"]).astype(loss.dtype)


def _penalty(model: Decoder, sums_LB: Any, documents_BS: jax.Array) -> jax.Array:
    penalty = getattr(model.layers, "penalty", None)
    if penalty is None:
        return jnp.zeros(())
    if penalty.over == "batch":
        return penalty(jax.tree.map(lambda x: x.sum(1), sums_LB))
    losses_B = jax.vmap(penalty, in_axes=1)(sums_LB)
    return jnp.sum(losses_B * sequence_weights(jnp.sum(documents_BS >= 0, axis=1), losses_B.dtype))


def dense_loss(model: Decoder, params: nnx.State, batch: Mapping[str, jax.Array]) -> jax.Array:
    """Returns the first of `dense_losses`: the tokens' loss alone."""
    return dense_losses(model, params, batch)[0]


def dense_value_and_grad(
    model: Decoder,
) -> Callable[[nnx.State, Mapping[str, jax.Array]], tuple[jax.Array, nnx.State]]:
    """Returns `f(params, batch) -> (loss, grads)` of the dense model; jit it.

    Args:
        model: gives the structure.

    Returns:
        A function whose gradients have the tree and the dtypes of `params`. The loss is the tokens' alone; the
        gradients are those of its sum with the penalty.
    """

    def total(params: nnx.State, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        loss, penalty = dense_losses(model, params, batch)
        return loss + penalty, loss

    def f(params: nnx.State, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, nnx.State]:
        (_, loss), grads = jax.value_and_grad(total, has_aux=True)(params, batch)
        return loss, grads

    return f
