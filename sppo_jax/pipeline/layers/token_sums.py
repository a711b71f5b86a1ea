"""Sums over tokens of what layers return beside their outputs, and the gradient of the penalty of these sums.

A forward adds the shares of a chunk's real tokens to the sums of its sequence, group of layers and layer. Before the
first backward of a sequence all its sums are whole, so a backward can ask for the penalty's gradient at the whole sums.
Each real token's share then has this gradient as its cotangent: nothing is counted once a chunk or once a recompute.

All shares of a layer lie in one vector, so that there is one sum over the devices and one exchange between stages.

The unit of a loss over a "sequence" is the packed row of the data. With teams its documents may lie in any rows of the
batch, so the sums are of all packed rows: they lie in one vector, as those of one long sequence would.

Letters: M sequences of this pipeline, v groups a stage whose layers return shares, P stages, n layers of a group, L
layers of the model, T tokens of a tick on one device, U losses of a vector, W elements of a layer's shares of each.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sppo_jax.arrays import buffers
from sppo_jax.arrays.dtypes import accumulator
from sppo_jax.models.decoder import sum_real
from sppo_jax.models.moe.balance import sequence_weights
from sppo_jax.pipeline.params.group_rows import GroupRows, rows_of
from sppo_jax.pipeline.params.layout import SEQ, fit
from sppo_jax.plan.plan import Plan

PIPE = "pipe"


class Totals(NamedTuple):
    """What a step's shares come to.

    Args:
        penalty: the penalty of the batch; 0 where layers have none.
        sums: the shares' sums over all real tokens of the batch, a tree of arrays [L, ...].
    """

    penalty: jax.Array
    sums: Any


class Sharing(NamedTuple):
    """The layers of a stage that return shares.

    Args:
        layers: their number in each group.
        rows: where the sums of a group lie, if only some groups have such layers.
    """

    layers: tuple[int, ...]
    rows: GroupRows | None


def sharing(groups: Sequence[Sequence[str | None]], layer_types: Sequence[str | None]) -> Sharing:
    """Returns which layers return shares.

    Args:
        groups: the types of the layers of each group of a stage.
        layer_types: the types whose layers return shares.
    """
    counts = tuple(sum(layer_type in layer_types for layer_type in group) for group in groups)
    return Sharing(counts, rows_of(groups, lambda layer_type: layer_type in layer_types))


class SharesLayout:
    """How the shares of a layer lie in a vector, and what becomes of their sums; for use inside `shard_map`."""

    def __init__(self, like: Any, penalty, plan: Plan, dtype, layers: Sharing):
        """Keeps the shapes of one token's shares.

        Args:
            like: tree of shapes [T, ...].
            penalty: see `models.moe.balance.Penalty`; None: the sums are for reports alone.
            plan: gives stages, groups and sequences.
            dtype: compute dtype.
            layers: those that return shares.
        """
        self.layers, self.num_rows = layers, layers.rows.count if layers.rows else plan.schedule.interleave
        self.penalty, self.plan, self.dtype = penalty, plan, accumulator(dtype)
        leaves, self._tree = jax.tree.flatten(like)
        self._shapes = [(leaf.shape[1:], leaf.dtype) for leaf in leaves]
        self._width = sum(math.prod(shape) for shape, _ in self._shapes)
        self.over = None if penalty is None else penalty.over
        self.is_moved = self.over == "sequence" and plan.groups == "flex"
        self._num_losses = plan.num_sequences if self.is_moved else 1
        self.width = self._num_losses * self._width

    def zeros(self) -> jax.Array:
        """Returns the sums before the first tick, [M, v, n, U W], or [1, v, n, U W] where documents may have moved."""
        num_sequences = 1 if self.is_moved else self.plan.sequences_per_pipeline
        return jnp.zeros((num_sequences, self.num_rows, max(self.layers.layers), self.width), self.dtype)

    def weights(self, documents_MS: jax.Array, packed_rows_MS: jax.Array | None = None) -> jax.Array:
        """Returns the weights of the losses: [U] where documents may have moved, of the batch [1], else [M].

        Args:
            documents_MS: of this device.
            packed_rows_MS: of this device, where documents may have moved.
        """
        if self.over != "sequence":
            return jnp.ones(1, self.dtype)
        is_real_MS = documents_MS >= 0
        if packed_rows_MS is not None:
            of_device = jnp.zeros(self._num_losses, jnp.int32).at[packed_rows_MS].add(is_real_MS.astype(jnp.int32))
            return sequence_weights(lax.psum(of_device, ("data", *SEQ)), self.dtype)
        tokens_M = lax.psum(jnp.sum(is_real_MS, 1, dtype=jnp.int32), SEQ)
        weights_B = sequence_weights(lax.all_gather(tokens_M, "data").reshape(-1), self.dtype)
        return buffers.read(weights_B, (lax.axis_index("data") * tokens_M.size,), tokens_M.shape)

    def row(self, group: jax.Array) -> jax.Array:
        """Returns where the sums of a group's layers lie."""
        return self.layers.rows.row(group) if self.layers.rows else group

    def of_tokens(self, shares: Any, is_real_T: jax.Array, packed_rows_T: jax.Array | None = None) -> jax.Array:
        """Returns the sum of the shares of a layer's real tokens, [U W].

        Args:
            shares: of each token.
            is_real_T: which tokens are real.
            packed_rows_T: where documents may have moved.
        """
        leaves = jax.tree.leaves(shares)
        if packed_rows_T is None:
            return jnp.concatenate([sum_real(leaf, is_real_T).astype(self.dtype).reshape(-1) for leaf in leaves])
        of_each_TW = jnp.concatenate([leaf.reshape(leaf.shape[0], -1).astype(self.dtype) for leaf in leaves], axis=1)
        of_each_TW = jnp.where(is_real_T[:, None], of_each_TW, 0)
        is_of_TU = jax.nn.one_hot(packed_rows_T, self._num_losses, dtype=self.dtype)
        return jnp.einsum("tu,tw->uw", is_of_TU, of_each_TW, precision=lax.Precision.HIGHEST).reshape(-1)

    def cotangents(
        self, gradient_nW: jax.Array | None, layer, is_real_T: jax.Array, packed_rows_T: jax.Array | None = None
    ) -> Any:
        """Returns the cotangents of each token's shares of a layer: the gradient of its sums, for real tokens."""
        if gradient_nW is None:
            gradient = jnp.zeros(self._width, self.dtype)
        elif packed_rows_T is None:
            gradient = buffers.read_slot(gradient_nW, layer)
        else:
            gradient = buffers.read_slot(gradient_nW, layer).reshape(-1, self._width)[packed_rows_T]

        def spread(gradient, shape, dtype):
            mask = is_real_T.reshape(-1, *[1] * len(shape))
            return jnp.where(mask, gradient.astype(dtype), 0)

        leaves = self._cut(gradient)
        whole = [spread(leaf, *like) for leaf, like in zip(leaves, self._shapes, strict=True)]
        return jax.tree.unflatten(self._tree, whole)

    def gradient(
        self, sums_MvnW: jax.Array, weights: jax.Array, sequence_P: jax.Array, group: jax.Array
    ) -> jax.Array | None:
        """Returns the penalty's gradient at the sums of a group of this stage's layers, [n, W]; None without a penalty.

        Args:
            sums_MvnW: of this device.
            weights: from `weights`.
            sequence_P: the sequence on which each stage works.
            group: of this stage.
        """
        if self.penalty is None:
            return None
        if self.over == "batch" or self.is_moved:
            mine = lax.psum(sums_MvnW.sum(0), ("data", *SEQ))
            of_stages = lax.all_gather(mine, PIPE)
        else:
            weights = buffers.pick(weights, buffers.pick(sequence_P, lax.axis_index(PIPE)))[None]
            of_stages = lax.psum(sums_MvnW[sequence_P], SEQ)
            if self.plan.mesh.pipe > 1:
                of_stages = lax.all_to_all(of_stages, PIPE, 0, 0)
        gradient_LW = jax.grad(self._loss)(self._in_order(of_stages), weights)
        vPnW = self.num_rows, self.plan.mesh.pipe, sums_MvnW.shape[2], self.width
        gradient_LW = fit(gradient_LW, (math.prod(vPnW[:3]), self.width))
        return gradient_LW.reshape(vPnW)[self.row(group), lax.axis_index(PIPE)]

    def totals(self, sums_MvnW: jax.Array, weights: jax.Array) -> Totals:
        """Returns what the shares come to, from the sums of this device at the end of a step; see `gradient`."""
        of_stages = lax.all_gather(lax.psum(sums_MvnW, SEQ), PIPE)  # [P, M, v, n, W]
        sums_MLW = jnp.stack([self._in_order(of_stages[:, row]) for row in range(sums_MvnW.shape[0])])
        sums_LW = lax.psum(sums_MLW.sum(0), "data")
        # Made of the sums: a result that needs no tick waits for the last one in the loss's place, and callers drop it.
        penalty = 0 * sums_LW.sum()
        if self.penalty is not None:
            if self.over == "batch" or self.is_moved:
                penalty = self._loss(sums_LW, weights)
            else:
                penalty = lax.psum(self._loss(jnp.concatenate(sums_MLW, axis=1), weights), "data")
        sums_LUW = sums_LW.reshape(sums_LW.shape[0], self._num_losses, self._width)
        return Totals(penalty, self._tree_of(sums_LUW.sum(1)))

    def _loss(self, sums_LW: jax.Array, weights_U: jax.Array) -> jax.Array:
        """Returns the sum of the losses of sums [L, U W], each times its weight."""
        sums_LUW = sums_LW.reshape(sums_LW.shape[0], -1, self._width)
        losses_U = jax.vmap(lambda sums_LW: self.penalty(self._tree_of(sums_LW)), in_axes=1)(sums_LUW)
        return jnp.sum(losses_U.astype(self.dtype) * weights_U)

    def _in_order(self, of_stages: jax.Array) -> jax.Array:
        """[P, v, n, W] -> [L, W]; the last group may have fewer layers."""
        num_layers = self.plan.mesh.pipe * sum(self.layers.layers)
        return jnp.swapaxes(of_stages, 0, 1).reshape(-1, self.width)[:num_layers]

    def _tree_of(self, sums_LW: jax.Array) -> Any:
        return jax.tree.unflatten(self._tree, self._cut(sums_LW))

    def _cut(self, x: jax.Array) -> list[jax.Array]:
        """Cuts the last dim of an array into the shares' own dims."""
        ends, leaves = 0, []
        for shape, _ in self._shapes:
            begin, ends = ends, ends + math.prod(shape)
            leaves.append(x[..., begin:ends].reshape(*x.shape[:-1], *shape))
        return leaves
