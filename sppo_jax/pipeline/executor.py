"""The SPMD program of one device: ticks in nested loops, which read the rows of a program.

All collectives of a tick's spec run on every device; a stage without a unit computes on padding, writes to
trash slots and behind the sequences in its buffers, and contributes zeros. What goes on beside the units is in
`mechanisms/`.

Letters: M sequences of this pipeline, S tokens, T tokens of a tick on one device, D hidden size, V vocabulary entries
of one stage.
"""

from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
from jax import lax

from sppo_jax.arrays import buffers
from sppo_jax.pipeline import units, vocabulary
from sppo_jax.pipeline.layers import layer_group
from sppo_jax.pipeline.layers import stage as stages
from sppo_jax.pipeline.mechanism import TickOnDevice
from sppo_jax.pipeline.params.layout import Physical
from sppo_jax.pipeline.params.storage import sum_layers_over_members, sum_over_members
from sppo_jax.pipeline.rows import TickRow, TickRows, rows_of
from sppo_jax.pipeline.run import Run
from sppo_jax.pipeline.state import EvaluationState, State, TrainingState, changed, mechanisms_of
from sppo_jax.program.fold import Loop, unfold
from sppo_jax.rules import BREADTH_FIRST

# Names under which a profile shows the operations of a tick. The names of ticks without ends have a suffix.
TICK_NAMES = {"F": "forward_tick", "B": "backward_tick", "H": "head_tick"}
WITHOUT_ENDS = "_without_ends"
# Numbers that say which weights a unit uses, and where a forward writes.
_OF_WEIGHTS = ("group", "weights.slot", "weights.sum_slot")
_WRITTEN = ("prefixes.slot", "sequence_slot", "stash.slot", "waiting.arrive_slot")
# The arrays that a tick's host copies move: of each mechanism's name a tree, or None.
Coming = dict[str, object]


class Executor(Run):
    """Runs the ticks of a run, one after another."""

    def run(self, state: State) -> State:
        """Runs all ticks."""
        me = vocabulary.stage_index(self.num_stages)
        rows = {name: rows_of(name, value, me) for name, value in self.program.rows.items()}
        return self._run_items(self.program.items, rows, state)

    def _run_items(self, items: tuple, rows: dict[str, TickRows], state: State) -> State:
        place = 0
        for item in items:
            length = len(unfold([item]))
            part = {name: value.cut(place, length) for name, value in rows.items()}
            place += length
            if not isinstance(item, Loop):
                state = self.tick(TickOnDevice(item, TickRow.of(part), state.x_TD, state.dx_TD), state)
                continue

            def iteration(i, state, item=item, part=part):
                return self._run_items(item.body, {n: x.in_iteration(i, item.count) for n, x in part.items()}, state)

            state = lax.fori_loop(0, item.count, iteration, state)
        return state

    def tick(self, tick: TickOnDevice, state: State) -> State:
        """Runs one tick. Profiles show operations under the tick's name."""
        spec = tick.spec
        with jax.named_scope(TICK_NAMES[spec.op] + ("" if spec.has_ends or spec.embeds else WITHOUT_ENDS)):
            state = changed(state, lambda _, part: part.before(self, tick))
            coming = {name: part.start(self, tick, state) for name, part in mechanisms_of(state).items()}
            if not spec.is_compute:
                return self._head_tick(tick, state, coming)
            state = self._units(tick, state, coming)
            state = changed(state, lambda _, part: part.after(self, tick))
            return _with_copies_ended(tick, state)

    def _units(self, tick: TickOnDevice, state: State, coming: Coming) -> State:
        """Runs the units of a compute tick."""
        if self.train and self.plan.schedule.interleave > 1 and self.keeps_order:
            # Otherwise XLA slices the weights of several ticks at once and holds the slices until the last tick.
            tick = tick.later(tick.begun(), _OF_WEIGHTS)
        if tick.spec.op == "B":
            return self._backward_tick(tick, state, coming)
        return self._forward_tick(tick.later(state.order, _WRITTEN) if self.train else tick, state, coming)

    def _arrive(self, tick: TickOnDevice, state: State, coming: Coming) -> State:
        """Gives the mechanisms what has come for them."""

        def change(name, part):
            arrives = tick.spec.is_compute or coming[name] is not None
            return part.arrive(self, tick, coming[name]) if arrives else part

        return changed(state, change)

    def _held(self, state: State) -> stages.Stage:
        """Returns this device's layers with the weights that it holds."""
        return self.stage if self.sharded is None else self.stage.holding(state.weights.gathered)

    def _shift(self, x, step: int):
        if self.num_stages == 1:
            return x
        perm = [(s, (s + step) % self.num_stages) for s in range(self.num_stages)]
        return lax.ppermute(x, vocabulary.AXIS, perm)

    # -- forward --------------------------------------------------------------------------------------------------

    def _input(self, tick: TickOnDevice, state: State) -> jax.Array:
        """Returns x_TD of this stage's chunk: its embedding where the chunk enters, else from the stage before."""
        me = vocabulary.stage_index(self.num_stages)
        arrived_TD = state.waiting.input(self, tick, state.x_TD)
        if not tick.spec.embeds:
            return arrived_TD
        tokens_T = units.own(self, tick, self.sequences.tokens, 0)
        embedding_VD = self.vocabulary_tables.whole("embedding_VD", state.x_TD)
        entering = vocabulary.embed(embedding_VD, tokens_T, self.num_stages, self.embedding_scale)
        return jnp.where(tick.mine("first", me) == 1, entering, arrived_TD)

    def _forward_tick(self, tick: TickOnDevice, state: State, coming: Coming) -> State:
        x_TD = self._input(tick, state)
        filling = state.stash.to_fill(self, tick) if self.train else None
        tags = units.write_tags(self, tick, state.tags)
        passes = tick.spec.passes.forward
        unit, split = units.unit(self, tick, passes, tags), units.split(self, passes)
        sent, early = self._held_write(tick, state, coming), self._early(tick, state, coming)
        is_held = _is_under_way(coming) or sent is not None
        late = {name: one for name, one in coming.items() if name not in early}
        held = (late, sent) if is_held else None
        memory = stages.Memory(state.prefixes.caches, state.shares_MvnW if self.train else None, state.states)
        y_TD, memory, filled, held, early = layer_group.forward(
            self._held(state), unit, x_TD, memory, split, filling, held, early or None
        )
        chex.assert_equal_shape((x_TD, y_TD))
        caches = memory.caches
        if self.target is not None:
            # A lone stage's next forward asks for nothing of this one. XLA:TPU would let it write to the caches before
            # the last layer has read them, and copy them.
            y_TD, caches = lax.optimization_barrier((y_TD, caches))
        register = buffers.write(state.x_TD, (0,), self._shift(y_TD, 1))
        state = state._replace(
            x_TD=register,
            tags=tags,
            prefixes=replace(state.prefixes, caches=caches),
            states=memory.states,
            waiting=state.waiting.let_in(self, tick, register),
        )
        late, sent = held or (coming, sent)
        state = self._arrive(tick, state, late | (early or {}))
        if self.train:
            stash = state.stash if sent is None else state.stash.with_sent(sent)
            state = state._replace(stash=stash.with_filled(tick, filled), shares_MvnW=memory.shares_MvnW)
        return state

    def _early(self, tick: TickOnDevice, state: State, coming: Coming) -> Coming:
        """Returns what is held back until attention only."""
        parts = mechanisms_of(state)
        arriving = {name: one for name, one in coming.items() if one is not None}
        return {name: one for name, one in arriving.items() if parts[name].comes_early(self, tick)}

    def _held_write(self, tick: TickOnDevice, state: State, coming: Coming):
        """Returns the host buffer whose write is held back until the last layer, in a forward that fetches nothing.

        Without this XLA ends the write before the loop over the layers where a stage is one device and the tick has no
        head: 23.6% of the bytes of a breadth-first plan were exposed.
        """
        by_groups = self.plan.schedule.name == BREADTH_FIRST and self.plan.mesh.data * self.plan.mesh.seq == 1
        return state.stash.sent(tick) if self.train and by_groups and not _is_under_way(coming) else None

    # -- head -----------------------------------------------------------------------------------------------------

    def _head_tick(self, tick: TickOnDevice, state: State, coming: Coming) -> State:
        dhead_VD = (
            self.vocabulary_tables.sum_of_tick(self.vocabulary_tables.head_name, state.grads) if self.train else None
        )
        # The last stage's output has travelled on to stage 0, and may have waited there.
        x_TD = vocabulary.from_stage(state.waiting.input(self, tick, state.x_TD), 0, self.num_stages)
        targets_T = jnp.where(units.real(self, tick, 0), units.own(self, tick, self.sequences.targets, 0), -1)
        weights_MS = self.sequences.weights
        weights_T = None if weights_MS is None else units.own(self, tick, weights_MS, 0)
        rows_VD = self.vocabulary_tables.whole(self.vocabulary_tables.head_name, state.x_TD)
        given = vocabulary.Head(self.norm, self.final_norm, rows_VD, self.vocab_size, self.num_stages, self.logit_cap)
        held = coming if _is_under_way(coming) else None
        of_tokens = targets_T, self.scale, dhead_VD, weights_T
        result = vocabulary.head(given, x_TD, *of_tokens, gradients=self.train, held=held)
        if not self.train:
            return self._scored(tick, state, result)
        state = self._arrive(tick, state, result.held or coming)
        return self._with_gradients_of_head(tick, state, result)

    def _scored(self, tick: TickOnDevice, state: EvaluationState, result: vocabulary.HeadResult) -> EvaluationState:
        where = (tick.row["sequence"][0], tick.row["start"][0] // self.seq)
        real_T = units.real(self, tick, 0)

        def write(found_MS, of_chunk_T):
            # Behind a chunk's padding there may be the next chunk: late heads go from the last chunk to the first.
            before_T = units.own(self, tick, found_MS, 0)
            return buffers.write(found_MS, where, jnp.where(real_T, of_chunk_T, before_T))

        return state._replace(
            losses_MS=write(state.losses_MS, result.loss_T), hits_MS=write(state.hits_MS, result.hit_T)
        )

    def _with_gradients_of_head(
        self, tick: TickOnDevice, state: TrainingState, result: vocabulary.HeadResult
    ) -> TrainingState:
        name = self.vocabulary_tables.head_name
        grads, dx_share = self.vocabulary_tables.with_sum(name, state.grads, result.dhead_VD, result.dx_share)
        norm = jax.tree.map(lambda s, d: s + d.astype(s.dtype), state.grads.final_norm, result.dnorm)
        unused = state.head_dx.shape[1] - vocabulary.share_tokens(tick.spec.tokens, self.num_stages)
        dx = jnp.pad(dx_share, ((0, unused), (0, 0)))
        return state._replace(
            loss=state.loss + result.loss_T.sum(),
            num_hits=state.num_hits + result.hit_T.sum(dtype=jnp.int32),
            over_entropy=state.over_entropy + result.over_entropy_T.sum(),
            grads=grads._replace(final_norm=norm),
            head_dx=buffers.write_slot(state.head_dx, tick.row["head_slot"][0], dx.astype(state.head_dx.dtype)),
        )

    # -- backward -------------------------------------------------------------------------------------------------

    def _output_cotangent(self, tick: TickOnDevice, state: TrainingState, me) -> jax.Array:
        """Returns dy_TD of this stage's chunk: from the head on the last stage, else from the stage behind."""
        last, size, row = self.num_stages - 1, tick.spec.tokens, tick.row
        dy_TD = state.waiting.input(self, tick, state.dx_TD)
        if tick.spec.has_ends:
            share = buffers.read_slot(state.head_dx, row["head_slot"][last])
            share = share[: vocabulary.share_tokens(size, self.num_stages)]
            leaving = vocabulary.whole_share(share, size, self.num_stages)
            dy_TD = jnp.where(tick.mine("last", me) == 1, leaving, dy_TD)
        return jnp.where((units.real(self, tick, me) & (tick.mine("active", me) == 1))[:, None], dy_TD, 0)

    def _backward_tick(self, tick: TickOnDevice, state: TrainingState, coming: Coming) -> TrainingState:
        me, passes, stage = vocabulary.stage_index(self.num_stages), tick.spec.passes, self._held(state)
        dy_TD = self._output_cotangent(tick, state, me)
        prefixes = state.prefixes.rebuilt(self, tick, stage, state.stash, state.tags)
        if self.plan.stash.kv == "recompute" or self.stage.layers.tails:
            # Tells the compiler to write keys and values after what the tick before has read.
            tick = tick.later(tick.begun(), ("prefixes.slot",))
        splits = stages.Splits(
            backward=units.split(self, passes.backward),
            forward=units.split(self, passes.forward),
            forward_chunks=units.chunks(self, tick, passes.forward, state.tags),
            again=tick.row["stash.attends_again"] if tick.spec.stash.attends else 0,
        )
        stash, sums = state.stash.to_use(self, tick), stages.Sums(prefixes.grads, state.weights.sums, state.dstates)
        unit, held = units.unit(self, tick, passes.backward, state.tags), coming if _is_under_way(coming) else None
        if self.stage.shares is not None:
            row, sums_MvnW = tick.row, state.shares_MvnW
            if not self.keeps_order:
                # Otherwise XLA takes the sum over devices out of a loop of backwards, where collectives have no order.
                sums_MvnW = sums_MvnW + tick.begun().astype(sums_MvnW.dtype)
            where = row["sequence"], tick.mine("group", me)
            gradient_nW = self.stage.shares.gradient(sums_MvnW, self.penalty_weights, *where)
            unit = unit._replace(gradient_nW=gradient_nW)
        dx_TD, caches, sums, held = layer_group.backward(stage, unit, dy_TD, prefixes.caches, sums, splits, stash, held)
        chex.assert_equal_shape((dx_TD, dy_TD))
        state = state._replace(
            prefixes=replace(prefixes, caches=caches, grads=sums.prefixes),
            weights=replace(state.weights, sums=sums.layers),
            dstates=sums.dstates,
        )
        return self._pass_back(tick, self._arrive(tick, state, held or coming), dx_TD, me)

    def _pass_back(self, tick: TickOnDevice, state: TrainingState, dx_TD, me) -> TrainingState:
        """Sends dX to the stage before, or adds to the embedding's gradient; orders later writes behind this tick."""
        # The next forward writes what this backward has read: without an order between them XLA copies the buffers.
        # GPUs heed the barrier; CPUs drop it too early, so there the order is in the slots that are written to.
        name, stash, prefixes = tick.spec.stash.own, state.stash, state.prefixes
        dx_TD, (caches, tags, kept) = lax.optimization_barrier((dx_TD, (prefixes.caches, state.tags, stash.kept[name])))
        grads = state.grads
        if tick.spec.embeds:
            tokens_T = units.own(self, tick, self.sequences.tokens, 0)
            arrived = vocabulary.from_stage(jnp.where(tick.mine("first", me) == 1, dx_TD, 0), 0, self.num_stages)
            begun = self.vocabulary_tables.sum_of_tick("embedding_VD", grads)
            added = vocabulary.embed_gradient(begun, tokens_T, arrived, self.num_stages, self.embedding_scale)
            grads, dx_TD = self.vocabulary_tables.with_sum("embedding_VD", grads, added, dx_TD)
        register = buffers.write(state.dx_TD, (0,), self._shift(dx_TD, -1))
        return state._replace(
            dx_TD=register,
            waiting=state.waiting.let_in(self, tick, register),
            order=buffers.after(dx_TD),
            prefixes=replace(prefixes, caches=caches),
            tags=tags,
            stash=replace(stash, kept={**stash.kept, name: kept}),
            grads=grads,
        )


def _is_under_way(coming: Coming) -> bool:
    return any(one is not None for one in coming.values())


def _with_copies_ended(tick: TickOnDevice, state: State) -> State:
    """Returns the state with this tick's copies to the host behind its compute.

    Without the barrier XLA lets a copy to the host end ticks later, and its source holds memory till then.
    """
    sent = {name: part.sent(tick) for name, part in mechanisms_of(state).items()}
    if not _is_under_way(sent):
        return state
    x_TD, dx_TD, sent = lax.optimization_barrier((state.x_TD, state.dx_TD, sent))
    state = state._replace(x_TD=x_TD, dx_TD=dx_TD)
    return changed(state, lambda name, part: part if sent[name] is None else part.with_sent(sent[name]))


def sum_gradients(
    grads: Physical, shares: Physical, num_members: int, *, are_shares: bool = False, by_layer: bool = False
) -> Physical:
    """Adds the gradients of all devices that hold the same weights; each device gets the part that it keeps.

    Args:
        grads: of one device; the final norm's is a partial sum over the stages too.
        shares: how a stage's devices share each.
        num_members: devices of one stage over data and seq.
        are_shares: whether all gradients but the final norm's are shares of sums already.
        by_layer: whether those of layers are added one layer at a time.
    """
    if are_shares:
        norm = jax.tree.map(sum_over_members, grads.final_norm, shares.final_norm)
        grads = grads._replace(final_norm=norm)
    elif num_members > 1:

        def add(path, grad, share):
            return (sum_layers_over_members if by_layer and path[0].name == "layers" else sum_over_members)(grad, share)

        grads = jax.tree_util.tree_map_with_path(add, grads, shares)
    return grads._replace(final_norm=lax.psum(grads.final_norm, vocabulary.AXIS))
