"""The experts' MLPs on the tokens that a router sent to them: no token is dropped, and no shape depends on the router.

A token and one of its experts are a pair. Pairs are sorted by expert, so that the pairs of an expert are one run of
rows. Two forms compute the same. "tiles" cuts each run into tiles of rows and multiplies them in batched products,
which are plain matrix products on every device: XLA for GPUs makes `lax.ragged_dot` dense, with E times the work.
"ragged" is `lax.ragged_dot`, native on TPUs.

Letters: T tokens, D hidden size, E experts, k experts of a token, P = T k pairs, F size of an expert, B rows of a tile,
N tiles of a lot.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sppo_jax.arrays.dtypes import accumulator
from sppo_jax.models.moe.tiles import num_tiles, tile_sizes

# Platforms on which `lax.ragged_dot` is native.
RAGGED = ("tpu",)

Activate = Callable[[jax.Array, jax.Array], jax.Array]


class Experts(NamedTuple):
    """Arrays of the experts of one layer; biases are None where there are none.

    Args:
        gate_EDF, up_EDF, down_EFD: matrices.
        gate_EF, up_EF, down_ED: biases.
    """

    gate_EDF: jax.Array
    up_EDF: jax.Array
    down_EFD: jax.Array
    gate_EF: jax.Array | None = None
    up_EF: jax.Array | None = None
    down_ED: jax.Array | None = None


class Sorted(NamedTuple):
    """Pairs sorted by expert.

    Args:
        pair_P: the pair of each row.
        row_P: the row of each pair: the inverse of `pair_P`.
        sizes_E: rows of each expert.
    """

    pair_P: jax.Array
    row_P: jax.Array
    sizes_E: jax.Array


def sort_pairs(chosen_Tk: jax.Array, num_experts: int) -> Sorted:
    """Sorts pairs by expert, and by token within an expert, by counting.

    The sort has one result on every device, so forward and backward agree. Every pair has a row of its own, whatever
    the integers are: an idle stage may read choices that nobody made.
    """
    chosen_Tk = jnp.clip(chosen_Tk.astype(jnp.int32), 0, num_experts - 1)
    taken_TE = jax.nn.one_hot(chosen_Tk, num_experts, dtype=jnp.int32).sum(1, dtype=jnp.int32)
    upto_TE = jnp.cumsum(taken_TE, axis=0, dtype=jnp.int32)
    sizes_E = upto_TE[-1]
    begin_E = jnp.cumsum(sizes_E, dtype=jnp.int32) - sizes_E
    before_Tk = jnp.take_along_axis(upto_TE - taken_TE, chosen_Tk, axis=1)
    again_Tkk = jnp.tril(chosen_Tk[:, :, None] == chosen_Tk[:, None], -1)  # of one token, where no router chose
    row_P = (begin_E[chosen_Tk] + before_Tk + again_Tkk.sum(-1, dtype=jnp.int32)).reshape(-1)
    pairs = jnp.arange(row_P.size, dtype=jnp.int32)
    return Sorted(jnp.zeros_like(row_P).at[row_P].set(pairs, unique_indices=True), row_P, sizes_E)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def mix(
    activate: Activate, x_TD: jax.Array, weights_Tk: jax.Array, chosen_Tk: jax.Array, experts: Experts
) -> jax.Array:
    """Returns the weighted sum of the outputs of each token's experts, y_TD.

    The backward keeps the arguments alone and computes products again, so a policy that saves products saves none here.

    Args:
        activate: `activate(gate, up)`, element by element.
        x_TD: tokens.
        weights_Tk: weight of each pair.
        chosen_Tk: integer experts of each token, all different.
        experts: of the layer.
    """
    return _by_platform(_ragged, _tiles_forward)(activate, x_TD, weights_Tk, chosen_Tk, experts)


def _forward(activate, x_TD, weights_Tk, chosen_Tk, experts):
    return mix(activate, x_TD, weights_Tk, chosen_Tk, experts), (x_TD, weights_Tk, chosen_Tk, experts)


def _backward(activate, saved, dy_TD):
    dx_TD, dweights_Tk, dexperts = _by_platform(_ragged_backward, _tiles_backward)(activate, *saved, dy_TD)
    return dx_TD, dweights_Tk, None, dexperts


mix.defvjp(_forward, _backward)


def _by_platform(ragged: Callable, tiles: Callable) -> Callable:
    """Chooses a form when the program is lowered, so that ahead-of-time programs have the form of their devices."""

    def chosen(activate, *args):
        forms = {platform: partial(ragged, activate) for platform in RAGGED}
        return lax.platform_dependent(*args, **forms, default=partial(tiles, activate))

    return chosen


# -- the ragged product -------------------------------------------------------------------------------------------


def _ragged(activate, x_TD, weights_Tk, chosen_Tk, experts):
    by_expert = sort_pairs(chosen_Tk, experts.gate_EDF.shape[0])
    rows_PD = x_TD[by_expert.pair_P // weights_Tk.shape[1]]
    expert_P = jnp.repeat(jnp.arange(by_expert.sizes_E.size), by_expert.sizes_E, total_repeat_length=rows_PD.shape[0])

    def product(rows, matrices, biases):
        out = lax.ragged_dot(rows, matrices, by_expert.sizes_E)
        return out if biases is None else out + biases[expert_P]

    inner_PF = activate(
        product(rows_PD, experts.gate_EDF, experts.gate_EF), product(rows_PD, experts.up_EDF, experts.up_EF)
    )
    out_PD = product(inner_PF, experts.down_EFD, experts.down_ED)
    return _weighted(out_PD[by_expert.row_P], weights_Tk)


def _weighted(out_PD: jax.Array, weights_Tk: jax.Array) -> jax.Array:
    """Returns the weighted sum over each token's pairs, which are in the order of tokens."""
    out_TkD = out_PD.reshape(*weights_Tk.shape, -1)
    wide = accumulator(out_PD.dtype)
    return jnp.einsum("tkd,tk->td", out_TkD, weights_Tk.astype(out_PD.dtype), preferred_element_type=wide).astype(
        out_PD.dtype
    )


def _ragged_backward(activate, x_TD, weights_Tk, chosen_Tk, experts, dy_TD):
    return jax.vjp(lambda x, w, e: _ragged(activate, x, w, chosen_Tk, e), x_TD, weights_Tk, experts)[1](dy_TD)


# -- tiles --------------------------------------------------------------------------------------------------------


class Tiles(NamedTuple):
    """Lots of tiles; a tile has rows of one expert.

    Args:
        rows_LNB: rows of each tile; P where a tile has none.
        expert_LN: the expert of each tile.
    """

    rows_LNB: jax.Array
    expert_LN: jax.Array


def find_tiles(sizes_E: jax.Array, num_pairs: int) -> Tiles:
    """Cuts the rows of each expert into tiles."""
    num_experts = sizes_E.size
    tile, lot = tile_sizes(num_pairs, num_experts)
    tiles_E = -(-sizes_E // tile)
    ends_E, row_ends_E = (jnp.cumsum(x, dtype=jnp.int32) for x in (tiles_E, sizes_E))
    number = jnp.arange(num_tiles(num_pairs, num_experts), dtype=jnp.int32)
    expert = jnp.minimum((number[:, None] >= ends_E).sum(1, dtype=jnp.int32), num_experts - 1)
    within = number - (ends_E - tiles_E)[expert]
    begin = (row_ends_E - sizes_E)[expert] + within * tile
    end = jnp.where(number < ends_E[-1], row_ends_E[expert], 0)
    rows = begin[:, None] + jnp.arange(tile, dtype=jnp.int32)
    rows = jnp.where(rows < end[:, None], rows, num_pairs)
    return Tiles(rows.reshape(-1, lot, tile), expert.reshape(-1, lot))


class Joined(NamedTuple):
    """Arrays of experts with gate and up side by side (I = 2 F), so that one product reads a row for both.

    Args:
        inner_EDI, down_EFD: matrices.
        inner_EI, down_ED: biases; None where there are none.
    """

    inner_EDI: jax.Array
    down_EFD: jax.Array
    inner_EI: jax.Array | None
    down_ED: jax.Array | None


def _join(experts: Experts) -> Joined:
    """Joins gate and up; the barrier makes XLA write them side by side, and not apart and then together."""

    def side_by_side(gate, up):
        return None if gate is None else lax.optimization_barrier(jnp.concatenate([gate, up], axis=-1))

    inner_EDI, inner_EI = side_by_side(experts.gate_EDF, experts.up_EDF), side_by_side(experts.gate_EF, experts.up_EF)
    return Joined(inner_EDI, experts.down_EFD, inner_EI, experts.down_ED)


def _of_tile_experts(experts: Experts, expert_N: jax.Array) -> Joined:
    """Returns the arrays of each tile's expert."""
    return _join(jax.tree.map(lambda array: array[expert_N], experts))


def _part(joined: Joined) -> Experts:
    """Returns gate and up of joined arrays: the inverse of `_join`."""
    gate_EDF, up_EDF = jnp.split(joined.inner_EDI, 2, axis=-1)
    gate_EF, up_EF = (None, None) if joined.inner_EI is None else jnp.split(joined.inner_EI, 2, axis=-1)
    return Experts(gate_EDF, up_EDF, joined.down_EFD, gate_EF, up_EF, joined.down_ED)


def _product(dims, rows, matrices, biases):
    out = jnp.einsum(dims, rows, matrices)
    return out if biases is None else out + biases[:, None]


def _inner(activate, x_NBD, experts: Joined):
    inner_NBI = _product("nbd,ndi->nbi", x_NBD, experts.inner_EDI, experts.inner_EI)
    # The gradients of gate and up are written side by side too.
    return activate(*jnp.split(lax.optimization_barrier(inner_NBI), 2, axis=-1))


def _of_tiles(activate, x_NBD, experts: Joined):
    """Returns the experts' outputs on tiles; `experts` has the arrays of each tile's expert."""
    return _product("nbf,nfd->nbd", _inner(activate, x_NBD, experts), experts.down_EFD, experts.down_ED)


def _weighted_tiles(activate, x_NBD, weights_NB, experts: Joined):
    """Returns `_of_tiles` times the weights. They come before the last product, so its backward needs no outputs."""

    def weighted(x):
        # The gradients of weights are sums over a token's elements.
        return (x.astype(accumulator(x.dtype)) * weights_NB[..., None]).astype(x.dtype)

    out = _product("nbf,nfd->nbd", weighted(_inner(activate, x_NBD, experts)), experts.down_EFD, None)
    return out if experts.down_ED is None else out + weighted(experts.down_ED[:, None])


def _take(x, at, *, fill=0):
    return x.at[at].get(mode="fill", fill_value=fill)


def _add_tiles(sums: Joined, expert_N: jax.Array, grads: Joined) -> Joined:
    """Adds the gradients of tiles to those of their experts, one tile after another.

    A scatter would add tiles of one expert in any order on GPUs, so that two runs would differ.
    """

    def add(sums, tile):
        expert, grad = tile
        return jax.tree.map(lambda s, g: s.at[expert].add(g.astype(s.dtype)), sums, grad), None

    return lax.scan(add, sums, (expert_N, grads))[0]


def _tiles_forward(activate, x_TD, weights_Tk, chosen_Tk, experts):
    num_pairs, top_k = weights_Tk.size, weights_Tk.shape[1]
    by_expert = sort_pairs(chosen_Tk, experts.gate_EDF.shape[0])

    def lot(out_PD, tiles):
        rows, expert = tiles
        pairs = _take(by_expert.pair_P, rows, fill=num_pairs)
        y = _of_tiles(activate, _take(x_TD, pairs // top_k), _of_tile_experts(experts, expert))
        return out_PD.at[pairs].set(y, mode="drop", unique_indices=True), None

    out_PD = jnp.empty((num_pairs, x_TD.shape[1]), x_TD.dtype)  # every pair has a row, so tiles write all of it
    out_PD, _ = lax.scan(lot, out_PD, find_tiles(by_expert.sizes_E, num_pairs))
    return _weighted(out_PD, weights_Tk)


def _tiles_backward(activate, x_TD, weights_Tk, chosen_Tk, experts, dy_TD):
    num_pairs, top_k = weights_Tk.size, weights_Tk.shape[1]
    by_expert = sort_pairs(chosen_Tk, experts.gate_EDF.shape[0])
    weights_P, wide = weights_Tk.reshape(-1), accumulator(x_TD.dtype)

    def lot(carry, tiles):
        dx_PD, dweights_P, sums = carry
        rows, expert = tiles
        pairs = _take(by_expert.pair_P, rows, fill=num_pairs)
        x, dy, weights = _take(x_TD, pairs // top_k), _take(dy_TD, pairs // top_k), _take(weights_P, pairs)
        work = partial(_weighted_tiles, activate)
        dx, dweights, grads = jax.vjp(work, x, weights, _of_tile_experts(experts, expert))[1](dy)
        dx_PD = dx_PD.at[pairs].set(dx, mode="drop", unique_indices=True)
        dweights_P = dweights_P.at[pairs].set(dweights, mode="drop", unique_indices=True)
        return (dx_PD, dweights_P, _add_tiles(sums, expert, grads)), None

    # No expert has fewer than 0 rows, which XLA does not know: else it makes zeros once for all layers, and holds them.
    nothing = jnp.minimum(by_expert.sizes_E[0], 0)
    zeros = jax.tree.map(lambda s: jnp.full(s.shape, nothing, accumulator(s.dtype)), jax.eval_shape(_join, experts))
    # Every pair has a row, so tiles write all of dx and dweights.
    start = jnp.empty((num_pairs, x_TD.shape[1]), x_TD.dtype), jnp.empty_like(weights_P), zeros
    (dx_PD, dweights_P, sums), _ = lax.scan(lot, start, find_tiles(by_expert.sizes_E, num_pairs))
    dx_TD = dx_PD.reshape(*weights_Tk.shape, -1).sum(1, dtype=wide).astype(x_TD.dtype)
    dexperts = jax.tree.map(lambda s, a: s.astype(a.dtype), _part(sums), experts)
    return dx_TD, dweights_P.reshape(weights_Tk.shape), dexperts
