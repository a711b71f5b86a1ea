"""Where parameters and batches lie: the logical tree of checkpoints, and the physical one of the mesh.

Logical: what `nnx.state(model, nnx.Param)` gives, layers stacked [L, ...]. Physical: layers [v, P, layers, ...], so
that virtual stage k * P + s lies at [k, s]; embedding and head [V, D] padded to a multiple of P. A sequence's tokens
are striped: token t belongs to seq member t mod R, which `[.., S / R, R]` and a sharded last dim express without code.

Letters: L layers, v groups a stage, P stages, V vocabulary, D hidden size, B sequences, S tokens, R seq members.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from sppo_jax.models.leaves import is_cast, part_of
from sppo_jax.pipeline.block import Weights
from sppo_jax.plan.plan import Plan

SEQ = ("ring", "ulysses")


class Physical(NamedTuple):
    """Parameters as the stages hold them; also the tree of their gradients. `head_VD` is None where tied."""

    embedding_VD: jax.Array
    layers: Weights
    final_norm: nnx.State
    head_VD: jax.Array | None


def make_mesh(plan: Plan, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Makes the mesh (data, pipe, seq) of a plan, and nothing else; on GPUs call `sppo_jax.prepare_process` before.

    Args:
        plan: gives the axis sizes.
        devices: the devices to use, outermost axis first; by default the first of `jax.devices()`.

    Raises:
        ValueError: there are fewer devices than the mesh needs.
    """
    devices = jax.devices() if devices is None else devices
    shape = (plan.mesh.data, plan.mesh.pipe, plan.mesh.seq)
    needed = int(np.prod(shape))
    if len(devices) < needed:
        raise ValueError(
            f"mesh.data * mesh.pipe * mesh.seq = {plan.mesh.data} * {plan.mesh.pipe} * {plan.mesh.seq} = {needed} "
            "must not "
            f"exceed the number of devices, got {len(devices)}; lower an axis, or simulate more with "
            f"train.devices=cpu:{needed}"
        )
    return Mesh(np.asarray(devices[:needed]).reshape(shape), ("data", "pipe", "seq"), axis_types=(AxisType.Auto,) * 3)


def inner_mesh(mesh: Mesh, plan: Plan) -> Mesh:
    """Divides the `seq` axis into `ring` and `ulysses`; devices keep their order.

    Raises:
        ValueError: the mesh has other axes or sizes than the plan.
    """
    want = {"data": plan.mesh.data, "pipe": plan.mesh.pipe, "seq": plan.mesh.seq}
    got = dict(mesh.shape)
    if got != want:
        raise ValueError(f"the mesh must be the plan's, {want}, got {got}; use make_mesh(plan) or make the plan again")
    devices = mesh.devices.reshape(plan.mesh.data, plan.mesh.pipe, plan.ring, plan.ulysses)
    return Mesh(devices, ("data", "pipe", *SEQ), axis_types=(AxisType.Auto,) * 4)


def to_physical(params: nnx.State, shapes: nnx.State, others: Any, plan: Plan) -> Physical:
    """Arranges parameters as the stages hold them (shapes change, values do not).

    Args:
        params: layers [L, ...], or [v, P, layers, ...] already.
        shapes: of layers [L, ...].
        others: further arrays of the layers.
        plan: gives v and P.
    """
    stages, groups = plan.mesh.pipe, plan.schedule.interleave

    def spread(x, like):
        if x.ndim > len(like.shape):
            return x
        rows = min(groups, x.shape[0])  # of a stack of which only some groups have a layer
        return _filled(x, rows * stages).reshape(rows, stages, -1, *x.shape[1:])

    def pad(x_VD):
        return jnp.pad(x_VD, ((0, -x_VD.shape[0] % stages), (0, 0)))

    head = params["head"][...].T if "head" in params else None
    return Physical(
        embedding_VD=pad(params["embedding"][...]),
        layers=jax.tree.map(spread, Weights(params["layers"], others), Weights(shapes["layers"], others)),
        final_norm=params["final_norm"],
        head_VD=None if head is None else pad(head),
    )


def to_logical(grads: Physical, params: nnx.State) -> nnx.State:
    """Arranges physical gradients in the tree, shapes and dtypes of `params`."""
    parts = {
        "embedding": grads.embedding_VD,
        "head": None if grads.head_VD is None else grads.head_VD.T,
        "layers": grads.layers,
        "final_norm": grads.final_norm,
    }
    leaves = {name: iter(jax.tree.leaves(part)) for name, part in parts.items()}

    def place(path, like):
        return arrange(next(leaves[part_of(path)]), like.shape).astype(like.dtype)

    return jax.tree_util.tree_map_with_path(place, params)


def physical_specs(physical: Physical) -> Physical:
    """Returns the PartitionSpec of every physical array: stages and vocabulary over `pipe`."""
    return Physical(
        embedding_VD=P("pipe"),
        layers=jax.tree.map(lambda _: P(None, "pipe"), physical.layers),
        final_norm=jax.tree.map(lambda _: P(), physical.final_norm),
        head_VD=None if physical.head_VD is None else P("pipe"),
    )


def arrange(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns layers in order, [L, ...], or where they run, [v, P, layers, ...]; pads or cuts as `fit`."""
    if x.ndim < len(shape):
        x = _filled(x, shape[0] * shape[1]).reshape(*shape[:3], *x.shape[1:])
    elif x.ndim > len(shape):
        x = x.reshape(-1, *x.shape[3:])
    return fit(x, shape)


def _filled(x: jax.Array, parts: int) -> jax.Array:
    """Returns layers [L, ...] with layers of zeros behind them, so that so many parts have as many."""
    missing = -x.shape[0] % parts
    return fit(x, (x.shape[0] + missing, *x.shape[1:])) if missing else x


def fit(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns an array cut or padded with zeros at the end of each dim to the given shape."""
    x = x[tuple(slice(0, size) for size in shape)]
    behind = [(0, size - have) for size, have in zip(shape, x.shape, strict=True)]
    return jnp.pad(x, behind) if any(more for _, more in behind) else x


def cast(weights: Physical, dtype) -> Physical:
    """Casts matrices to the compute dtype, once a step; vectors (norm scales, biases) keep theirs."""

    def one(x, num_stacked):
        return x.astype(dtype) if is_cast(x, num_stacked) else x

    return weights._replace(
        embedding_VD=one(weights.embedding_VD, 0),
        head_VD=None if weights.head_VD is None else one(weights.head_VD, 0),
        # [groups, stages, layers, in, out]
        layers=jax.tree.map(lambda x: one(x, 3), weights.layers),
    )


def stripe(x_BS, plan: Plan):
    """[B, S] -> [B, S / R, R]: the last dim is a token's seq member; a striped array stays as it is."""
    return x_BS.reshape(x_BS.shape[0], -1, plan.mesh.seq)


def batch_sharding(plan: Plan, mesh: Mesh) -> NamedSharding:
    """Returns the sharding of a striped batch: every device has its own tokens of its pipeline's sequences.

    Args:
        plan: divides `seq`.
        mesh: the plan's, with `seq` whole or divided.
    """
    return NamedSharding(mesh if SEQ[0] in mesh.shape else inner_mesh(mesh, plan), STRIPED)


# Ring members take turns token by token, so that between any two of them a causal mask is a triangle too.
STRIPED = P("data", None, ("ulysses", "ring"))
