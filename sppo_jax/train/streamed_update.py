"""The optimizer's update of a state whose matrices wait on the host: slice by slice through the device.

A slice of a parameter, of its moments and of its gradient comes to the device, is updated as optax would update the
whole, and goes back to its place. The next slice comes meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
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
from sppo_jax.train.finite import are_finite

# A slice has at most so many bytes, and a parameter at least so many slices, if its rows allow.
_SLICE_BYTES, _NUM_SLICES = 64 * 2**20, 16


class AdamWRule(NamedTuple):
    """How AdamW changes parameters.

    Args:
        clip_norm: largest global norm of the gradient; None: any.
        adamw: makes the transformation, for a tree of flags that say which parameters decay.
    """

    clip_norm: float | None
    adamw: Callable[[Any], optax.GradientTransformation]


class Verdict(NamedTuple):
    """What is known of a step before anything is written.

    Args:
        norm: the global norm of the gradient.
        finite: whether loss and norm are finite.
        stays: whether the new state is finite.
    """

    norm: jax.Array
    finite: jax.Array
    stays: jax.Array

    @property
    def counts(self) -> jax.Array:
        """Whether the step changes the state."""
        return self.finite & self.stays


def updated(
    rule: AdamWRule,
    decays: list[bool],
    shardings: list[NamedSharding],
    state: tuple[nnx.State, optax.OptState],
    grads: nnx.State,
    verdict: Verdict,
) -> tuple[nnx.State, optax.OptState]:
    """Returns parameters and the state of AdamW after a step; both are as they were where the step does not count.

    Args:
        rule: the coefficients.
        decays: of each parameter, whether it decays.
        shardings: of each parameter.
        state: parameters, and the state of AdamW, of which matrices are on the host.
        grads: each on the host or on the device.
        verdict: on the step.
    """
    leaves, results = jax.tree.leaves(state[0]), {}
    for part in _parts(rule, decays, shardings, state, grads):
        change = part.change if part.sharding is None else partial(_streamed, part.change, part.sharding)
        results[part.indices] = change(part.state, part.grads, verdict)
    order = [i for indices in results for i in indices]

    def join(old, *parts):
        if not _is_tree(old):
            return parts[0]  # a count, the same for all
        of_index = dict(zip(order, [x for part in parts for x in part], strict=True))
        return jax.tree.unflatten(jax.tree.structure(old), [of_index[i] for i in range(len(leaves))])

    return jax.tree.map(join, state, *results.values(), is_leaf=_is_tree)


def stays_finite(
    rule: AdamWRule,
    decays: list[bool],
    shardings: list[NamedSharding],
    state: tuple[nnx.State, optax.OptState],
    grads: nnx.State,
    norm: jax.Array,
) -> jax.Array:
    """Returns whether the state that `updated` would return is finite; nothing is written.

    What is on the host passes through the device once more.

    Args: as `updated`; `norm` is that of the gradients.
    """
    verdict = Verdict(norm, jnp.array(True), jnp.array(True))
    found = []
    for part in _parts(rule, decays, shardings, state, grads):
        if part.sharding is None:
            found.append(are_finite(part.change(part.state, part.grads, verdict)))
        else:
            found.append(jnp.all(_looked_at(part.change, part.sharding, part.state, part.grads, verdict)))
    return jnp.all(jnp.stack(found))


class _Slice(NamedTuple):
    """Parameters that are updated together: all that are on the device, or one that is on the host.

    Args:
        indices: their numbers among all.
        change: `_changed` with the rule of these.
        sharding: of one on the host; None for those on the device.
        state: parameters, and their state of AdamW.
        grads: their gradients.
    """

    indices: tuple[int, ...]
    change: Callable
    sharding: NamedSharding | None
    state: tuple
    grads: list[jax.Array]


def _parts(rule: AdamWRule, decays: list[bool], shardings: list[NamedSharding], state, grads) -> Iterator[_Slice]:
    leaves, gradients = jax.tree.leaves(state[0]), jax.tree.leaves(grads)
    on_device = [i for i, leaf in enumerate(leaves) if not is_on_host(leaf)]
    on_host = [[i] for i, leaf in enumerate(leaves) if is_on_host(leaf)]
    for indices in (on_device, *on_host):
        change = partial(_changed, rule.adamw([decays[i] for i in indices]), rule.clip_norm)
        sharding = None if indices is on_device else shardings[indices[0]]
        some = [leaves[i] for i in indices], _some(state[1], indices)
        yield _Slice(tuple(indices), change, sharding, some, [gradients[i] for i in indices])


def _is_tree(x: Any) -> bool:
    return isinstance(x, nnx.State)


def _some(adamw_state: optax.OptState, indices: list[int]) -> optax.OptState:
    """Returns the state of AdamW of some parameters, in a list."""

    def pick(x):
        return [jax.tree.leaves(x)[i] for i in indices] if _is_tree(x) else x

    return jax.tree.map(pick, adamw_state, is_leaf=_is_tree)


def _changed(adamw: optax.GradientTransformation, clip_norm: float | None, state, grads: list, verdict: Verdict):
    """Returns parameters and state after the step, or as they were."""
    params, adamw_state = state

    def clipped(grad):  # as optax.clip_by_global_norm
        if clip_norm is None:
            return grad
        return jnp.where(verdict.norm < clip_norm, grad, (grad / verdict.norm.astype(grad.dtype)) * clip_norm)

    with jax.numpy_dtype_promotion("standard"):  # the optimizer library relies on implicit promotion
        updates, adamw_state = adamw.update([clipped(grad) for grad in grads], adamw_state, params)
    new = optax.apply_updates(params, updates), adamw_state
    return jax.tree.map(lambda a, b: jnp.where(verdict.counts, a, b), new, state)


class _Slices(NamedTuple):
    """A parameter on the host with its state and gradient, as arrays that are cut into slices.

    Args:
        arrays: all that is on the host, the gradient last.
        counts: the rest of the state.
        tree: of the state.
        places: of the arrays among the leaves of the state.
    """

    arrays: list[jax.Array]
    counts: list[jax.Array]
    tree: Any
    places: tuple[int, ...]

    @classmethod
    def of(cls, state, grads: list[jax.Array]) -> _Slices:
        leaves, tree = jax.tree.flatten(state)
        places = tuple(i for i, leaf in enumerate(leaves) if is_on_host(leaf))
        counts = [leaf for i, leaf in enumerate(leaves) if i not in places]
        return cls([*(leaves[i] for i in places), *grads], counts, tree, places)

    def joined(self, arrays: list, counts: list):
        """Returns the state of some arrays, whole or a slice of each."""
        given, others = iter(arrays), iter(counts)
        places = range(len(self.places) + len(self.counts))
        return jax.tree.unflatten(self.tree, [next(given) if i in self.places else next(others) for i in places])

    def changed(self, change: Callable, slices: list, counts: list, verdict: Verdict) -> tuple[list, list]:
        """Returns the new arrays and counts of one slice."""
        *of_state, grad = slices
        new = jax.tree.leaves(change(self.joined(of_state, counts), [grad], verdict))
        return [new[i] for i in self.places], [x for i, x in enumerate(new) if i not in self.places]


def _streamed(change: Callable, sharding: NamedSharding, state, grads: list, verdict: Verdict):
    """Changes one parameter on the host; arguments as `_changed`."""
    slices, everywhere = _Slices.of(state, grads), PartitionSpec()
    changed = jax.shard_map(
        partial(_stream, partial(slices.changed, change)),
        mesh=sharding.mesh,
        in_specs=(sharding.spec, everywhere, everywhere),
        out_specs=(sharding.spec, everywhere),
        check_vma=False,
    )
    return slices.joined(*changed(slices.arrays, slices.counts, verdict))


def _looked_at(change: Callable, sharding: NamedSharding, state, grads: list, verdict: Verdict) -> jax.Array:
    """Returns of each device whether its part of one parameter stays finite; arguments as `_streamed`."""
    slices, everywhere = _Slices.of(state, grads), PartitionSpec()
    look = jax.shard_map(
        partial(_look, partial(slices.changed, change)),
        mesh=sharding.mesh,
        in_specs=(sharding.spec, everywhere, everywhere),
        out_specs=PartitionSpec(sharding.mesh.axis_names),
        check_vma=False,
    )
    return look(slices.arrays, slices.counts, verdict)


def _cut(arrays: list[jax.Array]) -> tuple[list[jax.Array], int, int]:
    """Returns arrays of rows, the number of slices, and the rows of each."""
    num_slices, rows = slices_of(arrays[0].shape, arrays[0].dtype.itemsize)
    return [lax.reshape(x, (num_slices * rows, x.shape[-1])) for x in arrays], num_slices, rows


def _fetch(arrays: list[jax.Array], index, rows: int) -> list[jax.Array]:
    return [to_device(lax.dynamic_slice_in_dim(x, index * rows, rows)) for x in arrays]


def _look(change: Callable, arrays: list[jax.Array], counts: list[jax.Array], verdict: Verdict) -> jax.Array:
    """Returns whether this device's part of a parameter stays finite, [1]."""
    arrays, num_slices, rows = _cut(arrays)

    def iteration(index, carry):
        stays, here = carry
        coming = _fetch(arrays, index + 1, rows)
        return stays & are_finite(change(here, counts, verdict)), coming

    first = jnp.array(True), _fetch(arrays, 0, rows)
    stays, here = lax.fori_loop(0, num_slices - 1, iteration, first)
    return (stays & are_finite(change(here, counts, verdict))).reshape(1)


def _stream(change: Callable, arrays: list[jax.Array], counts: list[jax.Array], verdict: Verdict):
    """Changes this device's part of a parameter; the last of the arrays is the gradient, which is only read."""
    shape = arrays[0].shape
    arrays, num_slices, rows = _cut(arrays)

    def write(arrays, index, new):
        *state, grad = arrays
        pairs = zip(state, new, strict=True)
        return [*(lax.dynamic_update_slice_in_dim(x, to_host(value), index * rows, 0) for x, value in pairs), grad]

    def iteration(index, carry):
        arrays, here = carry
        *coming, grad = _fetch(arrays, index + 1, rows)
        new, _ = change(here, counts, verdict)
        # Without a barrier XLA may write before it reads, and copies the whole array. With a barrier for each array one
        # is written while the next one comes.
        pairs = [lax.optimization_barrier(pair) for pair in zip(new, coming, strict=True)]
        new, coming = ([pair[at] for pair in pairs] for at in (0, 1))
        return write(arrays, index, new), [*coming, grad]

    arrays, here = lax.fori_loop(0, num_slices - 1, iteration, (arrays, _fetch(arrays, 0, rows)))
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
