"""A group of layers on one chunk, forward and backward: one scan over layers, one collective pattern for every stage.

Letters: T tokens of a tick on one device, D hidden size, N query heads, K key/value heads, H head dim, k choices of a
token, n layers of a group, W elements of a layer's shares.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sppo_jax.arrays import buffers
from sppo_jax.arrays.dtypes import accumulator
from sppo_jax.attention.sinks import sinks_gradient, with_sinks
from sppo_jax.attention.spreading import teams
from sppo_jax.attention.spreading.sequence import Attended, Cache, Chunk, Split
from sppo_jax.mixers.mixer import Operands
from sppo_jax.models.stacks import of_stack
from sppo_jax.pipeline.block import Projected
from sppo_jax.pipeline.layer_types import WHOLE, At, run_layers, with_part
from sppo_jax.pipeline.layers.stage import Again, Memory, Splits, Stage, Sums, UnitOnDevice, rest_names
from sppo_jax.pipeline.pasts import states as mixing
from sppo_jax.pipeline.pasts import tails
from sppo_jax.pipeline.stash.buffers import STATE, StashLayout, chunk_entries
from sppo_jax.pipeline.when import when
from sppo_jax.program.stash import StashClass


def forward(stage: Stage, unit: UnitOnDevice, x_TD, memory: Memory, split: Split, stash=None, held=None, early=None):
    """Runs a group of layers on a chunk.

    Args:
        stage: the layers.
        unit: the chunk.
        x_TD: input of the first layer.
        memory: the chunk's keys and values are written, and its shares are added.
        split: how `seq` is divided.
        stash: None, or (layout, kept buffers, part for the host) to fill.
        held: arrays prefetched from the host, see `run_layers`.
        early: a prefetched array that is held back until attention, in a group of one layer.

    Returns:
        y_TD, memory, (kept, host part) or None, held, early.
    """
    layout, *parts = stash if stash else (None,)
    if len(stage.layers.patterns) > 1:

        def run(stage, carry):
            x, memory, parts = carry
            y, memory, parts, *_ = forward(stage, unit, x, memory, split, (layout, *parts) if stash else None)
            return y, memory, parts

        (y_TD, memory, parts), (held, early) = _at_its_group(
            stage, unit, run, (x_TD, memory, tuple(parts)), held, early
        )
        return y_TD, memory, parts, held, early
    whole_layers = layout is not None and not stage.stashes_input_alone(layout)
    if layout is not None and (stage.runs_again or not whole_layers):
        parts = layout.put(*parts, unit.stash_slot, WHOLE, {"x": x_TD})

    def body(carry, at):
        x, memory, parts, early = carry
        y, memory, values = _forward_layer(stage, x, unit, at, memory, split, early=early)
        if whole_layers:
            parts = layout.put(*parts, unit.stash_slot, at, values)
        elif layout is not None:
            if stage.layers.blocks[at.layer_type].chooses:
                layer = at.among(stage.layers.choosing)
                parts = layout.put_choices(*parts, unit.stash_slot, layer, values)
            if stage.layers.blocks[at.layer_type].has_state:
                state = {name: value for name, value in values.items() if name.startswith(STATE)}
                parts = layout.put(*parts, unit.stash_slot, at, state)
        return y, memory, tuple(parts), values["early"]

    carry = x_TD, memory, tuple(parts), early
    (y_TD, memory, parts, early), held = run_layers(stage.layers.layer_types, body, carry, held)
    return y_TD, memory, parts, held, early


def _forward_layer(stage, x, unit, at, memory, split, *, early=None, again=None):
    """One layer; returns its output, the memory and all that may be stashed (unused parts are never computed).

    Where `again` is given, the layer runs again: its keys and values are in the memory, and its shares have been added.
    """
    layers, block = stage.layers, stage.layers.blocks[at.layer_type]
    weights = stage.layer_weights(unit, at, x)
    save_rest = stage.places.rest != "recompute"
    if save_rest:
        projected, vjp_before = block.vjp_before(weights, x, unit.positions_T)
    else:
        projected = block.before(weights, x, unit.positions_T)
    mix = _mix_with_state if block.has_state else _mix_by_attention
    out, memory, values = mix(stage, projected, unit, at, memory, split, again)
    if early is not None:
        out, early = lax.optimization_barrier((out, early))
    chosen = block.choose(weights, x, out) if again is None else again.chosen_Tk
    values |= {"x": x, "early": early, "chosen": chosen}
    if not block.has_state:
        values["out"] = out
    if save_rest:
        (y, shares), vjp_after = block.vjp_after(weights, x, out, chosen)
        shapes = stage.shapes(at.layer_type, *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (x, unit.positions_T)))
        values |= rest_names(projected, (*shapes.before.take(vjp_before), *shapes.after.take(vjp_after)))
    else:
        y, shares = block.after(weights, x, out, chosen)
    if unit.is_real_T is not None and again is None and at.layer_type in layers.shares:
        place = (unit.sequence, stage.shares.row(unit.group), at.among(layers.shares))
        of_chunk_W = stage.shares.of_tokens(shares, unit.is_real_T, unit.packed_rows_T)
        memory = memory._replace(shares_MvnW=buffers.add(memory.shares_MvnW, place, of_chunk_W))
    return y, memory, values


def _mix_by_attention(stage, projected, unit, at, memory, split, again) -> tuple[jax.Array, Memory, dict]:
    """Returns the output of a layer's attention, the memory, and what may be stashed of it besides the output."""
    layers = stage.layers
    number, window = layers.cache_of(at.layer_type), layers.windows[at.layer_type]
    cache, layer = memory.caches[number], at.among(layers.kv[number])
    chunk, split = unit.chunks[window], split._replace(window=window)
    _, k, v, _ = projected
    tail, of_tail, written = layers.tails.get(at.layer_type), {}, chunk
    if tail and again is None:
        of_tail = tails.tail_of(cache, chunk, layer, tail)
        # Without an order between its reads and the next write XLA copies the cache.
        written = chunk._replace(slot=chunk.slot + sum(map(buffers.after, of_tail.values())))
    elif tail:
        cache = tails.with_tail(cache, chunk, layer, again.saved)
    if again is None or again.writes:
        cache = teams.write_prefix(cache, k, v, written, layer, split)
    out, lse = _attend_unless_saved(again, lambda: _attend(projected, cache, chunk, layer, split))
    if tail and again is None:
        cache = tails.moved_on(cache, chunk, layer, tail, out)
    memory = memory._replace(caches=_with(memory.caches, number, cache))
    return out, memory, {"lse": lse, "k": k, "v": v, **of_tail}


def _mix_with_state(stage, operands, unit, at, memory, split, again) -> tuple[jax.Array, Memory, dict]:
    """Returns the output of a mixer with a state, the memory, and the state before the chunk, which is stashed."""
    layers, mixer, members = stage.layers, stage.layers.blocks[at.layer_type].mixer, split.ulysses * split.ring
    number, place = layers.states_of(at.layer_type), unit.mixed.places[mixer.reach]
    if again is not None:
        return (
            mixing.forward(mixer, operands, again.state, place, members)[0],
            memory,
            mixing.numbered(STATE, again.state),
        )
    layer, buffer = at.among(layers.states[number]), memory.states[number]
    before = unit.mixed.before(buffer, layer, mixing.empty_state(mixer, operands, members))
    out, behind = mixing.forward(mixer, operands, before, place, members)
    states = _with(memory.states, number, unit.mixed.leave(buffer, layer, behind))
    return out, memory._replace(states=states), mixing.numbered(STATE, before)


def _with(items: tuple, number: int, item) -> tuple:
    return (*items[:number], item, *items[number + 1 :])


def _attend(projected: Projected, cache: Cache, chunk: Chunk, layer, split: Split) -> tuple[jax.Array, jax.Array]:
    """Returns the output and the LSE of a chunk's queries over their prefix and the layer's sinks."""
    out, lse = teams.forward(projected.q_TNH, projected.k_TKH, cache, chunk, layer, split)
    return (out, lse) if projected.sinks_N is None else with_sinks(out, lse, projected.sinks_N)


def _attend_unless_saved(again: Again | None, attend: Callable) -> tuple[jax.Array, jax.Array]:
    """Returns the output and the LSE of `attend()`, or those of the first run where the stash has the chunk's."""
    if again is None or "out" not in again.saved:
        return attend()
    return _with_outputs_of(again.saved, again.attends, attend)


def _with_outputs_of(saved, attends, attend: Callable) -> tuple[jax.Array, jax.Array]:
    with jax.named_scope("attention_turn"):
        return when(attends, lambda _: attend(), (saved["out"], saved["lse"]))


def _at_its_group(stage: Stage, unit: UnitOnDevice, run: Callable, carry, *held, name: str = "pattern"):
    """Returns `run(stage, carry)` with the layers of the unit's group; `held` is held back until the end.

    Each pattern has a loop of at most one iteration, see `when`: so all groups of a pass are one loop of ticks, whose
    counter tells the rows on the host. Profiles show the loop under the name of the row that tells the pattern.
    """
    for number, layer_types in enumerate(stage.layers.patterns):
        layers = replace(stage.layers, layer_types=layer_types, groups=(layer_types,))
        is_here = unit.pattern == number
        flag = int(is_here) if isinstance(is_here, bool) else is_here.astype(jnp.int32)
        of_pattern = Stage(layers, stage.weights, stage.places, stage.shares, stage.slots)
        with jax.named_scope(f"{name}_{number}_turn"):
            carry = when(flag, partial(run, of_pattern), carry)
    if any(one is not None for one in held):
        first, held = lax.optimization_barrier((carry[0], held))
        carry = first, *carry[1:]
    return carry, held


def backward(
    stage: Stage, unit: UnitOnDevice, dy_TD, caches: tuple[Cache, ...], sums: Sums, splits: Splits, stash, held=None
):
    """Runs a group of layers backward on a chunk, after the later chunks of the sequence.

    Keys and values of a chunk may be written again here, layer by layer; see `Stage.writes_late`.

    Args:
        stage: the layers.
        unit: the chunk; `unit.chunks` have the tags of the backward.
        dy_TD: cotangent of the last layer's output, zero for padding.
        caches: keys and values of the prefix.
        sums: accumulators.
        splits: how `seq` is divided.
        stash: (layout, kept buffers, part fetched from the host).
        held: arrays prefetched from the host for the next tick, see `run_layers`.

    Returns:
        dx_TD, caches, sums, held.
    """
    layout, kept, fetched = stash
    if len(stage.layers.patterns) > 1:

        def run(stage, carry):
            return backward(stage, unit, *carry, splits, stash)[:3]

        (dx_TD, caches, sums), (held,) = _at_its_group(stage, unit, run, (dy_TD, caches, sums), held)
        return dx_TD, caches, sums, held
    writes = any(map(stage.writes_late, stage.layers.layer_types))
    if stage.runs_again:
        (layout, kept, fetched), caches = _rerun_period(stage, unit, stash, caches, splits)
        unit, splits = unit._replace(stash_slot=0), splits._replace(again=0)
    elif stage.stashes_input_alone(layout):
        read = partial(layout.get, kept, fetched, unit.stash_slot)
        layout, kept, fetched = _rerun(stage, unit, read(WHOLE), read, caches, splits)
        unit = unit._replace(stash_slot=0)

    def body(carry, at):
        dy, sums, early, *written = carry
        saved = layout.get(kept, fetched, unit.stash_slot, at) | {"early": early}
        before = written[0] if writes else caches
        dx, sums, after, early = _backward_layer(stage, unit, at, dy, saved, before, sums, splits)
        return (dx, sums, early, after) if writes else (dx, sums, early)

    # Behind the only layer sums of all experts are added and scattered, beside which XLA would put the copies.
    early, held = (held, None) if stage.num_layers == 1 and stage.layers.choosing else (None, held)
    carry = dy_TD, sums, early, *[caches] * writes
    (dx_TD, sums, early, *written), held = run_layers(stage.layers.layer_types, body, carry, held, backward=True)
    return dx_TD, written[0] if writes else caches, sums, held if early is None else early


def rebuild(
    stage: Stage, unit: UnitOnDevice, caches: tuple[Cache, ...], split: Split, stash, behind=None
) -> tuple[Cache, ...]:
    """Writes the keys and values of a chunk in a group of layers again.

    They are in its stash, or are computed from the layer inputs there.

    Args:
        stage: the layers.
        unit: the chunk; `unit.group` is the group of layers.
        caches: keys and values; the chunk's are written.
        split: how `seq` is divided.
        stash: (layout, kept buffers, what was fetched from the host).
        behind: see `attention.spreading.sequence.write_blocks`.
    """
    layout, kept, fetched = stash
    if len(stage.layers.patterns) > 1:

        def run(stage, caches):
            return rebuild(stage, unit, caches, split, stash, behind)

        return _at_its_group(stage, unit, run, caches, name="again_pattern")[0]
    if stage.runs_again and stage.places.kv == "rebuild":
        return _rebuild_period(stage, unit, caches, split, stash, behind)

    def body(carry, at):
        (caches,) = carry
        if stage.layers.blocks[at.layer_type].has_state or at.layer_type in stage.layers.tails:
            return (caches,)  # it has none, or the chunk's own backward writes them
        values = layout.get_again(kept, fetched, unit.stash_slot, at)
        if "k" in values:
            k, v = values["k"], values["v"]
        else:
            block = stage.layers.blocks[at.layer_type]
            _, k, v, _ = block.before(stage.layer_weights(unit, at, values["x"]), values["x"], unit.positions_T)
        return (_rewritten(stage, unit, caches, at, k, v, split, behind),)

    return run_layers(stage.layers.layer_types, body, (caches,))[0][0]


def _rewritten(stage, unit, caches, at, k, v, split, behind) -> tuple[Cache, ...]:
    number = stage.layers.cache_of(at.layer_type)
    layer, window = at.among(stage.layers.kv[number]), stage.layers.windows[at.layer_type]
    cache = teams.write_prefix(caches[number], k, v, unit.chunks[window], layer, split, behind=behind)
    return _with(caches, number, cache)


def _rebuild_period(stage, unit, caches, split, stash, behind):
    """Writes the keys and values of the only layer without a window, behind layers that need no chunk before."""
    layout, kept, fetched = stash
    layers, slot = stage.layers, unit.stash_slot
    whole = [number for number, layer_type in enumerate(layers.layer_types) if layers.attends_to_all(layer_type)]
    if not whole:
        return caches

    def body(carry, at):
        x, caches = carry
        saved = layout.get_again(kept, fetched, slot, at)
        again = Again(saved.get("chosen"), stage.stashed_state(at, saved), saved, writes=True)
        y, memory, _ = _forward_layer(stage, x, unit, at, Memory(caches), split, again=again)
        return y, memory.caches

    (number,) = whole
    carry = layout.get_again(kept, fetched, slot, WHOLE)["x"], caches
    before = layers.layer_types[:number]
    x_TD, caches = run_layers(before, body, carry)[0] if before else carry
    at = At(layers.layer_types[number], {layer_type: before.count(layer_type) for layer_type in layers.layer_types})
    _, k, v, _ = layers.blocks[at.layer_type].before(stage.layer_weights(unit, at, x_TD), x_TD, unit.positions_T)
    return _rewritten(stage, unit, caches, at, k, v, split, behind)


def _rerun(stage, unit, saved, states, caches, splits):
    """Recomputes a chunk's stash from the stage's input; the chunk's keys and values are still in the cache.

    `states(at)` returns the stashed state before the chunk in a layer.
    """
    x_TD, layers = saved["x"], stage.layers
    named = {layer_type: _made_again(stage, layer_type, x_TD, unit.positions_T) for layer_type in layers.blocks}
    layout = StashLayout(chunk_entries(StashClass(x_TD.shape[0]), named, [layers.layer_types]), stage.num_layers, 0)
    unit = unit._replace(chunks=splits.forward_chunks)

    def body(carry, at):
        x, kept = carry
        chosen = None
        if layers.blocks[at.layer_type].chooses:
            chosen = lax.dynamic_index_in_dim(saved["chosen"], at.among(layers.choosing), 1, keepdims=False)
        again = Again(chosen, stage.stashed_state(at, states(at)))
        y, _, values = _forward_layer(stage, x, unit, at, Memory(caches), splits.forward, again=again)
        return y, layout.put(kept, None, 0, at, values)[0]

    (_, kept), _ = run_layers(layers.layer_types, body, (x_TD, layout.kept_buffers()))
    return layout, kept, None


def _rerun_period(stage, unit, stash, caches, splits):
    """Recomputes a chunk's stash from the period's input; writes tails, and keys and values that are not there.

    Returns:
        the stash, as `backward` takes it, and the caches.
    """
    of_period, *filled = stash
    layers, slot = stage.layers, unit.stash_slot
    # Without the barrier it may be read late, out of a buffer that was written in between: XLA would copy that buffer.
    x_TD = lax.optimization_barrier(of_period.get(*filled, slot, WHOLE)["x"])
    named = {layer_type: _made_again(stage, layer_type, x_TD, unit.positions_T) for layer_type in layers.blocks}
    layout = StashLayout(chunk_entries(StashClass(x_TD.shape[0]), named, [layers.layer_types]), stage.num_layers, 0)
    unit = unit._replace(chunks=splits.forward_chunks)
    is_only = stage.places.kv == "recompute"

    def body(carry, at):
        x, kept, caches = carry
        saved = of_period.get(*filled, slot, at)
        writes = at.layer_type in layers.tails or is_only
        again = Again(saved.get("chosen"), stage.stashed_state(at, saved), saved, writes, splits.again)
        y, memory, values = _forward_layer(stage, x, unit, at, Memory(caches), splits.forward, again=again)
        return y, layout.put(kept, None, 0, at, values)[0], memory.caches

    (_, kept, caches), _ = run_layers(layers.layer_types, body, (x_TD, layout.kept_buffers(), caches))
    return (layout, kept, None), caches


def _made_again(stage, layer_type, x_TD, positions_T) -> dict:
    """Returns the shapes of what a layer of a type stashes when its group is computed again."""
    stash_x = jax.ShapeDtypeStruct(x_TD.shape, x_TD.dtype)
    shapes = stage.shapes(layer_type, stash_x, positions_T)
    named = {"x": stash_x} | stage.state_arrays(layer_type)
    if not stage.layers.blocks[layer_type].has_state:
        out_TNH = shapes.out_TNH
        named |= {"out": out_TNH, "lse": jax.ShapeDtypeStruct(out_TNH.shape[:2], accumulator(out_TNH.dtype))}
    return named if shapes.chosen_Tk is None else named | {"chosen": shapes.chosen_Tk}


def _saved_vjps(stage, layer_type, weights, saved, unit):
    """Rebuilds q, the shape of k and the vjp of `before` from saved leaves; the vjp of `after` needs `out` first.

    Keys and values themselves are computed only where the backward writes them again. Sinks are the layer's own, as are
    the constants of a mixer with a state.
    """
    x, block = saved["x"], stage.layers.blocks[layer_type]
    shapes = stage.shapes(layer_type, *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (x, unit.positions_T)))
    wanted = (*shapes.before.shapes, *shapes.after.shapes)
    leaves = [saved[f"rest{i}"].reshape(leaf.shape) for i, leaf in enumerate(wanted)]
    cut = len(shapes.before.shapes)
    vjp_before = shapes.before.restore(leaves[:cut], weights, x, unit.positions_T)
    projected = shapes.projected
    if block.has_state:
        saved_heads = mixing.unnumbered("heads", saved, projected.heads)
        projected = block.before(weights, x, unit.positions_T)._replace(heads=saved_heads)
    elif stage.writes_late(layer_type) or projected.sinks_N is not None:
        projected = block.before(weights, x, unit.positions_T)._replace(q_TNH=saved["q"])
    else:
        projected = Projected(saved["q"], projected.k_TKH, projected.k_TKH)
    chosen = saved.get("chosen")
    return projected, vjp_before, lambda out: shapes.after.restore(leaves[cut:], weights, x, out, chosen)


def _made_vjps(stage, layer_type, weights, saved, unit):
    """Returns what `_saved_vjps` returns, recomputed from the layer's input."""
    x, block = saved["x"], stage.layers.blocks[layer_type]
    projected, vjp_before = block.vjp_before(weights, x, unit.positions_T)
    return projected, vjp_before, lambda out: block.vjp_after(weights, x, out, saved.get("chosen"))[1]


def _backward_layer(stage, unit, at, dy, saved, caches, sums, splits):
    """One layer; returns the cotangent of its input, the accumulators, the caches, and what `forward` calls `early`."""
    if stage.layers.blocks[at.layer_type].has_state:
        dx, sums, early = _backward_state_layer(stage, unit, at, dy, saved, sums, splits.forward)
        return dx, sums, caches, early
    behind = dy
    if at.is_first and stage.runs_again:
        at, behind = replace(at, is_first=False), saved["x"]  # the second forward made it just now
    weights, of_group = stage.layer_weights(unit, at, behind), stage.layers
    number = of_group.cache_of(at.layer_type)
    cache, layer = caches[number], at.among(of_group.kv[number])
    window = of_group.windows[at.layer_type]
    chunk, forward_chunk = unit.chunks[window], splits.forward_chunks[window]
    splits = splits._replace(
        backward=splits.backward._replace(window=window), forward=splits.forward._replace(window=window)
    )
    vjps = _saved_vjps if "q" in saved else _made_vjps
    projected, vjp_before, vjp_after = vjps(stage, at.layer_type, weights, saved, unit)
    q, k, v, sinks = projected
    if stage.writes_late(at.layer_type):
        if at.layer_type in of_group.tails:
            cache = tails.with_tail(cache, forward_chunk, layer, saved)
        cache = teams.write_prefix(cache, k, v, forward_chunk, layer, splits.forward)

    def attend():
        return _attend(projected, cache, forward_chunk, layer, splits.forward)

    if "out" in saved:
        out, lse = _with_outputs_of(saved, splits.again, attend)
    else:
        out, lse = attend()
    after = _backward_after(stage, unit, at, dy, vjp_after, out, sums)
    dout, prefix = after.dout, sums.prefixes[number]
    attended = Attended(q, out, lse, dout)
    if at.layer_type in of_group.tails:
        prefix = tails.handed_on(prefix, chunk, layer, of_group.tails[at.layer_type])
    dq, dk, dv, prefix = teams.backward(attended, k, cache, prefix, chunk, layer, splits.backward)
    early = saved["early"]
    if early is not None:
        dq, early = lax.optimization_barrier((dq, early))
    dsinks = None
    if sinks is not None:
        # Collectives are ordered as if every gradient of `before` needed dq, that of sinks too.
        dsinks = sinks_gradient(sinks, out, lse, dout) + buffers.after(dq).astype(sinks.dtype)
    dparams_before, dx_before = vjp_before(Projected(dq, dk, dv, dsinks))
    sums = after.added(sums, dparams_before)._replace(prefixes=_with(sums.prefixes, number, prefix))
    return after.dx_TD + dx_before, sums, _with(caches, number, cache), early


def _backward_state_layer(stage, unit, at, dy, saved, sums, split):
    """One layer with a state; returns the cotangent of its input, the accumulators, and `early`."""
    layers, block, weights = stage.layers, stage.layers.blocks[at.layer_type], stage.layer_weights(unit, at, dy)
    vjps = _made_vjps if stage.places.rest == "recompute" else _saved_vjps
    operands, vjp_before, vjp_after = vjps(stage, at.layer_type, weights, saved, unit)
    state, place = (
        mixing.unnumbered(STATE, saved, layers.state_shapes[at.layer_type].state),
        unit.mixed.places[block.mixer.reach],
    )
    out, back = mixing.vjp(block.mixer, operands, state, place, split.ulysses * split.ring)
    after = _backward_after(stage, unit, at, dy, vjp_after, out, sums)
    number = layers.states_of(at.layer_type)
    layer, grads = at.among(layers.states[number]), sums.dstates[number]
    (dheads, dconstants), dstate = back(after.dout, unit.mixed.cotangent(grads, layer))
    early, (first, *others) = saved["early"], jax.tree.leaves(dheads)
    if early is not None:
        first, early = lax.optimization_barrier((first, early))
    dheads = jax.tree.unflatten(jax.tree.structure(dheads), [first, *others])
    # Collectives are ordered as if every gradient of `before` needed those of the heads.
    dconstants = jax.tree.map(lambda x: x + buffers.after(first).astype(x.dtype), dconstants)
    dparams_before, dx_before = vjp_before(Operands(dheads, dconstants))
    dstates = _with(sums.dstates, number, unit.mixed.hand_on(grads, layer, dstate))
    return after.dx_TD + dx_before, after.added(sums, dparams_before)._replace(dstates=dstates), early


class _After(NamedTuple):
    """What comes back through `after_attention`: the cotangents of x and out; of parameters those not yet added."""

    dx_TD: jax.Array
    dout: jax.Array
    dparams: tuple
    layers: object
    place: tuple
    stack: str | None

    def added(self, sums: Sums, dparams_before) -> Sums:
        """Returns the accumulators with the gradients of all parameters of the layer."""
        layers = _added(self.layers, self.place, *self.dparams, dparams_before)
        return sums._replace(layers=with_part(sums.layers, self.stack, layers))


def _backward_after(stage, unit, at, dy, vjp_after, out, sums) -> _After:
    """Goes back through what comes behind a layer's mixer."""
    of_group, dshares = stage.layers, ()
    if at.layer_type in of_group.shares:
        of_tokens = unit.is_real_T, unit.packed_rows_T
        dshares = stage.shares.cotangents(unit.gradient_nW, at.among(of_group.shares), *of_tokens)
    dparams, dx, dout = vjp_after(out)((dy, dshares))
    stack = of_group.stacks[at.layer_type]
    layers, place = of_stack(sums.layers, stack), (stage.slot(stack, unit.sum_slot), of_group.in_stack(at))
    if not of_group.blocks[at.layer_type].chooses:
        return _After(dx, dout, (dparams,), layers, place, stack)
    # The gradients of all experts are as large as a tick's work: they are gone before the mixer's backward, and the
    # sums are not sliced before they are there. The barrier takes an element of each: what passes one is written.
    done = [leaf.ravel()[0] for leaf in jax.tree.leaves(dparams)]
    _, layers = lax.optimization_barrier((done, layers))
    dout, layers = lax.optimization_barrier((dout, _added(layers, place, dparams)))
    return _After(dx, dout, (), layers, place, stack)


def _added(sums, place, *parts):
    """Adds the gradients of a layer's parameters, in parts, to their sums [slots, layers, ...]."""

    def add(total, *grads):
        first, *rest = (x.astype(total.dtype) for x in grads)
        return buffers.add(total, place, sum(rest, start=first).reshape(total.shape[2:]))

    return jax.tree.map(add, sums, *parts)
