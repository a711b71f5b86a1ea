"""The stash on the host as arguments and results of a step: so that each of its pieces is an allocation of its own.

XLA puts all temporary arrays in host memory into one allocation. Its limit on the bytes of one
(xla_multiheap_size_constraint_per_heap) is at most 2 GiB, and holds for device memory too. An argument always has its
own. A step in pieces gives each piece back in its place: the pieces are made before the first step, in the order of the
plan, and no step allocates them again. What they hold matters within a step only.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from sppo_jax.compat import in_host_memory, to_host
from sppo_jax.pipeline.block import Weights
from sppo_jax.pipeline.stage import Stage
from sppo_jax.pipeline.stash import UNIT, Pieces, StashLayout
from sppo_jax.plan.stash import StashClass

if TYPE_CHECKING:
    from sppo_jax.pipeline.api import Step

Stash = dict[StashClass, Pieces]


def stash_layout(step: Step, name: StashClass) -> StashLayout:
    """Returns how the stash of a class lies on a device of a step, and on its host."""
    dtype, program = jnp.dtype(step.model.dtype), step.program

    def on_stage(x, is_matrix: bool):  # [groups, layers, ...]
        return jax.ShapeDtypeStruct((1, *x.shape), dtype if is_matrix else x.dtype)

    params = jax.tree.map(lambda x: on_stage(x, x.ndim > 2), step.params["layers"])
    others = jax.tree.map(lambda x: on_stage(x, False), step.block.others)
    stage = Stage(step.block, Weights(params, others), step.num_layers, step.plan.stash)
    hidden_size = step.params["embedding"].get_value().shape[1]
    x_TD = jax.ShapeDtypeStruct((name.tokens, hidden_size), dtype)
    positions_T = jax.ShapeDtypeStruct((name.tokens,), jnp.int32)
    num_slots, is_short = program.classes[name], program.short_rows.get(name, 0) > 0
    layout = stage.layout(name, num_slots, x_TD, positions_T, has_short_rows=is_short)
    return replace(layout, host_pieces=step.plan.host_pieces)


def stash_shapes(step: Step) -> Stash:
    """Returns shapes, dtypes and shardings of the pieces of all devices; none where the stash is in one piece.

    A piece is [devices and their steps, lines of a step, units]; see `StashLayout.host_buffer`.
    """
    program = step.program
    if len(step.plan.host_pieces) == 1:
        return {}
    sharding = in_host_memory(NamedSharding(step.mesh, spec(step)))

    def whole(piece) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((step.mesh.size * piece.shape[0], *piece.shape[1:]), piece.dtype, sharding=sharding)

    found = {}
    for name in program.classes:
        if name.uses_host:
            counts = program.host_rows[name], program.short_rows.get(name, 0)
            pieces = jax.eval_shape(partial(stash_layout(step, name).host_buffer, *counts))
            found[name] = tuple(map(whole, pieces))
    return found


def check_whole(step: Step) -> None:
    """Checks that a call without the pieces of the stash can run.

    Raises:
        ValueError: the plan has several pieces, which would be one allocation that no driver pins.
    """
    if step.stash_shapes and step.platform in ("gpu", "cuda", "rocm"):
        raise ValueError(
            f"a plan whose stash on the host is in pieces must be given the pieces on GPUs, got host_pieces "
            f"{list(step.plan.host_pieces)} and a call without them; use sppo_jax.train.step.make_train_step, or "
            "f.with_stash in a jit of your own"
        )


def spec(step: Step) -> P:
    """Returns how a piece of all devices is divided: each device has its own, along the first dim."""
    return P(step.mesh.axis_names)


def allocate(shapes: Stash) -> Stash:
    """Makes the pieces on the host, one after another; what is in them is not said."""
    return jax.tree.map(_allocated, shapes)


def _allocated(like: jax.ShapeDtypeStruct) -> jax.Array:
    sharding = like.sharding
    shape = (like.shape[0] // sharding.mesh.size, *like.shape[1:])

    def make() -> jax.Array:
        # XLA makes the array on the host, and not on the device, only where something is written to it there.
        whole = to_host(jnp.zeros(shape, UNIT))
        return lax.dynamic_update_slice(whole, to_host(jnp.zeros((1, *shape[1:]), UNIT)), (0, 0, 0))

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
