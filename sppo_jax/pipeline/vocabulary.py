"""Embedding and head, with the vocabulary sharded over `pipe`: every stage computes an equal share.

Logits exist for one tile of tokens at a time, in at least float32. The head's forward, loss and backward are one pass.

Letters: T tokens of a tick on one device, D hidden size, V vocabulary entries of one stage, C tokens in a tile,
P stages.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sppo_jax.arrays import buffers
from sppo_jax.arrays.dtypes import accumulator
from sppo_jax.models.decoder import capped, scaled

AXIS = "pipe"
TILE_TOKENS = 1024


def stage_index(num_stages: int):
    """Returns this device's stage."""
    return lax.axis_index(AXIS) if num_stages > 1 else 0


def from_stage(x, source, num_stages: int):
    """Returns the array of stage `source` on every stage: a sum over `pipe` in which the other stages add zero."""
    if num_stages == 1:
        return x
    return lax.psum(jnp.where(stage_index(num_stages) == source, x, jnp.zeros_like(x)), AXIS)


def _local(tokens_T, num_entries: int, num_stages: int):
    """Returns row numbers in this stage's share of the vocabulary and whether they are in it."""
    local = tokens_T - stage_index(num_stages) * num_entries
    inside = (local >= 0) & (local < num_entries)
    return jnp.where(inside, local, 0), inside


def embed(embedding_VD: jax.Array, tokens_T: jax.Array, num_stages: int, factor: float) -> jax.Array:
    """Looks tokens up in the sharded embedding, times a factor; the result is the same on every stage."""
    rows, inside = _local(tokens_T, embedding_VD.shape[0], num_stages)
    x_TD = jnp.where(inside[:, None], embedding_VD[rows], jnp.zeros((), embedding_VD.dtype))
    return scaled(lax.psum(x_TD, AXIS) if num_stages > 1 else x_TD, factor)


def embed_gradient(
    sum_VD: jax.Array, tokens_T: jax.Array, dx_TD: jax.Array, num_stages: int, factor: float
) -> jax.Array:
    """Adds the gradient of `embed` to this stage's share of the embedding; tokens with zeros in `dx_TD` add nothing."""
    rows, inside = _local(tokens_T, sum_VD.shape[0], num_stages)
    added_TD = jnp.where(inside[:, None], dx_TD.astype(sum_VD.dtype), 0)
    if factor != 1:
        added_TD *= jnp.asarray(factor, dx_TD.dtype).astype(sum_VD.dtype)
    return sum_VD.at[rows].add(added_TD)


class HeadResult(NamedTuple):
    """What the head finds of each token of one chunk, and fields that only training has.

    Args:
        loss_T: in nats, times the weight, 0 without a target.
        hit_T: whether the target is the most likely token of the whole vocabulary.
        over_entropy_T: this stage's part of the loss minus the entropy of the predicted distribution, times the scale.
        dx_share: dX of this stage's share of tokens.
        dnorm, dhead_VD: the gradients.
        held: see `head`.
    """

    loss_T: jax.Array
    hit_T: jax.Array
    over_entropy_T: jax.Array | None = None
    dx_share: jax.Array | None = None
    dnorm: object = None
    dhead_VD: jax.Array | None = None
    held: object = None


def share_tokens(num_tokens: int, num_stages: int) -> int:
    """Returns how many of a chunk's tokens one stage keeps of the head's dX."""
    return -(-num_tokens // num_stages)


def _softmax_stats(logits_CV, targets_C, num_entries, num_stages):
    """Returns lse_C, the targets' logits, and which targets are the most likely token, over the whole vocabulary."""
    top = lax.stop_gradient(logits_CV.max(-1))
    top = lax.pmax(top, AXIS) if num_stages > 1 else top
    rows, inside = _local(targets_C, num_entries, num_stages)
    wanted = jnp.where(inside, jnp.take_along_axis(logits_CV, rows[:, None], -1)[:, 0], 0)
    # Of equal logits the first one counts, as with argmax. So a stage's first adds 1 at the target, and 2 before it.
    entries_V = jnp.arange(num_entries, dtype=jnp.int32)
    first = jnp.where(logits_CV == top[:, None], entries_V, jnp.int32(2**31 - 1)).min(-1)
    target = targets_C - stage_index(num_stages) * num_entries
    marks = jnp.where(first < target, 2, jnp.where(first == target, 1, 0)).astype(logits_CV.dtype)
    sums = jnp.stack([jnp.exp(logits_CV - top[:, None]).sum(-1), wanted, marks])
    total, wanted, marks = lax.psum(sums, AXIS) if num_stages > 1 else sums
    return jnp.log(total) + top, wanted, marks == 1


def _tiles(x, tile, fill):
    pad = -x.shape[0] % tile
    x = jnp.pad(x, ((0, pad),) + ((0, 0),) * (x.ndim - 1), constant_values=fill)
    return x.reshape(-1, tile, *x.shape[1:])


class Head(NamedTuple):
    """The head and what comes before it.

    Attributes:
        norm: `norm(weights, x)`, the final norm.
        norm_weights: its weights.
        rows_VD: this stage's rows of the head, in the compute dtype.
        vocab_size: of the whole model; rows beyond it are padding.
        num_stages: P.
        cap: of the logits, which are `cap tanh(logit / cap)`; 0: none.
    """

    norm: Callable
    norm_weights: object
    rows_VD: jax.Array
    vocab_size: int
    num_stages: int
    cap: float


def head(
    given: Head,
    x_TD: jax.Array,
    targets_T: jax.Array,
    scale: jax.Array,
    dhead_VD: jax.Array,
    weights_T: jax.Array | None = None,
    *,
    gradients: bool = True,
    held=None,
) -> HeadResult:
    """Computes loss and gradients of a chunk; every stage computes its share of the vocabulary.

    Args:
        given: the head.
        x_TD: output of the last layer, the same on every stage.
        targets_T: next tokens, -1 for no loss.
        scale: what each token's loss is multiplied by in the gradients (1 / number of targets).
        dhead_VD: accumulator of the head's gradient, at least float32.
        weights_T: what each token's loss is multiplied by, here and in the gradients; None: 1.
        gradients: whether to compute gradients.
        held: arrays prefetched from the host, held back until the logits are through; see `buffers.hold`.

    Returns:
        loss and hits; with gradients also the loss over the entropy, dX share [ceil(T / P), D] in the dtype of x,
        gradient of the norm (a partial sum over stages), dhead_VD; and `held`.
    """
    norm, norm_weights, head_VD, vocab_size, num_stages, cap = given
    acc, num_entries = accumulator(x_TD.dtype), head_VD.shape[0]
    tile = min(TILE_TOKENS, x_TD.shape[0])
    z_TD = norm(norm_weights, x_TD)
    first = stage_index(num_stages) * num_entries
    padding_V = first + jnp.arange(num_entries, dtype=jnp.int32) >= vocab_size

    def one_tile(dhead_VD, xs):
        z_CD, targets_C, *weights_C = xs
        logits_CV = jnp.einsum("cd,vd->cv", z_CD, head_VD, preferred_element_type=acc)
        logits_CV = capped(logits_CV, cap)
        slope_CV = 1 - jnp.square(logits_CV / cap) if cap else None
        logits_CV = jnp.where(padding_V, -jnp.inf, logits_CV)
        lse_C, wanted_C, is_hit_C = _softmax_stats(logits_CV, targets_C, num_entries, num_stages)
        has_target = targets_C >= 0
        # Numbers without a target are not read: padding may hold any.
        weights_C = [jnp.where(has_target, x.astype(acc), 0) for x in weights_C]
        loss_C = math.prod(weights_C, start=jnp.where(has_target, lse_C - wanted_C, 0))
        if not gradients:
            return dhead_VD, (loss_C, is_hit_C)
        hit_CV = jnp.arange(num_entries, dtype=jnp.int32) + first == targets_C[:, None]
        dlogits_CV = jnp.exp(logits_CV - lse_C[:, None]) - hit_CV.astype(acc)
        scale_C1 = math.prod(weights_C, start=jnp.where(has_target, scale, 0))[:, None]
        # The loss minus the entropy is the sum of logits times gradients, and so, logits being linear in z, z times dz.
        over_C = (dlogits_CV * scale_C1 * jnp.where(padding_V, 0, logits_CV)).sum(-1) if cap else None
        dlogits_CV = dlogits_CV if slope_CV is None else dlogits_CV * slope_CV
        dlogits_CV = (dlogits_CV * scale_C1).astype(z_CD.dtype)
        dhead_VD += jnp.einsum("cv,cd->vd", dlogits_CV, z_CD, preferred_element_type=acc)
        dz_CD = jnp.einsum("cv,vd->cd", dlogits_CV, head_VD, preferred_element_type=acc)
        over_C = (z_CD.astype(acc) * dz_CD).sum(-1) if over_C is None else over_C
        return dhead_VD, (loss_C, is_hit_C, over_C, dz_CD)

    of_tokens = [] if weights_T is None else [_tiles(weights_T, tile, 0)]
    tiles = _tiles(z_TD, tile, 0), _tiles(targets_T, tile, -1), *of_tokens
    dhead_VD, found = lax.scan(one_tile, dhead_VD, tiles)
    *of_tokens, last = found
    if held is not None:
        last, _, held = buffers.hold(last, jnp.int32(0), held)
    of_tokens = [x.reshape(-1)[: x_TD.shape[0]] for x in of_tokens]
    if not gradients:
        return HeadResult(*of_tokens, last.reshape(-1)[: x_TD.shape[0]])
    dx_share, dnorm = _through_norm(norm, norm_weights, x_TD, last.reshape(-1, x_TD.shape[1]), num_stages)
    return HeadResult(*of_tokens, dx_share, dnorm, dhead_VD, held=held)


def _through_norm(norm, norm_weights, x_TD, dz_TD, num_stages):
    """Sums dZ over the stages, gives each its share of tokens, and takes that share back through the norm."""
    share = share_tokens(x_TD.shape[0], num_stages)
    rows = share * num_stages
    dz_TD = jnp.pad(dz_TD[: x_TD.shape[0]], ((0, rows - x_TD.shape[0]), (0, 0)))
    if num_stages > 1:
        dz_TD = lax.psum_scatter(dz_TD, AXIS, scatter_dimension=0, tiled=True)
    x_TD = jnp.pad(x_TD, ((0, rows - x_TD.shape[0]), (0, 0)))
    x_share = buffers.read(x_TD, (stage_index(num_stages) * share,), (share, x_TD.shape[1]))
    _, vjp = jax.vjp(norm, norm_weights, x_share)
    dnorm, dx_share = vjp(dz_TD.astype(x_TD.dtype))
    return dx_share, dnorm


def whole_share(dx_share: jax.Array, num_tokens: int, num_stages: int) -> jax.Array:
    """Collects the dX shares of all stages."""
    if num_stages > 1:
        dx_share = lax.all_gather(dx_share, AXIS, axis=0, tiled=True)
    return dx_share[:num_tokens]
