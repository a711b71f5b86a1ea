"""The SPMD program of one device: ticks in nested scans over a table of numbers.

All collectives of a tick's spec run on every device; a stage without a unit computes on padding, writes to
trash slots and behind the sequences in its buffers, and contributes zeros.

Letters: M sequences of this pipeline, S tokens, R seq members, T tokens of a tick on one device, D hidden size,
V vocabulary entries of one stage, P stages.
"""

from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
from jax import lax

from sppo_jax import buffers
from sppo_jax.attention import groups, sequence
from sppo_jax.attention.sequence import Cache, Chunk, Split
from sppo_jax.attention.tags import Tags
from sppo_jax.pipeline import host_traffic, vocabulary
from sppo_jax.pipeline import stage as stages
from sppo_jax.pipeline.layout import Physical
from sppo_jax.pipeline.rows import Rows, rows_of
from sppo_jax.pipeline.run import Run
from sppo_jax.pipeline.stash import HostPlace
from sppo_jax.pipeline.state import Coming, EvaluationState, State, TrainingState, begun
from sppo_jax.pipeline.storage import sum_over_members
from sppo_jax.pipeline.turn import when
from sppo_jax.program.fold import Loop, unfold
from sppo_jax.program.program import TickSpec
from sppo_jax.rules import BREADTH_FIRST

# Names under which a profile shows the operations of a tick. The names of ticks without ends have a suffix.
TICK_NAMES = {"F": "forward_tick", "B": "backward_tick", "H": "head_tick"}
WITHOUT_ENDS = "_without_ends"
# Fields of a row that the chunk whose keys and values are rebuilt has too.
_REBUILT = ("start", "length", "group", "weight_slot", "kv_slot", "stash_slot")


class Executor(Run):
    """Runs the ticks of a run, one after another."""

    def run(self, state: State) -> State:
        """Runs all ticks."""
        me = vocabulary.stage_index(self.num_stages)
        rows = {name: rows_of(name, value, me) for name, value in self.program.rows.items()}
        return self._run_items(self.program.items, rows, state)

    def _run_items(self, items: tuple, rows: dict[str, Rows], state: State) -> State:
        place = 0
        for item in items:
            length = len(unfold([item]))
            part = {name: value.cut(place, length) for name, value in rows.items()}
            place += length
            if not isinstance(item, Loop):
                state = self.tick(item, {name: value.of_tick() for name, value in part.items()}, state)
                continue

            def turn(i, state, item=item, part=part):
                return self._run_items(item.body, {n: x.in_turn(i, item.count) for n, x in part.items()}, state)

            state = lax.fori_loop(0, item.count, turn, state)
        return state

    def tick(self, spec: TickSpec, row: dict, state: State) -> State:
        """Runs one tick: starts its host copies, then its units. Profiles show operations under the tick's name."""
        with jax.named_scope(TICK_NAMES[spec.kind] + ("" if spec.has_ends or spec.embeds else WITHOUT_ENDS)):
            return self._tick(spec, row, state)

    def _tick(self, spec: TickSpec, row: dict, state: State) -> State:
        if spec.kind == "H":
            if not self.train:
                return self._scoring_head(spec, row, state)
            return self._training_head(spec, row, state, host_traffic.start(self, spec, row, state))
        state = self._gather(spec, row, state)
        if not self.train:
            return self._forward_tick(spec, row, state, None)
        if spec.write is not None:
            place = HostPlace(row["write_row"].number, row["write_short"].number)
            host = self.layout(spec.write).write_host(state.host[spec.write], place, state.part)
            state = state._replace(host={**state.host, spec.write: host}, part=None)
        coming = host_traffic.start(self, spec, row, state)
        arrived_TD = state.x_TD if spec.put == "F" else state.dx_TD
        if self.plan.schedule.interleave > 1 and self.keeps_order:
            # Otherwise XLA slices the weights of several ticks at once and holds the slices until the last tick.
            after = begun(state)
            row = {**row, **{name: row[name] + after for name in ("group", "weight_slot", "sum_slot")}}
        if spec.kind == "B":
            state = self._scatter(spec, row, self._backward_tick(spec, row, state, coming))
        else:
            written = ("kv_slot", "sequence_slot", "stash_slot", "arrive_slot")
            state = self._forward_tick(spec, row | {name: row[name] + state.order for name in written}, state, coming)
        if spec.write is spec.put is None:
            return state
        room = state.room if spec.put is None else host_traffic.put(self, row, state, arrived_TD)
        # Without the barrier XLA lets the copy to the host end ticks later, and its source holds memory till then.
        host = {} if spec.write is None else {spec.write: state.host[spec.write]}
        x_TD, dx_TD, host, room = lax.optimization_barrier((state.x_TD, state.dx_TD, host, room))
        return state._replace(x_TD=x_TD, dx_TD=dx_TD, host={**state.host, **host}, room=room)

    def _gather(self, spec: TickSpec, row, state: State) -> State:
        """Gathers the weights of the group of layers whose turn begins, if one does, on all stages at once."""
        if not spec.gathers:
            return state
        group, slot = row["gather_group"][0], row["gather_slot"][0]
        on_way = (state.incoming, row["come"][0]) if spec.streams else ()
        with jax.named_scope("gather_turn"):
            gathered = when(
                row["gathers"], lambda slots: self.sharded.gather(slots, group, slot, *on_way), state.gathered
            )
        return state._replace(gathered=gathered)

    def _scatter(self, spec: TickSpec, row, state: TrainingState) -> TrainingState:
        """Adds up the gradients of the group of layers whose turn ends, if one does, on all stages at once."""
        if not spec.scatters:
            return state
        group, slot = row["scatter_group"][0], row["scatter_slot"][0]
        with jax.named_scope("scatter_turn"):
            if spec.streams:
                return host_traffic.scatter(self, row, state, group, slot)
            totals, sums = when(
                row["scatters"],
                lambda carried: self.sharded.scatter(*carried, group, slot),
                (state.grads.layers, state.sums),
            )
        return state._replace(grads=state.grads._replace(layers=totals), sums=sums)

    def _held(self, state: State) -> stages.Stage:
        """Returns this device's layers with the weights that it holds."""
        return self.stage if self.sharded is None else self.stage.holding(state.gathered)

    # -- what a unit needs of its sequence ------------------------------------------------------------------------

    def _own(self, array_MS, row, stage, size):
        """Cuts the tokens of the chunk that `stage` works on out of this device's share of its sequence."""
        where = (row["sequence"][stage], row["start"][stage] // self.seq)
        return buffers.read(array_MS, where, (size,))

    def _real(self, row, stage, size):
        return jnp.arange(size, dtype=jnp.int32) < row["length"][stage] // self.seq

    def _split(self, passes: str) -> Split:
        return Split(self.plan.ulysses, self.plan.ring, passes, self.plan.kernel)

    def _chunk(self, spec: TickSpec, row, passes: str, tags: Tags) -> Chunk:
        me = vocabulary.stage_index(self.num_stages)
        ring = self.plan.ring
        start, length = row["start"][me] // ring, row["length"][me] // ring
        size, resident, split = (
            spec.tokens * self.plan.ulysses,
            tags.take(row["sequence_slot"][me]),
            self._split(passes),
        )
        chosen = None
        if self.modes is not None:
            chosen = self._groups(row, resident, (start, length, size), split)
            length = jnp.where(chosen.is_stream, length, 0)
        masks = sequence.chunk_tags(resident, start, length, size, split, bound=spec.passes.bound)
        return Chunk(row["kv_slot"][me], start, length, masks, chosen, row["grad_slot"][me])

    def _groups(self, row, resident: Tags, place: tuple, split: Split) -> groups.Groups:
        """Finds out how a tick attends, from its row of numbers; all devices have the same row."""
        me, (start, length, size) = vocabulary.stage_index(self.num_stages), place
        later_starts = jnp.asarray(self.plan.table().chunk_starts[1:], jnp.int32)
        chunk = (row["start"][:, None] >= later_starts).sum(1, dtype=jnp.int32)
        tags = Tags(*(buffers.read(x, (0, start), (x.shape[0], size)) for x in resident))
        own = (row["sequence"][me], chunk[me])
        return groups.chunk_groups(
            self.modes, own, (row["sequence"], chunk, row["active"]), (tags, length // split.ulysses), split
        )

    def _unit(self, spec: TickSpec, row, passes: str, tags: Tags) -> stages.Unit:
        me = vocabulary.stage_index(self.num_stages)
        positions_T = self._own(self.sequences.positions, row, me, spec.tokens)
        slots = (row[name][me] for name in ("group", "weight_slot", "sum_slot"))
        unit = stages.Unit(*slots, self._chunk(spec, row, passes, tags), positions_T, row["stash_slot"][me])
        if self.stage.shares is None or not self.train:
            return unit
        is_real_T = self._real(row, me, spec.tokens) & (self._own(self.sequences.documents, row, me, spec.tokens) >= 0)
        return unit._replace(sequence=row["sequence"][me], is_real_T=is_real_T)

    def _write_tags(self, spec: TickSpec, row, tags: Tags) -> Tags:
        """Puts the tags of this stage's chunk behind those of the chunks before it."""
        me = vocabulary.stage_index(self.num_stages)
        own = [self._own(x, row, me, spec.tokens) for x in (self.sequences.positions, self.sequences.documents)]
        start = row["start"][me] // self.plan.ring
        return sequence.write_tags(tags, Tags(*own), row["sequence_slot"][me], start, self._split(spec.passes.forward))

    def _shift(self, x, step: int):
        if self.num_stages == 1:
            return x
        perm = [(s, (s + step) % self.num_stages) for s in range(self.num_stages)]
        return lax.ppermute(x, vocabulary.AXIS, perm)

    # -- ticks ----------------------------------------------------------------------------------------------------

    def _arrived(self, spec: TickSpec, register_TD, row, state: State) -> jax.Array:
        """Returns what came to this stage for its chunk: from the register, or from the waiting room."""
        me, size = vocabulary.stage_index(self.num_stages), spec.tokens
        if spec.waited:
            waited_TD = state.taken[:size]
        elif self.program.num_waiting_slots:
            waited_TD = buffers.read(state.waiting, (row["wait_slot"][me],), (size, register_TD.shape[1]))
        else:
            return register_TD[:size]
        return jnp.where(row["waits"][me] == 1, waited_TD, register_TD[:size])

    def _let_wait(self, register_TD, row, state: State) -> jax.Array:
        """Returns the waiting room with what has just come to this stage, in the trash slot where it need not wait."""
        if not self.program.num_waiting_slots:
            return state.waiting
        me = vocabulary.stage_index(self.num_stages)
        return buffers.write_slot(state.waiting, row["arrive_slot"][me], register_TD)

    def _input(self, spec: TickSpec, row, state: State) -> jax.Array:
        """Returns x_TD of this stage's chunk: its embedding where the chunk enters, else from the stage before."""
        me, size = vocabulary.stage_index(self.num_stages), spec.tokens
        arrived_TD = self._arrived(spec, state.x_TD, row, state)
        if not spec.embeds:
            return arrived_TD
        tokens_T = self._own(self.sequences.tokens, row, 0, size)
        embedding_VD = self.tables.whole("embedding_VD", state.x_TD)
        entering = vocabulary.embed(embedding_VD, tokens_T, self.num_stages)
        return jnp.where(row["first"][me] == 1, entering, arrived_TD)

    def _forward_tick(self, spec: TickSpec, row, state: State, coming) -> State:
        x_TD = self._input(spec, row, state)
        filling = None
        if spec.stash is not None:
            layout = self.layout(spec.stash)
            part = layout.host_part() if spec.stash.uses_host else None
            filling = (layout, state.kept[spec.stash], part)
        tags = self._write_tags(spec, row, state.tags)
        unit = self._unit(spec, row, spec.passes.forward, tags)
        split = self._split(spec.passes.forward)
        leaving, early = self._leaving(spec, state, coming), None
        if coming is not None and spec.put is not None and self.stage.num_layers == 1:
            # Behind the only layer nothing would be left for what goes to the waiting room next.
            coming, early = coming._replace(taken=None), coming.taken
        held = None if coming is None and not leaving else (coming, leaving)
        memory = stages.Memory(state.cache, state.shares_MvnW if self.train else None)
        y_TD, memory, filled, held, early = stages.forward(
            self._held(state), unit, x_TD, memory, split, filling, held, early
        )
        chex.assert_equal_shape((x_TD, y_TD))
        register = buffers.write(state.x_TD, (0,), self._shift(y_TD, 1))
        waiting = self._let_wait(register, row, state)
        state = state._replace(x_TD=register, waiting=waiting, cache=memory.cache, tags=tags)
        if self.train:
            state = state._replace(shares_MvnW=memory.shares_MvnW)
            coming, leaving = held or (coming, leaving)
            coming = coming or Coming()
            if coming.fetched is coming.refetched is coming.taken is early is None:
                coming = coming._replace(fetched=state.fetched, refetched=state.refetched)
            coming = coming if early is None else coming._replace(taken=early)
            state = host_traffic.arrive(self, row, state._replace(host={**state.host, **leaving}), coming)
        if spec.stash is not None:
            state = state._replace(kept={**state.kept, spec.stash: filled[0]}, part=filled[1])
        return state

    def _leaving(self, spec: TickSpec, state: State, coming) -> dict:
        """Returns the host buffer whose write is held back until the last layer, in a forward that fetches nothing.

        Without this XLA ends the write before the loop over the layers where a stage is one device and the tick has no
        head: 23.6% of the bytes of a breadth-first plan had no compute beside them.
        """
        by_groups = self.plan.schedule.name == BREADTH_FIRST and self.plan.mesh.data * self.plan.mesh.seq == 1
        holds = self.train and by_groups and coming is None and spec.write is not None
        return {spec.write: state.host[spec.write]} if holds else {}

    def _head(self, spec: TickSpec, row, state: State, dhead_VD, held=None) -> vocabulary.HeadResult:
        size = spec.tokens
        # The last stage's output has travelled on to stage 0, and may have waited there.
        x_TD = vocabulary.from_stage(self._arrived(spec, state.x_TD, row, state), 0, self.num_stages)
        targets_T = jnp.where(self._real(row, 0, size), self._own(self.sequences.targets, row, 0, size), -1)
        rows_VD = self.tables.whole(self.tables.head_name, state.x_TD)
        given = vocabulary.Head(self.norm, self.final_norm, rows_VD, self.vocab_size, self.num_stages)
        return vocabulary.head(given, x_TD, targets_T, self.scale, dhead_VD, gradients=self.train, held=held)

    def _scoring_head(self, spec: TickSpec, row, state: EvaluationState) -> EvaluationState:
        result = self._head(spec, row, state, None)
        where = (row["sequence"][0], row["start"][0] // self.seq)
        real_T = self._real(row, 0, spec.tokens)

        def write(found_MS, of_chunk_T):
            # Behind a chunk's padding there may be the next chunk: late heads go from the last chunk to the first.
            before_T = self._own(found_MS, row, 0, spec.tokens)
            return buffers.write(found_MS, where, jnp.where(real_T, of_chunk_T, before_T))

        return state._replace(
            losses_MS=write(state.losses_MS, result.loss_T), hits_MS=write(state.hits_MS, result.hit_T)
        )

    def _training_head(self, spec: TickSpec, row, state: TrainingState, coming) -> TrainingState:
        tables = self.tables
        result = self._head(spec, row, state, tables.sum_of_tick(tables.head_name, state.grads), coming)
        grads, dx_share = tables.with_sum(tables.head_name, state.grads, result.dhead_VD, result.dx_share)
        norm = jax.tree.map(lambda s, d: s + d.astype(s.dtype), state.grads.final_norm, result.dnorm)
        unused = state.head_dx.shape[1] - vocabulary.share_tokens(spec.tokens, self.num_stages)
        dx = jnp.pad(dx_share, ((0, unused), (0, 0)))
        if coming is not None:
            state = state._replace(refetched=result.held.refetched)
        return state._replace(
            loss=state.loss + result.loss_T.sum(),
            grads=grads._replace(final_norm=norm),
            head_dx=buffers.write_slot(state.head_dx, row["head_slot"][0], dx.astype(state.head_dx.dtype)),
        )

    def _output_cotangent(self, spec: TickSpec, row, state: TrainingState, me) -> jax.Array:
        """Returns dy_TD of this stage's chunk: from the head on the last stage, else from the stage behind."""
        last, size = self.num_stages - 1, spec.tokens
        arrived_TD = self._arrived(spec, state.dx_TD, row, state)
        if spec.has_ends:
            share = buffers.read_slot(state.head_dx, row["head_slot"][last])
            share = share[: vocabulary.share_tokens(size, self.num_stages)]
            leaving = vocabulary.whole_share(share, size, self.num_stages)
            dy_TD = jnp.where(row["last"][me] == 1, leaving, arrived_TD)
        else:
            dy_TD = arrived_TD
        return jnp.where((self._real(row, me, size) & (row["active"][me] == 1))[:, None], dy_TD, 0)

    def _backward_tick(self, spec: TickSpec, row, state: TrainingState, coming) -> TrainingState:
        me = vocabulary.stage_index(self.num_stages)
        dy_TD = self._output_cotangent(spec, row, state, me)
        if spec.rebuild is not None:
            state = state._replace(cache=self._rebuild(spec, row, state, me))
        if self.plan.stash.kv == "recompute":
            # Tells the compiler to write keys and values after what the tick before has read.
            row = row | {"kv_slot": row["kv_slot"] + begun(state)}
        splits = stages.Splits(
            backward=self._split(spec.passes.backward),
            forward=self._split(spec.passes.forward),
            forward_chunk=self._chunk(spec, row, spec.passes.forward, state.tags),
            again=row["attends_again"] if spec.attends else 0,
        )
        filled = (self.layout(spec.stash), state.kept[spec.stash], state.fetched)
        sums = stages.Sums(state.dcache, state.sums)
        unit = self._unit(spec, row, spec.passes.backward, state.tags)
        if self.stage.shares is not None:
            gradient_nW = self.stage.shares.gradient(state.shares_MvnW, row["sequence"], row["group"][me])
            unit = unit._replace(gradient_nW=gradient_nW)
        stage = self._held(state)
        dx_TD, cache, sums, held = stages.backward(stage, unit, dy_TD, state.cache, sums, splits, filled, coming)
        chex.assert_equal_shape((dx_TD, dy_TD))
        state = state._replace(cache=cache, dcache=sums.prefix, sums=sums.layers)
        state = host_traffic.arrive(self, row, state, held or Coming())
        return self._pass_back(spec, row, state, dx_TD, me)

    def _rebuild(self, spec: TickSpec, row, state: TrainingState, me) -> Cache:
        """Writes the keys and values of this stage's chunk in the group of layers before again."""
        spec = replace(spec, tokens=spec.rebuild.tokens, stash=spec.rebuild)
        row = row | {name: row[f"rebuild_{name}"] for name in _REBUILT}
        # Tells the compiler to write after what the tick before has read.
        active = (row["start"] < self.plan.sequence_length).astype(jnp.int32)
        row |= {"kv_slot": row["kv_slot"] + begun(state), "active": active}
        unit = self._unit(spec, row, spec.passes.forward, state.tags)
        # A shorter chunk than its tick has padding, where the next chunk already is.
        full = set(self.plan.chunk_lengths) == {spec.tokens * self.seq}
        behind = None if full else row["length"][me] // self.plan.ring
        filled = (self.layout(spec.stash), state.kept[spec.stash], state.refetched)
        split = self._split(spec.passes.forward)
        return stages.rebuild(self._held(state), unit, state.cache, split, filled, behind)

    def _pass_back(self, spec: TickSpec, row, state: TrainingState, dx_TD, me) -> TrainingState:
        """Sends dX to the stage before, or adds to the embedding's gradient; orders later writes behind this tick."""
        # The next forward writes what this backward has read: without an order between them XLA copies the buffers.
        # GPUs heed the barrier; CPUs drop it too early, so there the order is in the slots that are written to.
        read = (state.cache, state.tags, state.kept[spec.stash])
        dx_TD, (cache, tags, kept) = lax.optimization_barrier((dx_TD, read))
        grads = state.grads
        if spec.embeds:
            tokens_T = self._own(self.sequences.tokens, row, 0, spec.tokens)
            arrived = vocabulary.from_stage(jnp.where(row["first"][me] == 1, dx_TD, 0), 0, self.num_stages)
            begun = self.tables.sum_of_tick("embedding_VD", grads)
            added = vocabulary.embed_gradient(begun, tokens_T, arrived, self.num_stages)
            grads, dx_TD = self.tables.with_sum("embedding_VD", grads, added, dx_TD)
        register = buffers.write(state.dx_TD, (0,), self._shift(dx_TD, -1))
        return state._replace(
            dx_TD=register,
            waiting=self._let_wait(register, row, state),
            order=buffers.after(dx_TD),
            cache=cache,
            tags=tags,
            kept={**state.kept, spec.stash: kept},
            grads=grads,
        )


def sum_gradients(grads: Physical, shares: Physical, num_members: int, *, are_shares: bool = False) -> Physical:
    """Adds the gradients of all devices that hold the same weights; each device gets the part that it keeps.

    Args:
        grads: of one device; the final norm's is a partial sum over the stages too.
        shares: how a stage's devices share each.
        num_members: devices of one stage over data and seq.
        are_shares: whether all gradients but the final norm's are shares of sums already.
    """
    if are_shares:
        norm = jax.tree.map(sum_over_members, grads.final_norm, shares.final_norm)
        grads = grads._replace(final_norm=norm)
    elif num_members > 1:
        grads = jax.tree.map(sum_over_members, grads, shares)
    return grads._replace(final_norm=lax.psum(grads.final_norm, vocabulary.AXIS))
