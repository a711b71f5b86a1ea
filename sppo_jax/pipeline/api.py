"""The public face of the executor: loss and gradients of a plan's step, and each token's scores.

Letters: B sequences, S tokens, R seq members.
"""

import math
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from itertools import chain
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from sppo_jax.arrays import buffers
from sppo_jax.arrays.dtypes import accumulator
from sppo_jax.attention.pallas_blocks import Target, target_of
from sppo_jax.attention.spreading import sequence, teams
from sppo_jax.attention.validate import KEYS
from sppo_jax.compat import (
    check_cudnn,
    check_offload,
    compiler_options,
    has_explicit_sharding,
    is_on_host,
    keeps_order,
    mesh_in_force,
    one_at_a_time,
    outside_meshes,
    sums_whole_stages,
    to_device,
    warn_of_graphs,
    without_explicit_sharding,
)
from sppo_jax.flex.rows import PACKED_ROWS
from sppo_jax.models.layer_classes import layer_of
from sppo_jax.models.leaves import TABLES, is_cast, part_of
from sppo_jax.models.stacks import of_stack, stack_names, stacks_of
from sppo_jax.pipeline import executor as run
from sppo_jax.pipeline.batch import OF_WEIGHTS, WEIGHT_SPECS, check_batch, check_sums, check_weights, taken, weighted
from sppo_jax.pipeline.block import Block, Weights
from sppo_jax.pipeline.cpu_order import in_order
from sppo_jax.pipeline.layer_types import blocks_of, others_of
from sppo_jax.pipeline.layers.stage import Layers, Stage
from sppo_jax.pipeline.layers.token_sums import SharesLayout, Totals, sharing
from sppo_jax.pipeline.loss_and_grads import LossAndGrads
from sppo_jax.pipeline.measures import Measures, TokenScores
from sppo_jax.pipeline.params import layout, storage
from sppo_jax.pipeline.params.group_rows import rows_of_stacks
from sppo_jax.pipeline.params.host_layers import HostLayers
from sppo_jax.pipeline.params.sharded_layers import ShardedLayers
from sppo_jax.pipeline.params.structure import Structure, check_params
from sppo_jax.pipeline.params.vocabulary_tables import VocabularyTables
from sppo_jax.pipeline.pasts.states import StateShape, alike, state_shape
from sppo_jax.pipeline.probe.layer import check_block
from sppo_jax.pipeline.run import Sequences
from sppo_jax.pipeline.stash import host_arguments as host_stash
from sppo_jax.pipeline.stash.buffers import StashLayout
from sppo_jax.pipeline.stash.host_arguments import Stash
from sppo_jax.pipeline.state import TrainingState, evaluation_state, training_state
from sppo_jax.pipeline.traced import loss_scale, unmapped, without_wrong
from sppo_jax.plan.parts import cache_head_dim
from sppo_jax.plan.plan import Plan
from sppo_jax.processes.environment import check_memory_limits
from sppo_jax.program.counters import needs_tables
from sppo_jax.program.program import lower
from sppo_jax.program.ring import AttentionShape, mixed_shape
from sppo_jax.program.stash import StashClass
from sppo_jax.rules import Facts, check, group_size, has_tails, layers_per_virtual_stage


class Step:
    """A plan, a model and a mesh made ready to compile."""

    def __init__(self, plan: Plan, model: nnx.Module, mesh: Mesh | None, *, train: bool):
        """Checks that the three fit together.

        Raises:
            ValueError: they do not; rule, what was got, what to change.
        """
        mesh = layout.make_mesh(plan) if mesh is None else mesh
        self.plan, self.model, self.train = plan, model, train
        self.mesh = layout.inner_mesh(mesh, plan)
        self.blocks = blocks_of(model.layers)
        self.stacks = stack_names(model.layers)
        self.others = others_of(self.blocks, self.stacks)
        self.params = jax.eval_shape(lambda: nnx.state(model, nnx.Param))
        groups = self._types_of_groups()
        self.head_shapes, self.layers, self.shares = self._traced(groups)
        self.target = self._target()
        all_types = list(chain(*groups))
        head_shape = mixed_shape([(shape, all_types.count(one)) for one, shape in self.head_shapes.items()])
        patterns = [self.layers.patterns.index(layer_types) for layer_types in groups]
        self.program = lower(plan, head_shape, patterns, train=train)
        norm_graph, _ = nnx.split(model.final_norm)
        self.norm = lambda weights, x: nnx.merge(norm_graph, weights)(x)

    def _types_of_groups(self) -> tuple[tuple[str | None, ...], ...]:
        """Returns the types of the layers of each group of a stage; of several stages all groups are alike."""
        pipe, groups = self.plan.mesh.pipe, self.plan.schedule.interleave
        if None in self.blocks:
            num_layers = jax.tree.leaves(self.params["layers"])[0].shape[0]
            return ((None,) * layers_per_virtual_stage(num_layers, pipe, groups),) * groups
        config = self.model.config
        layer_types = config.type_names
        size = layers_per_virtual_stage(len(layer_types), pipe, groups, layer_types, config.stack_names)
        return tuple(layer_types[size * group : size * (group + 1)] for group in range(groups))

    def _traced(
        self, groups: tuple[tuple[str | None, ...], ...]
    ) -> tuple[dict[str | None, AttentionShape], Layers, SharesLayout | None]:
        """Traces a layer of each type to find its heads, its state and its shares.

        Raises:
            ValueError: `seq` cannot divide the heads, or types return different shares.
        """
        plan, dtype, heads, shares = self.plan, jnp.dtype(self.model.dtype), {}, {}
        windows: dict[str | None, int] = {}
        states: dict[str | None, StateShape] = {}
        most_layers = max(map(len, groups))
        with_tails = has_tails(plan.stash.inputs, plan.stash.kv, most_layers, flexible=plan.groups == "flex")
        for layer_type, block in self.blocks.items():
            projected, state, like = self._traced_layer(layer_type, block)
            if jax.tree.leaves(like):
                shares[layer_type] = like, block.penalty
            if state is not None:
                self._check_state(state)
                states[layer_type] = state
                continue
            q, k, *_ = projected
            windows[layer_type] = block.mixer.within(plan.sequence_length)
            self._check_split(layer_type, q.shape[1], windows[layer_type], with_tails)
            heads[layer_type] = AttentionShape(
                num_heads=q.shape[1] // plan.ulysses,
                num_kv_heads=sequence.cache_heads(k.shape[1], plan.ulysses),
                head_dim=q.shape[2],
                itemsize=dtype.itemsize,
                window=windows[layer_type] // plan.ring,
                is_tail=with_tails,
            )
        most_whole = max(sum(windows.get(layer_type, 1) == 0 for layer_type in layer_types) for layer_types in groups)
        of_period = Facts(places=(plan.stash.inputs, *["auto"] * 2), kv=plan.stash.kv, most_whole=most_whole)
        check(replace(of_period, is_mixed=None not in self.blocks))
        tails = {
            layer_type: (shape.num_kv_heads, shape.window, shape.head_dim)
            for layer_type, shape in heads.items()
            if with_tails and shape.window
        }
        caches: dict[tuple, list[str | None]] = {}
        for layer_type, shape in heads.items():
            caches.setdefault((shape.num_kv_heads, shape.head_dim, tails.get(layer_type)), []).append(layer_type)
        kv = tuple(map(tuple, caches.values()))
        rows = rows_of_stacks(groups, self.stacks)
        own = dict(tails=tails, states=alike(states), state_shapes=states, rows=rows)
        layers = Layers(self.blocks, self.stacks, groups[0], groups, kv, tuple(shares), windows, **own)
        return heads, layers, self._shares_layout(shares, groups)

    def _traced_layer(self, layer_type: str | None, block: Block):
        """Returns the shapes of what a token gives to the mixer in a layer of a type, of its state, and of shares."""
        weights = Weights(
            *(
                jax.tree.map(
                    lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), of_stack(tree, self.stacks[layer_type])
                )
                for tree in (self.params["layers"], self.others)
            )
        )
        hidden = self.params["embedding"].get_value().shape[1]
        x_TD = jax.ShapeDtypeStruct((1, hidden), jnp.dtype(self.model.dtype))
        projected = jax.eval_shape(block.before, weights, x_TD, jax.ShapeDtypeStruct((1,), jnp.int32))
        out, state = projected[0], None
        if block.has_state:
            state = state_shape(block.mixer, projected, self.plan.mesh.seq)
            out = jax.ShapeDtypeStruct((1, *state.out_NV.shape), state.out_NV.dtype)
        chosen = jax.eval_shape(block.choose, weights, x_TD, out)
        return projected, state, jax.eval_shape(block.after, weights, x_TD, out, chosen)[1]

    def _shares_layout(self, shares: dict, groups: tuple[tuple[str | None, ...], ...]) -> SharesLayout | None:
        if not shares:
            return None
        (like, penalty), *others = shares.values()
        if self.train and penalty is not None:
            check_sums(self.plan, penalty.over)
        if any(other != (like, penalty) for other in others):
            raise ValueError(
                f"all layer types that return shares must return the same, with one penalty, got other ones of "
                f"{', '.join(map(str, shares))}; make their experts alike"
            )
        return SharesLayout(like, penalty, self.plan, jnp.dtype(self.model.dtype), sharing(groups, tuple(shares)))

    def _check_state(self, shape: StateShape) -> None:
        """Checks that a plan can run layers with a state."""
        plan, attends = self.plan, not all(block.has_state for block in self.blocks.values())
        check(
            Facts(
                state_heads=shape.out_NV.shape[0],
                attends=attends,
                seq=plan.mesh.seq,
                groups=plan.groups,
                kv=plan.stash.kv,
                places=(plan.stash.inputs, plan.stash.attention, plan.stash.rest),
            )
        )

    def _check_split(self, layer_type: str | None, num_heads: int, window: int, with_tails: bool) -> None:
        """Checks that `seq` can divide the heads and the window of a layer, and that the model has this window too."""
        config, mixer = self.model.config, self.blocks[layer_type].mixer
        planned = config.of_type(config.type_names[0] if layer_type is None else layer_type).sliding_window or 0
        if planned != mixer.window:
            raise ValueError(
                f"a layer must have the window of model.sliding_window={planned}, got {mixer.window}; set its "
                "attribute mixer (sppo_jax.Attention), or the model's setting"
            )
        check(
            Facts(
                num_heads=num_heads,
                split=self.plan.sequence_kind,
                ulysses=self.plan.ulysses,
                seq=self.plan.mesh.seq,
                window=window,
                groups=self.plan.groups,
                kernel=self.plan.kernel,
                has_tails=with_tails,
            )
        )

    @property
    def platform(self) -> str:
        return self.mesh.devices.flat[0].platform

    @property
    def uses_host(self) -> bool:
        return self.plan.optimizer == "host" or any(name.uses_host for name in self.program.stash.classes)

    @property
    def compiler_options(self) -> dict | None:
        """Options that the outermost jit should pass to the compiler."""
        # What waits on the host besides the stash adds copies to each tick.
        in_pieces = len(self.plan.host_pieces) > 1
        more = self.plan.optimizer == "host" or self.program.waiting.num_rows > 0 or in_pieces
        tables = needs_tables(self.program.items, self.program.rows)
        return compiler_options(self.platform, self.uses_host, self.mesh.size, many_copies=more, tables=tables)

    def check(self, params: nnx.State, batch: Mapping) -> None:
        """Checks parameters and a batch; checks the batch's values too if they are on this host.

        Raises:
            ValueError: the rule, what was got, what to change.
        """
        check_params(params, self.params, self.plan)
        if self.train and self.plan.optimizer == "host" and not any(map(is_on_host, jax.tree.leaves(params))):
            raise ValueError(
                "the gradients of a plan with optimizer.place=host must get parameters in host memory, got parameters "
                "in device memory; put them where sppo_jax.stored_shapes(plan, params, mesh) says, "
                "or plan with optimizer.place=device"
            )
        has = any(self.layers.windows.values()), bool(self.layers.states)
        over = self.shares.over if self.train and self.shares else None
        check_batch(batch, self.plan, self.model.config.vocab_size, *has, of_sequences=over == "sequence")
        if self.train:
            check_weights(batch, self.plan)

    @property
    def keys(self) -> tuple[str, ...]:
        """The arrays of integers that the step takes of a batch."""
        return (*KEYS, PACKED_ROWS) if self.train and self.shares and self.shares.is_moved else KEYS

    def taken(self, batch: Mapping) -> dict:
        return taken(batch, self.keys) | {key: batch[key] for key in OF_WEIGHTS if self.train and key in batch}

    def __call__(self, params: nnx.State, batch: Mapping, stash: Stash | None = None):
        """Runs the step on parameters in their own shapes or stored; pure and traceable.

        A training step returns the loss, the gradients, the sum of the squares of those on the host if some are there,
        and its `Measures`. With the pieces of its stash given, it returns these results and the pieces.
        """
        in_force = mesh_in_force()
        if in_force is not None and in_force.size != self.mesh.size:
            raise ValueError(
                f"a jit within jax.set_mesh must have a mesh of the plan's {self.mesh.size} devices, got "
                f"{in_force.size} ({', '.join(in_force.axis_names)}); use jax.set_mesh(make_mesh(plan)), or "
                "call the function outside of jit"
            )
        if any(map(has_explicit_sharding, jax.tree.leaves((params, batch)))):
            raise ValueError(
                "a jit must take arrays whose types leave their shardings open, got a mesh of AxisType.Explicit; use a "
                "mesh of AxisType.Auto, as make_mesh(plan) makes, or call the function outside of jit"
            )
        batch, _ = unmapped((self.taken(batch), params["final_norm"]))
        with outside_meshes():
            return self._run(params, batch, stash)

    @cached_property
    def stash_shapes(self) -> Stash:
        """The pieces of the stash on the host, see `host_stash`; none where the stash is in one piece."""
        if not self.train or len(self.plan.host_pieces) == 1:
            return {}
        return host_stash.stash_shapes(self.program, self.stash_layout, self.mesh)

    @property
    def host_stash_bytes(self) -> int:
        """Bytes of the stash on the host, of one device."""
        return host_stash.stash_bytes(self.program, self.stash_layout)

    def stash_layout(self, name: StashClass) -> StashLayout:
        """Returns how the stash of a class lies on a device, and on its host."""
        dtype = jnp.dtype(self.model.dtype)

        def on_stage(x, dtype):  # [groups, layers, ...]
            return jax.ShapeDtypeStruct((1, *x.shape), dtype)

        params = jax.tree.map(lambda x: on_stage(x, dtype if is_cast(x, 1) else x.dtype), self.params["layers"])
        others = jax.tree.map(lambda x: on_stage(x, x.dtype), self.others)
        stage = Stage(self.layers, Weights(params, others), self.plan.stash)
        hidden_size = self.params["embedding"].get_value().shape[1]
        x_TD = jax.ShapeDtypeStruct((name.tokens, hidden_size), dtype)
        positions_T = jax.ShapeDtypeStruct((name.tokens,), jnp.int32)
        stash = self.program.stash
        num_slots, is_short = stash.classes[name], stash.num_short.get(name, 0) > 0
        layout = stage.layout(name, num_slots, x_TD, positions_T, has_short_rows=is_short)
        return replace(layout, host_pieces=self.plan.host_pieces)

    def with_stash(self, params: nnx.State, batch: Mapping, stash: Stash) -> tuple:
        """Runs the step with the pieces of its stash given; returns what the step returns, and the pieces."""
        return self(params, batch, stash)

    def _run(self, params: nnx.State, batch: Mapping, stash: Stash | None):
        plan, given = self.plan, params
        on_host = any(map(is_on_host, jax.tree.leaves(params)))
        if on_host:
            params = self._with_tables(params)
        stored = params
        if self._by_groups:
            stored = storage.stored_shapes(plan, self.params, self.mesh, on_device=True)
        shares = storage.gradient_shares(stored, self.params, plan)
        if self.train:
            batch = batch | {KEYS[0]: storage.name_first(jnp.asarray(batch[KEYS[0]]), shares, self.mesh)}
        if self._by_groups:
            params = storage.as_stored(params, self.params, plan, self.mesh)
        # Cast before the devices of a stage gather the weights, which then are half as many bytes.
        dtype = jnp.dtype(self.model.dtype)
        whole = storage.gather(params, self.params, plan, self.mesh, dtype)
        physical = layout.to_physical(whole, self.params, self.others, plan)
        specs = layout.physical_specs(physical)
        if self._by_groups:
            physical, specs = self._of_shares(shares, physical, specs)
        else:
            physical = layout.cast(physical, dtype)
        striped = [layout.stripe(jnp.asarray(batch[key], jnp.int32), plan) for key in self.keys]
        weights = weighted(batch, plan)
        out_specs = layout.STRIPED
        if self.train:
            out_specs = (P(), storage.gradient_specs(shares), *[P()] * (on_host + 1))
        of_stash = () if stash is None else (host_stash.spec(self.mesh),)
        as_written = self.mesh.size == 1 or keeps_order(self.platform)
        on_device = partial(self._on_device, shares)
        step = jax.shard_map(
            on_device if as_written else in_order(on_device),
            mesh=self.mesh,
            in_specs=(specs, [layout.STRIPED] * len(striped), WEIGHT_SPECS[: len(weights)], *of_stash),
            out_specs=(*out_specs, *of_stash) if of_stash else out_specs,
            check_vma=False,  # every collective is written out below; autodiff never sees one
        )
        result = step(physical, striped, weights, *[stash] * len(of_stash))
        if not self.train:
            return TokenScores(*(x.reshape(plan.num_sequences, plan.sequence_length) for x in result))
        loss, grads, *others = result
        grads = layout.to_logical(storage.unstack(grads, shares, self.mesh), given)
        grads = storage.as_params_lie(grads, self.params, plan, self.mesh)
        chex.assert_trees_all_equal_shapes_and_dtypes(grads, given)
        return (loss, grads, *others) if stash is None else ((loss, grads, *others[:-1]), others[-1])

    def _with_tables(self, params: nnx.State) -> nnx.State:
        """Returns parameters with the vocabulary tables on the device, in the compute dtype, for the whole step."""

        def fetch(path, x):
            waits = is_on_host(x) and part_of(path) in TABLES
            return to_device(x).astype(self.model.dtype) if waits else x

        return jax.tree_util.tree_map_with_path(fetch, params)

    def _on_device(self, shares: layout.Physical, weights: layout.Physical, striped: list, weighted: tuple, *stash):
        plan, program, dtype = self.plan, self.program, jnp.dtype(self.model.dtype)
        weights, tables, sharded = self._weights_of_device(shares, weights)
        chex.assert_shape(striped, (plan.sequences_per_pipeline, plan.sequence_length // plan.mesh.seq, 1))
        sequences = self._sequences(striped, weighted)
        vocab_size, one_document = self.model.config.vocab_size, plan.has_one_document
        scale = loss_scale(striped, vocab_size, plan.num_sequences, dtype, *weighted[1:], one_document=one_document)
        layers = weights.layers
        if sharded is not None:
            shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape), x.dtype), sharded.wholes)
            layers = layers._replace(params=shapes)
        stage = Stage(replace(self.layers, traced={}), layers, plan.stash, self.shares)
        executor = run.Executor(
            plan=plan,
            program=program,
            stage=stage,
            vocabulary_tables=tables,
            final_norm=weights.final_norm,
            sharded=sharded,
            norm=self.norm,
            vocab_size=vocab_size,
            embedding_scale=self.model.config.embedding_scale,
            logit_cap=self.model.config.logit_cap or 0.0,
            sequences=sequences,
            scale=scale,
            penalty_weights=None if self.shares is None else self.shares.weights(*(x[..., 0] for x in striped[3:])),
            train=self.train,
            modes=self._modes(sequences),
            keeps_order=keeps_order(self.platform),
            target=self.target,
        )
        cache_shapes = self._cache_shapes()
        if not self.train:
            scored = executor.run(evaluation_state(executor, cache_shapes))
            losses_MS, hits_MS = (x[:, : striped[0].shape[1], None] for x in (scored.losses_MS, scored.hits_MS))
            return without_wrong(losses_MS, striped, vocab_size, one_document=one_document), hits_MS
        trained = executor.run(training_state(executor, cache_shapes, self._kv_grad_dtype(dtype), *stash))
        loss = lax.psum(trained.loss, ("data", *layout.SEQ)) * scale
        layers, *squares = trained.weights.gradients(executor)
        grads, num_members = trained.grads._replace(layers=layers), plan.mesh.data * plan.mesh.seq
        by_layer = not sums_whole_stages(self.platform)
        grads = run.sum_gradients(grads, shares, num_members, are_shares=self._by_groups, by_layer=by_layer)
        measures = self._measures(trained, loss, executor.penalty_weights)
        return loss, storage.stack(grads, shares), *squares, measures, *[trained.stash.host] * len(stash)

    def _target(self) -> Target | None:
        """Returns what the kernel for TPUs is compiled for.

        Raises:
            ValueError: the device or the dtype is none that the kernel takes.
        """
        if self.plan.kernel != "pallas":
            return None
        groups = max((shape.num_heads // shape.num_kv_heads for shape in self.head_shapes.values()), default=1)
        return target_of(self.mesh.devices.flat[0].device_kind, groups, jnp.dtype(self.model.dtype).itemsize)

    def _measures(self, trained: TrainingState, loss: jax.Array, weights: jax.Array | None) -> Measures:
        members = "data", *layout.SEQ
        num_hits = lax.psum(trained.num_hits, members)
        entropy = loss - lax.psum(trained.over_entropy, (*members, "pipe"))
        return Measures(num_hits, entropy, None if weights is None else self._totals(trained, weights))

    def _totals(self, trained: TrainingState, weights: jax.Array) -> Totals:
        sums_MvnW = trained.shares_MvnW
        if not keeps_order(self.platform):
            # Otherwise XLA takes the sum over devices ahead of the last loop, where collectives have no order.
            sums_MvnW = sums_MvnW + buffers.after(trained.dx_TD).astype(sums_MvnW.dtype)
        return self.shares.totals(sums_MvnW, weights)

    @property
    def _by_groups(self) -> bool:
        return self.plan.weights == "gathered"

    def _of_shares(self, shares: layout.Physical, physical: layout.Physical, specs: layout.Physical):
        """Returns the weights as each device's shares, and their specs; the final norm is whole."""
        stored = storage.unplace(physical._replace(layers=physical.layers.params), shares, self.mesh)
        of_shares = storage.gradient_specs(shares)
        physical = stored._replace(layers=physical.layers._replace(params=stored.layers))
        return physical, of_shares._replace(layers=specs.layers._replace(params=of_shares.layers))

    def _weights_of_device(self, shares: layout.Physical, weights: layout.Physical):
        """Drops the dims of stages and members, which have one entry on a device.

        Returns:
            The weights; the vocabulary tables; and the layers as `ShardedLayers` where weights are gathered, else None.
        """
        if not self._by_groups:
            weights = weights._replace(layers=jax.tree.map(lambda x: x.squeeze(1), weights.layers))
            return weights, self._tables(weights, None), None
        dtype = jnp.dtype(self.model.dtype)

        on_host = any(map(is_on_host, jax.tree.leaves(weights.layers.params)))

        def shard(x, share):
            return x.squeeze(0) if len(share.cuts) == 2 else x

        def whole(like):
            num_layers, *own = like.shape
            of_group = group_size(num_layers, self.plan.mesh.pipe * self.plan.schedule.interleave)
            return jax.ShapeDtypeStruct((of_group, *own), dtype if is_cast(like, 1) else like.dtype)

        shards = jax.tree.map(
            lambda x, share: x if on_host else shard(x, share).squeeze(1), weights.layers.params, shares.layers
        )
        others = jax.tree.map(lambda x: x.squeeze(1), weights.layers.others)
        layers = weights.layers._replace(params=shards, others=others)
        head = None if weights.head_VD is None else shard(weights.head_VD, shares.head_VD)
        embedding = shard(weights.embedding_VD, shares.embedding_VD)
        weights = weights._replace(layers=layers, embedding_VD=embedding, head_VD=head)
        wholes = jax.tree.map(whole, self.params["layers"])
        rows = self.layers.rows
        sharded = ShardedLayers(shards, shares.layers, wholes, rows=rows)
        if on_host:
            # An evaluation fetches whole shares.
            sharded = HostLayers(shards, shares.layers, wholes, max(1, self.program.weights.num_parts), rows=rows)
        return weights, self._tables(weights, shares), sharded

    def _tables(self, weights: layout.Physical, shares: layout.Physical | None) -> VocabularyTables:
        """Returns the vocabulary tables of one device; each stage has its share."""
        dtype, of_members = jnp.dtype(self.model.dtype), {}
        arrays = {name: getattr(weights, name) for name in ("embedding_VD", "head_VD")}
        arrays = {name: x for name, x in arrays.items() if x is not None}
        hidden_size, wholes = self.params["embedding"].get_value().shape[1], {}
        for name, x in arrays.items():
            of_members[name] = getattr(shares, name) if shares is not None else storage.Share()
            rows = x.shape[0] * math.prod(cut.parts for cut in of_members[name].cuts if cut.dim == 0)
            wholes[name] = jax.ShapeDtypeStruct((rows, hidden_size), dtype)
        return VocabularyTables(arrays, None if shares is None else of_members, wholes)

    def _modes(self, sequences: Sequences) -> teams.Modes | None:
        if self.plan.groups == "static":
            return None
        of_member = [
            [tokens // self.plan.mesh.seq for tokens in sizes]
            for sizes in (self.plan.table().chunk_starts, self.plan.chunk_lengths)
        ]
        return teams.find_modes(sequences.documents, *of_member, self.mesh.axis_names)

    def _cache_shapes(self) -> list[tuple[int, ...]]:
        plan = self.plan
        of_chunk, length, found = self.program.max_tokens * plan.ulysses, plan.sequence_length // plan.ring, []
        for layer_types in self.layers.kv:
            shape, tail = self.head_shapes[layer_types[0]], self.layers.tails.get(layer_types[0])
            tokens = (tail[1] if tail else length) + of_chunk
            head_dim = cache_head_dim(plan.kernel, shape.head_dim)
            found.append((self.layers.count(layer_types), shape.num_kv_heads, tokens, head_dim))
        return found

    def _kv_grad_dtype(self, dtype):
        return accumulator(dtype) if self.plan.stash.kv_grad_dtype == "float32" else jnp.dtype(jnp.bfloat16)

    def _sequences(self, striped: list[jax.Array], weights: tuple[jax.Array, ...]) -> Sequences:
        """Pads every array by one longest chunk behind the sequence."""

        def padded(x):
            return jnp.pad(x[..., 0], ((0, 0), (0, self.program.max_tokens)))

        return Sequences(*map(padded, striped), weights=padded(weights[0]) if weights else None)


def value_and_grad(plan: Plan, model: nnx.Module, mesh: Mesh | None = None) -> LossAndGrads:
    """Makes `f(params, batch) -> (loss, grads)`: the counterpart of `jax.value_and_grad` for a plan's pipeline.

    Args:
        plan: from `make_plan`.
        model: a `Decoder`; gives the structure, its own values are not read.
        mesh: axes data, pipe, seq of the plan's sizes; the first devices by default.

    Returns:
        f, jittable (give a jit around it `compiler_options=f.compiler_options`: copies overlap compute only then).
        params: the tree of `nnx.state(model, nnx.Param)`. batch: int32 [num_sequences, sequence_length] tokens, targets
        (-1 = no loss), positions, document_ids (-1 = padding). The loss is in nats a target over the whole batch;
        gradients have the tree and dtypes of params. A batch that is traced in a caller's jit, or lies on other hosts,
        cannot be looked at: its shapes are checked, and the loss is NaN where a token or a target is not below the
        vocabulary, a position is negative, padding has a target, or a sequence has a second document where the plan
        says one. There a target below -1 is no target, and the order of documents and positions is not checked. With
        teams and a loss over each sequence, as that of experts, `packed_rows` (int32) says from which row of the packed
        batch each token comes; left out, tokens are in theirs. With `weights`, real [num_sequences, sequence_length],
        the loss is the sum of weight x nats over `weights_divisor` (a real number, 1 if left out), and the gradients
        are those of this sum; weights may be negative, and those without a target are not read. Where parameters are on
        the host (`storage.stored_shapes`), those of layers have their gradients there, and f returns the sum of the
        squares of these as well. `f.stash_shapes` and `f.with_stash` are for a jit that keeps the stash on the host, as
        the trainer's does where the plan cuts it into pieces (`pipeline/stash/host_arguments.py`). f itself refuses
        such a plan on GPUs.

    Raises:
        ValueError: plan, model and mesh do not fit together, a batch breaks the contract, or f is within `jax.vmap`.
    """
    step, f = _made(plan, model, mesh, train=True)
    check_offload(step.platform, step.uses_host)
    check_memory_limits(plan)
    warn_of_graphs(step.platform, step.mesh.size)
    if plan.kernel == "cudnn" and step.platform not in ("gpu", "cuda"):
        warnings.warn(
            f"the plan's kernel is cudnn, got {step.platform} devices, on which a plain kernel replaces cudnn: "
            "correct, but slow and with large arrays; plan with model.kernel=blockwise",
            stacklevel=2,
        )
    if step.target is not None and step.target.chip.is_interpreter:
        warnings.warn(
            f"the plan's kernel is pallas, got {step.platform} devices, which interpret it: correct, but slow; plan "
            "with model.kernel=blockwise",
            stacklevel=2,
        )
    return f


def evaluate(plan: Plan, model: nnx.Module, mesh: Mesh | None = None) -> Callable:
    """Makes `f(params, batch) -> TokenScores`: each token's loss, and whether its target is the most likely token.

    Args:
        plan: as for `value_and_grad`.
        model: so is the model.
        mesh: so is the mesh.

    Returns:
        f, jittable. Where a batch cannot be looked at, all losses of a sequence are NaN if one of its tokens is wrong.

    Raises:
        ValueError: as `value_and_grad`.
    """
    return _made(plan, model, mesh, train=False)[1]


def _made(plan: Plan, model: nnx.Module, mesh: Mesh | None, *, train: bool) -> tuple[Step, Callable]:
    """Makes a step and its function, or returns the existing pair of an equal plan, model and mesh."""
    mesh = layout.make_mesh(plan) if mesh is None else mesh
    if plan.kernel == "cudnn":
        check_cudnn(mesh.devices.flat[0])
    structure = Structure.of(model)
    try:
        step, compiled = _compile_once(_Request(plan.to_json(), structure, mesh, train))
    except TypeError:  # a user's block may have attributes that cannot be compared
        step, compiled = _jitted(plan, structure, mesh, train=train)
    return step, _checked(step, compiled)


class _Request(NamedTuple):
    plan_json: str
    structure: Structure
    mesh: Mesh
    train: bool


@lru_cache(maxsize=8)
def _compile_once(request: _Request) -> tuple[Step, Callable]:
    return _jitted(Plan.from_json(request.plan_json), request.structure, request.mesh, train=request.train)


def _jitted(plan: Plan, structure: Structure, mesh: Mesh, *, train: bool) -> tuple[Step, Callable]:
    model = structure.model()
    for layer_type, stack in stacks_of(model.layers).items():
        config = model.config if layer_type is None else model.config.of_type(layer_type)
        if type(stack) is not layer_of(config):
            check_block(stack, model)
    step = Step(plan, model, mesh, train=train)
    return step, jax.jit(step.__call__, compiler_options=step.compiler_options)


def check_whole(step: Step) -> None:
    """Checks that a call without the pieces of the stash can run.

    Raises:
        ValueError: the plan has several pieces, which would be one allocation that no driver pins.
    """
    if step.stash_shapes and step.platform in ("gpu", "cuda", "rocm"):
        raise ValueError(
            f"a plan whose stash on the host is in pieces must be given the pieces on GPUs, got host_pieces "
            f"{list(step.plan.host_pieces)} and a call without them; use sppo_jax.make_train_step, or "
            "f.with_stash in a jit of your own"
        )


def _checked(step: Step, compiled: Callable) -> Callable:
    """Makes the function that users get: a new one each time, because a jit around it remembers what it traced."""

    def with_measures(params: nnx.State, batch: Mapping):
        check_whole(step)
        step.check(params, batch)
        batch = step.taken(batch)
        if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((params, batch))):
            return step(params, batch)  # compiler options belong to the outermost jit
        # A mesh of the user's would be the one that the program must run on.
        with nullcontext() if mesh_in_force() is None else jax.set_mesh(step.mesh):
            outputs = compiled(*jax.tree.map(without_explicit_sharding, (params, batch)))
        return jax.block_until_ready(outputs) if one_at_a_time(step.platform) else outputs

    def f(params: nnx.State, batch: Mapping):
        outputs = with_measures(params, batch)
        return outputs[:-1] if step.train else outputs

    def prepare(params: nnx.State, batch: Mapping, look: Callable[[jax.stages.Lowered], None] = lambda _: None) -> None:
        """Compiles the program for arguments like these, if it is not compiled yet; `look` sees it lowered."""
        step.check(params, batch)
        batch = step.taken(batch)
        with nullcontext() if mesh_in_force() is None else jax.set_mesh(step.mesh):
            lowered = compiled.lower(*jax.tree.map(without_explicit_sharding, (params, batch)))
            look(lowered)
            lowered.compile()

    f.compiler_options = step.compiler_options  # for a jit around f
    f.stash_shapes, f.with_stash = step.stash_shapes, step.with_stash  # for a jit that keeps the stash
    f.prepare, f.with_measures = prepare, with_measures
    return f
