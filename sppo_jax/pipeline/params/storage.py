"""Parameters between steps: every device of a stage owns an even share of each parameter, its moments and its gradient.

`program.spread` says where a parameter is cut. A dim that the devices do not divide is stored with zeros behind it. No
step changes these zeros, because their gradients are zeros. A step gathers the parameters in the compute dtype and cuts
the zeros off.

Layers are stored where they run. With v groups a stage and P stages, layers [L, ...] are stored as [v, P, layers, ...],
so no layer crosses stages in a step. Where the last group has fewer layers, layers of zeros fill it. Where groups are
lone layers of several shapes, each stack has a row for each of its layers. Checkpoints and callers have the layers in
order, [L, ...]. With v = 1 both are [L, ...].

Two cuts may fall within a mesh axis. Then the parameter lies on a mesh of the same devices in the same order whose axis
is divided.

Letters: L layers, v groups a stage, P stages, V vocabulary, D hidden size.
"""

from dataclasses import dataclass
from itertools import pairwise

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as Spec

from sppo_jax.compat import in_host_memory, is_on_host
from sppo_jax.models.leaves import is_cast, is_matrix, num_stacked_dims, part_of
from sppo_jax.pipeline.params.layout import SEQ, Physical, arrange, fit
from sppo_jax.plan.plan import Plan
from sppo_jax.program.spread import Cut, padded, spread
from sppo_jax.rules import group_size

# The devices of a stage, on the mesh within a step.
MEMBERS = ("data", *SEQ)
_VOCAB_DIM = {"embedding": 0, "head": 1}


@dataclass(frozen=True)
class Share:
    """How the devices of a stage share an array: its cuts, major first; none where each has all of it."""

    cuts: tuple[Cut, ...] = ()

    def dims(self) -> dict[int, Cut]:
        """Returns the cuts by their dims."""
        return {cut.dim: cut for cut in self.cuts}


@dataclass(frozen=True)
class Home:
    """A parameter as it is stored.

    Args:
        shape: the shape with the zeros.
        own: the shape without the zeros, in the same dims.
        share: how the devices of a stage share it.
        stage_dim: the dim that the stages divide; None where each has all of it.
    """

    shape: tuple[int, ...]
    own: tuple[int, ...]
    share: Share
    stage_dim: int | None


def home_of(name: str, shape: tuple[int, ...], plan: Plan, *, in_order: bool = False) -> Home:
    """Returns how a parameter is stored.

    Args:
        name: of its part of the tree: layers, embedding, head or final_norm.
        shape: its logical shape.
        plan: gives the mesh and the groups of a stage.
        in_order: whether layers lie in order, as in checkpoints; else where they run.
    """
    mesh, shape = plan.mesh, tuple(shape)
    if name == "layers":
        groups = 1 if in_order else plan.schedule.interleave
        rows = min(groups, shape[0])
        stacked = shape[:1] if groups == 1 else (rows, mesh.pipe, group_size(shape[0], groups * mesh.pipe))
        cuts = spread(shape[1:], mesh.data, mesh.seq)
        moved = tuple(Cut(cut.dim + len(stacked), cut.parts) for cut in cuts)
        return Home((*stacked, *padded(shape[1:], cuts)), (*stacked, *shape[1:]), Share(moved), int(groups > 1))
    if name not in _VOCAB_DIM:
        return Home(shape, shape, Share(), None)
    vocab_dim = _VOCAB_DIM[name]
    dims = -(-shape[vocab_dim] // mesh.pipe), shape[1 - vocab_dim]
    cuts = spread(dims, mesh.data, mesh.seq)
    rows, hidden = padded(dims, cuts)
    stored = (rows * mesh.pipe, hidden)
    moved = tuple(Cut(vocab_dim if cut.dim == 0 else 1 - vocab_dim, cut.parts) for cut in cuts)
    return Home(stored if vocab_dim == 0 else stored[::-1], shape, Share(moved), vocab_dim)


def _home_of_given(name: str, x: jax.Array, like: jax.ShapeDtypeStruct, plan: Plan) -> Home:
    """Returns the home of a parameter in the form in which a caller gives it: its dims say which form that is."""
    return home_of(name, like.shape, plan, in_order=x.ndim == len(like.shape))


def stored_shapes(
    plan: Plan, params: nnx.State, mesh: Mesh, *, in_order: bool = False, on_device: bool = False
) -> nnx.State:
    """Returns shapes, dtypes and shardings with which no two devices of a stage keep the same part of a parameter.

    Args:
        plan: says how layers are spread.
        params: the tree of `nnx.state(model, nnx.Param)`, arrays or shapes.
        mesh: the plan's mesh, with `seq` whole or divided.
        in_order: whether layers lie in order, as in checkpoints; else where they run.
        on_device: whether all lie in device memory; else where the plan's optimizer waits.

    Raises:
        ValueError: the plan's optimizer waits on the host, and the parameters or the devices do not allow that.
    """

    def place(path, leaf):
        home = home_of(part_of(path), leaf.shape, plan, in_order=in_order)
        sharding = _sharding(home, mesh)
        if plan.optimizer == "host" and not on_device and is_matrix(path, leaf):
            _check_host(path, home, plan)
            sharding = in_host_memory(sharding)
        return jax.ShapeDtypeStruct(home.shape, leaf.dtype, sharding=sharding)

    return jax.tree_util.tree_map_with_path(place, params)


def _check_host(path, home: Home, plan: Plan) -> None:
    if len(home.share.cuts) > 1:
        raise ValueError(
            f"optimizer.place=host must have parameters that the {plan.mesh.data * plan.mesh.seq} devices of a stage "
            f"divide along one dim, got {jax.tree_util.keystr(path)} of {list(home.own)}; change mesh.seq, or "
            "use optimizer.place=device"
        )


def param_shardings(plan: Plan, params: nnx.State, mesh: Mesh) -> nnx.State:
    """Returns shardings of parameters in their own shapes; one that would need zeros is left whole in its stage.

    Args:
        plan: says how layers are spread.
        params: the tree of `nnx.state(model, nnx.Param)`, arrays or shapes.
        mesh: the plan's mesh, with `seq` whole or divided.
    """

    def place(path, leaf, stored):
        if stored.shape == tuple(leaf.shape):
            return stored.sharding
        return _sharding(_whole(home_of(part_of(path), leaf.shape, plan, in_order=True), leaf.shape, plan), mesh)

    stored = stored_shapes(plan, params, mesh, in_order=True, on_device=True)
    return jax.tree_util.tree_map_with_path(place, params, stored)


def as_params_lie(grads: nnx.State, shapes: nnx.State, plan: Plan, mesh: Mesh) -> nnx.State:
    """Places gradients in their own shapes as `param_shardings` does; those in stored shapes stay where they are.

    Where a jit has no `out_shardings`, XLA may divide a dim among more devices than it has rows, which jax cannot name.
    """

    def place(x, like, sharding):
        is_own = x.shape == like.shape and not is_on_host(x)
        return lax.with_sharding_constraint(x, sharding) if is_own else x

    return jax.tree.map(place, grads, shapes, param_shardings(plan, shapes, mesh))


def _whole(home: Home, shape: tuple[int, ...], plan: Plan) -> Home:
    """Returns a home of this shape without cuts; the stages divide it only if it has as many rows for each."""
    dim = home.stage_dim
    return Home(tuple(shape), tuple(shape), Share(), None if dim is None or shape[dim] % plan.mesh.pipe else dim)


def store(params: nnx.State, shapes: nnx.State) -> nnx.State:
    """Brings parameters, or a part of their tree, to the shapes in which they are stored, or back; traceable."""
    return jax.tree.map(lambda x, like: arrange(x, like.shape), params, shapes)


def gather(params: nnx.State, shapes: nnx.State, plan: Plan, mesh: Mesh, dtype) -> nnx.State:
    """Casts matrices, and gathers a stage's parameters on each of its devices where the compiler would not do so.

    The compiler gathers all but parameters with zeros, with two cuts, and a vocabulary that the stages do not divide.
    Layers that are gathered group by group, and a vocabulary that is gathered tick by tick, stay as they are.

    Args:
        params: stored, or in their own shapes.
        shapes: their own shapes. A stored vocabulary keeps its zeros, for each stage has its own.
        plan: says how layers are spread.
        mesh: of the step.
        dtype: matrices are cast to this dtype, and then gathered.
    """

    def whole(path, x, like):
        name, given = part_of(path), tuple(x.shape)
        if plan.weights == "gathered" and name != "final_norm":
            return x
        home, vocab_dim = _home_of_given(name, x, like, plan), _VOCAB_DIM.get(name)
        uneven = vocab_dim is not None and given[vocab_dim] % plan.mesh.pipe != 0
        if is_cast(like, num_stacked_dims(name)):
            x = x.astype(dtype)
            if given == home.shape and home.share.cuts:
                # Without the constraint the compiler may gather the matrix in float32, and cast then.
                x = lax.with_sharding_constraint(x, _sharding(home, mesh))
        if given == home.own and len(home.share.cuts) < 2 and not uneven:
            return x
        x = lax.with_sharding_constraint(x, _sharding(_whole(home, given, plan), mesh))
        kept = tuple(
            have if dim == vocab_dim else size for dim, (size, have) in enumerate(zip(home.own, given, strict=True))
        )
        return fit(x, kept)

    return jax.tree_util.tree_map_with_path(whole, params, shapes)


def gradient_shares(params: nnx.State, shapes: nnx.State, plan: Plan) -> Physical:
    """Returns how the devices of a stage share each gradient of one device.

    Gradients of layers are [v, layers, ...], of a vocabulary [V, D].

    Args:
        params: as the step gets them: those that are stored have gradients that are shared.
        shapes: their own shapes.
        plan: says how layers are spread.
    """

    def share_of(name, x, like):
        home = _home_of_given(name, x, like, plan)
        if tuple(x.shape) != home.shape:
            return Share()
        if name == "layers":
            moved = len(like.shape) + 1 - x.ndim  # from the stacked dims of x to [v, layers]
            return Share(tuple(Cut(cut.dim + moved, cut.parts) for cut in home.share.cuts))
        return Share(tuple(Cut(int(cut.dim != home.stage_dim), cut.parts) for cut in home.share.cuts))

    def part(name):
        return share_of(name, params[name].get_value(), shapes[name].get_value())

    return Physical(
        embedding_VD=part("embedding"),
        layers=jax.tree.map(lambda x, like: share_of("layers", x, like), params["layers"], shapes["layers"]),
        final_norm=jax.tree.map(lambda _: Share(), params["final_norm"]),
        head_VD=part("head") if "head" in params else None,
    )


def sum_over_members(grad: jax.Array, share: Share) -> jax.Array:
    """Adds a gradient over the devices of a stage; each device gets its share. Call it inside `shard_map`.

    Returns:
        The sum, or its cut dims divided.
    """
    if not share.cuts:
        return lax.psum(grad, MEMBERS)
    grad = fit(grad, padded(grad.shape, share.cuts))
    if len(share.cuts) == 1:
        return lax.psum_scatter(grad, MEMBERS, scatter_dimension=share.cuts[0].dim, tiled=True)
    return lax.psum_scatter(split_members(grad, share), MEMBERS, scatter_dimension=0)


def sum_layers_over_members(grad: jax.Array, share: Share) -> jax.Array:
    """Does what `sum_over_members` does with the gradients [v, layers, ...] of a stage's layers, layer by layer."""
    of_layer = Share(tuple(Cut(cut.dim - 2, cut.parts) for cut in share.cuts))
    layers = grad.reshape(-1, *grad.shape[2:])
    sums = lax.map(lambda layer: sum_over_members(layer, of_layer), layers)
    return sums.reshape(*grad.shape[:2], *sums.shape[1:])


def split_members(x: jax.Array, share: Share) -> jax.Array:
    """Returns the shares of all devices of a stage, [members, ...]; `x` has the zeros that its cuts add."""
    cuts, sizes, places = share.dims(), [], {}
    for dim, size in enumerate(x.shape):
        if dim in cuts:
            places[dim] = len(sizes)
            sizes.append(cuts[dim].parts)
        sizes.append(size // cuts[dim].parts if dim in cuts else size)
    blocks = jnp.moveaxis(x.reshape(sizes), [places[cut.dim] for cut in share.cuts], range(len(cuts)))
    return blocks.reshape(-1, *blocks.shape[len(cuts) :])


def join_members(blocks: jax.Array, share: Share) -> jax.Array:
    """Returns the array whose shares are `blocks`: the inverse of `split_members`."""
    cuts, sizes = share.dims(), blocks.shape[1:]
    blocks = blocks.reshape(*(cut.parts for cut in share.cuts), *sizes)
    order = []
    for dim in range(len(sizes)):
        order += [share.cuts.index(cuts[dim])] if dim in cuts else []
        order.append(dim + len(cuts))
    whole = [size * cuts[dim].parts if dim in cuts else size for dim, size in enumerate(sizes)]
    return blocks.transpose(order).reshape(whole)


def gather_whole(mine: jax.Array, share: Share, like: jax.ShapeDtypeStruct) -> jax.Array:
    """Returns a whole array on each device of a stage. Call it inside `shard_map`.

    Args:
        mine: this device's share.
        share: how the devices share the array.
        like: the shape and the dtype of the whole array.
    """
    mine = mine.astype(like.dtype)
    blocks = lax.all_gather(mine.reshape(-1), MEMBERS).reshape(-1, *mine.shape)
    return fit(join_members(blocks, share), like.shape)


def scatter_sum(whole: jax.Array, share: Share) -> jax.Array:
    """Adds an array over the devices of a stage; returns this device's share of the sum, flat. For `shard_map`."""
    blocks = split_members(fit(whole, padded(whole.shape, share.cuts)), share)
    return lax.psum_scatter(blocks.reshape(blocks.shape[0], -1), MEMBERS, scatter_dimension=0)


def within_group(share: Share) -> Share:
    """Returns the share of one group of an array [v, ...]."""
    return Share(tuple(Cut(cut.dim - 1, cut.parts) for cut in share.cuts))


def as_stored(params: nnx.State, shapes: nnx.State, plan: Plan, mesh: Mesh) -> nnx.State:
    """Returns parameters as they are stored, where a caller gives them in their own shapes.

    Args:
        params: stored, or in their own shapes.
        shapes: their own shapes.
        plan: says how they are stored.
        mesh: of the step.
    """

    def place(path, x, like):
        if is_on_host(x):
            return x
        home = home_of(part_of(path), like.shape, plan)
        return lax.with_sharding_constraint(arrange(x, home.shape), _sharding(home, mesh))

    return jax.tree_util.tree_map_with_path(place, params, shapes)


def unplace(stored: Physical, shares: Physical, mesh: Mesh) -> Physical:
    """Gives stored weights with two cuts the dim of members that `gradient_specs` names: the inverse of `unstack`."""

    def take(x, share, stage_dim):
        if len(share.cuts) < 2:
            return x
        divided, axes = _divided(mesh, share)
        return jax.shard_map(
            lambda part: part[None],
            mesh=divided,
            in_specs=Spec(*_axes(share, stage_dim, axes)),
            out_specs=Spec(axes["major"] + axes["minor"], *_axes(Share(), stage_dim, axes)),
            check_vma=False,
        )(x)

    return _map_physical(take, stored, shares)


def stack(grads: Physical, shares: Physical) -> Physical:
    """Adds to the gradients of one device the dims that `gradient_specs` names. Call it inside `shard_map`."""

    def tables(x, share):
        return x[None] if len(share.cuts) == 2 else x

    def of_stage(x):
        return lax.reshape(x, (x.shape[0], 1, *x.shape[1:]))  # not by an index: `x` may be on the host

    layers = jax.tree.map(lambda x, share: tables(of_stage(x), share), grads.layers, shares.layers)
    head = None if grads.head_VD is None else tables(grads.head_VD, shares.head_VD)
    return grads._replace(embedding_VD=tables(grads.embedding_VD, shares.embedding_VD), layers=layers, head_VD=head)


def gradient_specs(shares: Physical) -> Physical:
    """Returns the PartitionSpec of every gradient that a step returns: layers [v, P, layers, ...], vocabulary [V, D].

    A gradient with two cuts has a dim of members before these dims, which `unstack` removes.
    """
    members = {"major": MEMBERS, "minor": ()}

    def spec(share, stage_dim):
        if len(share.cuts) == 2:
            return Spec(MEMBERS, *_axes(Share(), stage_dim, members))
        return Spec(*_axes(share, stage_dim, members))

    return Physical(
        embedding_VD=spec(shares.embedding_VD, 0),
        layers=jax.tree.map(lambda share: spec(_with_stage_dim(share), 1), shares.layers),
        final_norm=jax.tree.map(lambda _: Spec(), shares.final_norm),
        head_VD=None if shares.head_VD is None else spec(shares.head_VD, 0),
    )


def unstack(grads: Physical, shares: Physical, mesh: Mesh) -> Physical:
    """Puts the parts of gradients with two cuts in their places; no device sends anything.

    Args:
        grads: from a step of `gradient_specs`.
        shares: from `gradient_shares`.
        mesh: of the step.
    """

    def place(x, share, stage_dim):
        if len(share.cuts) < 2:
            return x
        divided, axes = _divided(mesh, share)
        return jax.shard_map(
            lambda part: part.squeeze(0),
            mesh=divided,
            in_specs=Spec(axes["major"] + axes["minor"], *_axes(Share(), stage_dim, axes)),
            out_specs=Spec(*_axes(share, stage_dim, axes)),
            check_vma=False,
        )(x)

    return _map_physical(place, grads, shares)


def _map_physical(one, arrays: Physical, shares: Physical) -> Physical:
    """Calls `one(array, share, dim of the stages)` for layers [v, P, layers, ...] and vocabulary [V, D]."""
    layers = jax.tree.map(lambda x, share: one(x, _with_stage_dim(share), 1), arrays.layers, shares.layers)
    head = None if arrays.head_VD is None else one(arrays.head_VD, shares.head_VD, 0)
    return arrays._replace(embedding_VD=one(arrays.embedding_VD, shares.embedding_VD, 0), layers=layers, head_VD=head)


def name_first(x: jax.Array, shares: Physical, mesh: Mesh) -> jax.Array:
    """Lets jax name the shardings of gradients with two cuts, where a jit has no `out_shardings`; constrains nothing.

    jax names them on the first mesh that the program mentions. The mesh of a step has whole axes. On whole axes jax
    ends in an IndivisibleError.

    Args:
        x: an array that the program reads first.
        shares: from `gradient_shares`.
        mesh: of the step.
    """
    all_cuts = [share.cuts for share in jax.tree.leaves(shares, is_leaf=lambda x: isinstance(x, Share))]
    majors = {cuts[0].parts for cuts in all_cuts if len(cuts) == 2}
    data, pipe = mesh.shape["data"], mesh.shape["pipe"]
    ends = sorted(majors | {1, data, mesh.size // pipe})
    steps = list(pairwise(ends))
    if not majors or any(end % begin for begin, end in steps):  # no one mesh names 2 x 15 and 3 x 10
        return x
    of_data = [end // begin for begin, end in steps if end <= data]
    of_seq = [end // begin for begin, end in steps if end > data]
    sizes = (*of_data, pipe, *of_seq)
    names = tuple(f"part_{index}" for index in range(len(sizes)))
    divided = Mesh(mesh.devices.reshape(sizes), names, axis_types=(AxisType.Auto,) * len(sizes))
    return lax.with_sharding_constraint(x, NamedSharding(divided, Spec(*[Spec.UNCONSTRAINED] * x.ndim)))


def _with_stage_dim(share: Share) -> Share:
    """Returns the share of an array that has the dim of the stages behind the dim of the groups."""
    return Share(tuple(Cut(cut.dim + 1, cut.parts) for cut in share.cuts))


def _sharding(home: Home, mesh: Mesh) -> NamedSharding:
    divided, axes = _divided(mesh, home.share)
    return NamedSharding(divided, Spec(*_axes(home.share, home.stage_dim, axes)))


def _axes(share: Share, stage_dim: int | None, names: dict[str, tuple[str, ...]]) -> list:
    """Returns the mesh axes of each dim."""
    axes = {} if stage_dim is None else {stage_dim: ("pipe",)}
    for cut, which in zip(share.cuts, ("major", "minor"), strict=False):
        axes[cut.dim] = axes.get(cut.dim, ()) + names[which]
    return [axes.get(dim) for dim in range(max(axes, default=-1) + 1)]


def _divided(mesh: Mesh, share: Share) -> tuple[Mesh, dict[str, tuple[str, ...]]]:
    """Divides the axis within which the second of two cuts begins; devices keep their order.

    Returns:
        The mesh, and the axes that the major and the minor cut go over.
    """
    if len(share.cuts) < 2:
        members = tuple(name for name in mesh.axis_names if name != "pipe" and mesh.shape[name] > 1)
        return mesh, {"major": members, "minor": ()}
    data, pipe = mesh.shape["data"], mesh.shape["pipe"]
    seq, major = mesh.size // (data * pipe), share.cuts[0].parts
    if major <= data:
        sizes = {"data_major": major, "data_minor": data // major, "pipe": pipe, "seq": seq}
        axes = {"major": ("data_major",), "minor": ("data_minor", "seq")}
    else:
        sizes = {"data": data, "pipe": pipe, "seq_major": major // data, "seq_minor": seq * data // major}
        axes = {"major": ("data", "seq_major"), "minor": ("seq_minor",)}
    devices = mesh.devices.reshape(tuple(sizes.values()))
    return Mesh(devices, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes)), axes
