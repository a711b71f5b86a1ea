"""The optimizer's update of a state whose matrices wait on the host: slice by slice through the device.

A slice of a parameter, of its moments and of its gradient comes to the device, is updated as optax would update the
whole, and goes back to its place. The next slice comes meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from sppo_jax.compat import is_on_host, to_device, to_host
from sppo_jax.rules import divisors

# A slice has at most so many bytes, and a parameter at least so many slices, if its rows allow.
_SLICE_BYTES, _NUM_SLICES = 64 * 2**20, 16


class Rule(NamedTuple):
    """How AdamW changes parameters.

    Args:
        clip_norm: largest global norm of the gradient.
        adamw: makes the transformation, for a tree of flags that say which parameters decay.
    """

    clip_norm: float
    adamw: Callable[[Any], optax.GradientTransformation]


class Verdict(NamedTuple):
    """What a step's whole gradient says: its global norm, and whether loss and norm are finite."""

    norm: jax.Array
    finite: jax.Array


def updated(
    rule: Rule,
    decays: list[bool],
    shardings: list[NamedSharding],
    state: tuple[nnx.State, optax.OptState],
    grads: nnx.State,
    verdict: Verdict,
) -> tuple[nnx.State, optax.OptState]:
    """Returns parameters and the state of AdamW after a step; both are as they were where the step is not finite.

    Args:
        rule: the coefficients.
        decays: of each parameter, whether it decays.
        shardings: of each parameter.
        state: parameters, and the state of AdamW, of which matrices are on the host.
        grads: each on the host or on the device.
        verdict: on the gradients.
    """
    leaves, adamw_state = jax.tree.leaves(state[0]), state[1]
    gradients = jax.tree.leaves(grads)
    on_device = [i for i, leaf in enumerate(leaves) if not is_on_host(leaf)]
    on_host = [[i] for i, leaf in enumerate(leaves) if is_on_host(leaf)]
    results = {}
    for indices in (on_device, *on_host):
        adamw = rule.adamw([decays[i] for i in indices])
        change = partial(_changed, adamw, rule.clip_norm)
        if indices is not on_device:
            change = partial(_streamed, change, shardings[indices[0]])
        some = [leaves[i] for i in indices], _some(adamw_state, indices)
        results[tuple(indices)] = change(some, [gradients[i] for i in indices], verdict)
    order = [i for indices in results for i in indices]

    def join(old, *parts):
        if not _is_tree(old):
            return parts[0]  # a count, the same for all
        of_index = dict(zip(order, [x for part in parts for x in part], strict=True))
        return jax.tree.unflatten(jax.tree.structure(old), [of_index[i] for i in range(len(leaves))])

    return jax.tree.map(join, state, *results.values(), is_leaf=_is_tree)


def _is_tree(x: Any) -> bool:
    return isinstance(x, nnx.State)


def _some(adamw_state: optax.OptState, indices: list[int]) -> optax.OptState:
    """Returns the state of AdamW of some parameters, in a list."""

    def pick(x):
        return [jax.tree.leaves(x)[i] for i in indices] if _is_tree(x) else x

    return jax.tree.map(pick, adamw_state, is_leaf=_is_tree)


def _changed(adamw: optax.GradientTransformation, clip_norm: float, state, grads: list, verdict: Verdict):
    """Returns parameters and state after the step, or as they were."""
    params, adamw_state = state

    def clipped(grad):  # as optax.clip_by_global_norm
        return jnp.where(verdict.norm < clip_norm, grad, (grad / verdict.norm.astype(grad.dtype)) * clip_norm)

    with jax.numpy_dtype_promotion("standard"):  # the optimizer library relies on implicit promotion
        updates, adamw_state = adamw.update([clipped(grad) for grad in grads], adamw_state, params)
    new = optax.apply_updates(params, updates), adamw_state
    return jax.tree.map(lambda a, b: jnp.where(verdict.finite, a, b), new, state)


def _streamed(change: Callable, sharding: NamedSharding, state, grads: list, verdict: Verdict):
    """Changes one parameter on the host; arguments as `_changed`."""
    leaves, tree = jax.tree.flatten(state)
    places = [i for i, leaf in enumerate(leaves) if is_on_host(leaf)]
    counts = [leaf for leaf in leaves if not is_on_host(leaf)]

    def change_slices(slices: list, counts: list, verdict: Verdict):
        *of_state, grad = slices
        given = list(counts)
        all_leaves = [of_state.pop(0) if i in places else given.pop(0) for i in range(len(leaves))]
        new = jax.tree.leaves(change(jax.tree.unflatten(tree, all_leaves), [grad], verdict))
        return [new[i] for i in places], [x for i, x in enumerate(new) if i not in places]

    everywhere = PartitionSpec()
    changed = jax.shard_map(
        partial(_stream, change_slices),
        mesh=sharding.mesh,
        in_specs=(sharding.spec, everywhere, everywhere),
        out_specs=(sharding.spec, everywhere),
        check_vma=False,
    )
    new, counts = changed([*(leaves[i] for i in places), *grads], counts, verdict)
    return jax.tree.unflatten(tree, [new.pop(0) if i in places else counts.pop(0) for i in range(len(leaves))])


def _stream(change: Callable, arrays: list[jax.Array], counts: list[jax.Array], verdict: Verdict):
    """Changes this device's part of a parameter; the last of the arrays is the gradient, which is only read."""
    shape, itemsize = arrays[0].shape, arrays[0].dtype.itemsize
    num_slices, rows = slices_of(shape, itemsize)
    arrays = [lax.reshape(x, (num_slices * rows, shape[-1])) for x in arrays]

    def fetch(arrays, index):
        return [to_device(lax.dynamic_slice_in_dim(x, index * rows, rows)) for x in arrays]

    def write(arrays, index, new):
        *state, grad = arrays
        pairs = zip(state, new, strict=True)
        return [*(lax.dynamic_update_slice_in_dim(x, to_host(value), index * rows, 0) for x, value in pairs), grad]

    def iteration(index, carry):
        arrays, here = carry
        *coming, grad = fetch(arrays, index + 1)
        new, _ = change(here, counts, verdict)
        # Without a barrier XLA may write before it reads, and copies the whole array. With a barrier for each array one
        # is written while the next one comes.
        pairs = [lax.optimization_barrier(pair) for pair in zip(new, coming, strict=True)]
        new, coming = ([pair[at] for pair in pairs] for at in (0, 1))
        return write(arrays, index, new), [*coming, grad]

    arrays, here = lax.fori_loop(0, num_slices - 1, iteration, (arrays, fetch(arrays, 0)))
    new, counts = change(here, counts, verdict)
    *state, _ = write(arrays, num_slices - 1, new)
    return [lax.reshape(x, shape) for x in state], counts


def slices_of(shape: tuple[int, ...], itemsize: int) -> tuple[int, int]:
    """Returns the number of slices in which a device's part of a parameter is updated, and the rows of each.

    Args:
        shape: of the part; the last dim is whole.
        itemsize: bytes of an element.
    """
    rows = math.prod(shape[:-1])
    row_bytes = shape[-1] * itemsize
    counts = [n for n in divisors(rows) if n >= _NUM_SLICES and rows // n * row_bytes <= _SLICE_BYTES]
    number = counts[0] if counts else rows
    return number, rows // number
