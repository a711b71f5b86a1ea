"""The rows of a global batch that this process reads, and their placement on its devices."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, Sharding

from sppo_jax.attention.validate import KEYS
from sppo_jax.flex.rows import PACKED_ROWS
from sppo_jax.pipeline.params import layout
from sppo_jax.plan.plan import Plan


def local_rows(mesh: Mesh, num_sequences: int) -> list[int]:
    """Returns the rows of the global batch that this process's devices hold.

    `data` divides the rows. Processes with the same data coordinate (`pipe` or `seq` spans them) hold the same rows.

    Args:
        mesh: axes data, pipe, seq; `data` divides `num_sequences`.
        num_sequences: rows of the global batch.

    Returns:
        Rows in increasing order.

    Raises:
        ValueError: some process has no device of the mesh.
    """
    here = {device.process_index for device in mesh.devices.flat}
    away = sorted({device.process_index for device in jax.devices()} - here)
    if away:
        shape = "*".join(str(size) for size in mesh.shape.values())
        raise ValueError(
            f"every process must have devices of the mesh, got {'*'.join(mesh.axis_names)} = {shape} = {mesh.size} of "
            f"{len(jax.devices())} devices, none of process {away[0]}; use all devices, or start fewer processes"
        )
    per_shard = num_sequences // mesh.shape["data"]
    devices = np.moveaxis(mesh.devices, mesh.axis_names.index("data"), 0)
    shards = [
        shard for shard, part in enumerate(devices) if any(d.process_index == jax.process_index() for d in part.flat)
    ]
    return [row for shard in shards for row in range(shard * per_shard, (shard + 1) * per_shard)]


def place_batch(batch_local: Mapping[str, np.ndarray], plan: Plan, mesh: Mesh) -> dict[str, jax.Array]:
    """Makes global arrays from the rows of each process; a device gets its own tokens of its pipeline's sequences.

    Args:
        batch_local: int32 [len(local_rows), length] each: this process's rows, in the order of `local_rows`.
        plan: gives the number of sequences and the layout of their tokens.
        mesh: the plan's.

    Returns:
        int32 [num_sequences, length / seq, seq] each: the last dim is a token's seq member.
    """
    shapes, first_row = batch_shapes(plan, mesh), {}
    for slot, row in enumerate(local_rows(mesh, plan.num_sequences)):
        first_row[row] = slot

    def place(rows: np.ndarray, like: jax.ShapeDtypeStruct) -> jax.Array:
        striped = layout.stripe(rows, plan)

        def shard(index: tuple[slice, ...]) -> np.ndarray:
            start, stop, _ = index[0].indices(plan.num_sequences)
            return striped[first_row[start] : first_row[start] + stop - start, *index[1:]]

        return jax.make_array_from_callback(like.shape, like.sharding, shard, dtype=rows.dtype)

    return {key: place(rows, shapes[key]) for key, rows in batch_local.items()}


def batch_shapes(plan: Plan, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns shapes, dtypes and shardings of the arrays that `place_batch` returns."""
    shape = (plan.num_sequences, plan.sequence_length // plan.mesh.seq, plan.mesh.seq)
    keys = KEYS if plan.groups == "static" else (*KEYS, PACKED_ROWS)
    return batch_of(shape, layout.batch_sharding(plan, mesh), keys)


def batch_of(
    shape: tuple[int, ...], sharding: Sharding, keys: tuple[str, ...] = KEYS
) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns a batch without values: every array of the batch contract in one shape and sharding."""
    return {key: jax.ShapeDtypeStruct(shape, np.dtype("int32"), sharding=sharding) for key in keys}


def gather(x: jax.Array) -> np.ndarray:
    """Returns a whole global array in every process; all processes must call it."""
    if not isinstance(x, jax.Array) or x.is_fully_addressable:
        return np.asarray(x)
    return np.asarray(multihost_utils.process_allgather(x, tiled=True))
