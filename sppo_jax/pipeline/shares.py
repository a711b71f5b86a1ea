"""Sums over tokens of what layers return beside their outputs, and the gradient of the penalty of these sums.

A forward adds the shares of a chunk's real tokens to the sums of its sequence, group of layers and layer. Before the
first backward of a sequence all its sums are whole, so a backward can ask for the penalty's gradient at the whole sums.
Each real token's share then has this gradient as its cotangent: nothing is counted once a chunk or once a recompute.

All shares of a layer lie in one vector, so that there is one sum over the devices and one exchange between stages.

Letters: M sequences of this pipeline, v groups a stage whose layers return shares, P stages, n layers of a group, L
layers of the model, T tokens of a tick on one device, W elements of a layer's shares.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sppo_jax import buffers
from sppo_jax.dtypes import accumulator
from sppo_jax.models.decoder import sum_real
from sppo_jax.pipeline.group_rows import GroupRows, rows_of
from sppo_jax.pipeline.layout import SEQ, fit
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


def sharing(groups: Sequence[Sequence[str | None]], kinds: Sequence[str | None]) -> Sharing:
    """Returns which layers return shares.

    Args:
        groups: the kinds of the layers of each group of a stage.
        kinds: the kinds whose layers return shares.
    """
    counts = tuple(sum(kind in kinds for kind in group) for group in groups)
    return Sharing(counts, rows_of(groups, lambda kind: kind in kinds))


class SharesLayout:
    """How the shares of a layer lie in a vector, and what becomes of their sums; for use inside `shard_map`."""

    def __init__(self, like: Any, penalty, plan: Plan, dtype, layers: Sharing):
        """Keeps the shapes of one token's shares.

        Args:
            like: tree of shapes [T, ...].
            penalty: see `models.balance.Penalty`; None: the sums are for reports alone.
            plan: gives stages, groups and sequences.
            dtype: compute dtype.
            layers: those that return shares.
        """
        self.layers, self.num_rows = layers, layers.rows.count if layers.rows else plan.schedule.interleave
        self.penalty, self.plan, self.dtype = penalty, plan, accumulator(dtype)
        leaves, self._tree = jax.tree.flatten(like)
        self._shapes = [(leaf.shape[1:], leaf.dtype) for leaf in leaves]
        self.width = sum(math.prod(shape) for shape, _ in self._shapes)

    def zeros(self) -> jax.Array:
        """Returns the sums before the first tick, [M, v, n, W]."""
        sizes = self.plan.sequences_per_pipeline, self.num_rows, max(self.layers.layers), self.width
        return jnp.zeros(sizes, self.dtype)

    def row(self, group: jax.Array) -> jax.Array:
        """Returns where the sums of a group's layers lie."""
        return self.layers.rows.row(group) if self.layers.rows else group

    def of_tokens(self, shares: Any, is_real_T: jax.Array) -> jax.Array:
        """Returns the sum of the shares of a layer's real tokens, [W]."""
        leaves = [sum_real(leaf, is_real_T).astype(self.dtype) for leaf in jax.tree.leaves(shares)]
        return jnp.concatenate([leaf.reshape(-1) for leaf in leaves])

    def cotangents(self, gradient_nW: jax.Array | None, layer, is_real_T: jax.Array) -> Any:
        """Returns the cotangents of each token's shares of a layer: the gradient of the sums, for real tokens."""
        if gradient_nW is None:
            gradient_W = jnp.zeros(self.width, self.dtype)
        else:
            gradient_W = buffers.read_slot(gradient_nW, layer)

        def spread(gradient, dtype):
            mask = is_real_T.reshape(-1, *[1] * gradient.ndim)
            return jnp.where(mask, gradient.astype(dtype), 0)

        leaves = self._cut(gradient_W)
        whole = [spread(leaf, dtype) for leaf, (_, dtype) in zip(leaves, self._shapes, strict=True)]
        return jax.tree.unflatten(self._tree, whole)

    def gradient(self, sums_MvnW: jax.Array, sequence_P: jax.Array, group: jax.Array) -> jax.Array | None:
        """Returns the penalty's gradient at the sums of a group of this stage's layers, [n, W]; None without a penalty.

        Args:
            sums_MvnW: of this device.
            sequence_P: the sequence on which each stage works.
            group: of this stage.
        """
        if self.penalty is None:
            return None
        if self.penalty.over == "batch":
            mine = lax.psum(sums_MvnW.sum(0), ("data", *SEQ))
            of_stages = lax.all_gather(mine, PIPE)
        else:
            of_stages = lax.psum(sums_MvnW[sequence_P], SEQ)
            if self.plan.mesh.pipe > 1:
                of_stages = lax.all_to_all(of_stages, PIPE, 0, 0)
        gradient_LW = jax.grad(lambda x: self._penalty(x))(self._in_order(of_stages)) / self._num_losses
        vPnW = self.num_rows, self.plan.mesh.pipe, sums_MvnW.shape[2], self.width
        gradient_LW = fit(gradient_LW, (math.prod(vPnW[:3]), self.width))
        return gradient_LW.reshape(vPnW)[self.row(group), lax.axis_index(PIPE)]

    def totals(self, sums_MvnW: jax.Array) -> Totals:
        """Returns what the shares come to, from the sums of this device at the end of a step."""
        of_stages = lax.all_gather(lax.psum(sums_MvnW, SEQ), PIPE)  # [P, M, v, n, W]
        sums_MLW = jnp.stack([self._in_order(of_stages[:, row]) for row in range(sums_MvnW.shape[0])])
        sums_LW = lax.psum(sums_MLW.sum(0), "data")
        # Made of the sums: a result that needs no tick waits for the last one in the loss's place, and callers drop it.
        penalty = 0 * sums_LW.sum()
        if self.penalty is not None:
            over_batch = self.penalty.over == "batch"
            of_each = jnp.stack([self._penalty(row) for row in sums_MLW]) if not over_batch else None
            penalty = self._penalty(sums_LW) if over_batch else lax.psum(of_each.sum(), "data") / self._num_losses
        return Totals(penalty, self._tree_of(sums_LW))

    @property
    def _num_losses(self) -> int:
        return 1 if self.penalty.over == "batch" else self.plan.num_sequences

    def _penalty(self, sums_LW: jax.Array) -> jax.Array:
        return self.penalty(self._tree_of(sums_LW)).astype(self.dtype)

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
