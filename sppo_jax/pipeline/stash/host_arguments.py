"""The stash on the host as arguments and results of a step: so that each of its pieces is an allocation of its own.

XLA puts all temporary arrays in host memory into one allocation. Its limit on the bytes of one
(xla_multiheap_size_constraint_per_heap) is at most 2 GiB, and holds for device memory too. An argument always has its
own. A step in pieces gives each piece back in its place: the pieces are made before the first step, in the order of the
plan, and no step allocates them again. What they hold matters within a step only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from sppo_jax.compat import in_host_memory, to_host
from sppo_jax.pipeline.stash.buffers import ELEMENT, Pieces, StashLayout
from sppo_jax.program.program import Program
from sppo_jax.program.stash import StashClass

Stash = dict[StashClass, Pieces]


def stash_shapes(program: Program, layout_of: Callable[[StashClass], StashLayout], mesh: Mesh) -> Stash:
    """Returns shapes, dtypes and shardings of the pieces of all devices.

    A piece is [devices and their steps, lines of a step, elements]; see `StashLayout.host_buffer`.

    Args:
        program: of the step.
        layout_of: how the stash of a class lies on a device and on its host.
        mesh: the devices.
    """
    sharding = in_host_memory(NamedSharding(mesh, spec(mesh)))

    def whole(piece) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((mesh.size * piece.shape[0], *piece.shape[1:]), piece.dtype, sharding=sharding)

    return {name: tuple(map(whole, pieces)) for name, pieces in _of_a_device(program, layout_of).items()}


def stash_bytes(program: Program, layout_of: Callable[[StashClass], StashLayout]) -> int:
    """Returns the bytes of the stash on the host of one device; arguments as `stash_shapes`."""
    pieces = jax.tree.leaves(_of_a_device(program, layout_of))
    return sum(math.prod(piece.shape) * piece.dtype.itemsize for piece in pieces)


def _of_a_device(program: Program, layout_of: Callable[[StashClass], StashLayout]) -> dict[StashClass, Any]:
    """Returns the shapes and dtypes of the pieces of each class on the host of one device."""
    stash = program.stash
    return {
        name: jax.eval_shape(partial(layout_of(name).host_buffer, stash.num_rows[name], stash.num_short.get(name, 0)))
        for name in stash.classes
        if name.uses_host
    }


def spec(mesh: Mesh) -> P:
    """Returns how a piece of all devices is divided: each device has its own, along the first dim."""
    return P(mesh.axis_names)


def allocate(shapes: Stash) -> Stash:
    """Makes the pieces on the host, one after another; what is in them is not said."""
    return jax.tree.map(_allocated, shapes)


def _allocated(like: jax.ShapeDtypeStruct) -> jax.Array:
    sharding = like.sharding
    shape = (like.shape[0] // sharding.mesh.size, *like.shape[1:])

    def make() -> jax.Array:
        # XLA makes the array on the host, and not on the device, only where something is written to it there.
        whole = to_host(jnp.zeros(shape, ELEMENT))
        return lax.dynamic_update_slice(whole, to_host(jnp.zeros((1, *shape[1:]), ELEMENT)), (0, 0, 0))

    made = jax.shard_map(make, mesh=sharding.mesh, in_specs=(), out_specs=sharding.spec, check_vma=False)
    return jax.block_until_ready(jax.jit(made, out_shardings=sharding)())


class WithStash:
    """A step that takes the stash as its last argument and returns it last, as one that does neither.

    `lower` and `compile` return the same of a lowered and of a compiled step. All else is the step's own.
    """

    def __init__(self, step: Any, shapes: Stash):
        """Takes a jitted, lowered or compiled step, and the shapes of the stash."""
        self._step, self._shapes, self._stash = step, shapes, None

    def __call__(self, *args: Any) -> tuple:
        """Runs the step; the first call makes the stash."""
        stash = allocate(self._shapes) if self._stash is None else self._stash
        *results, self._stash = self._step(*args, stash)
        return tuple(results)

    def lower(self, *args: Any) -> WithStash:
        """Lowers the step for arguments or their shapes."""
        return WithStash(self._step.lower(*args, self._shapes), self._shapes)

    def compile(self, **options: Any) -> WithStash:
        """Compiles a lowered step."""
        return WithStash(self._step.compile(**options), self._shapes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._step, name)
