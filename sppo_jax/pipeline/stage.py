"""A stage's layers on one chunk, forward and backward: one scan over layers, one collective pattern for every stage.

Letters: T tokens of a tick on one device, D hidden size, N query heads, K key/value heads, H head dim, k choices of a
token, n layers of a group, W elements of a layer's shares.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sppo_jax import buffers
from sppo_jax.attention import teams
from sppo_jax.attention.sequence import Attended, Cache, Chunk, Split
from sppo_jax.attention.sinks import sinks_gradient, with_sinks
from sppo_jax.dtypes import accumulator
from sppo_jax.pipeline.block import Block, Projected, Residuals, Weights
from sppo_jax.pipeline.shares import SharesLayout
from sppo_jax.pipeline.stash import KEYS_VALUES, StashLayout, chunk_entries
from sppo_jax.pipeline.when import when
from sppo_jax.plan.parts import StashPlan
from sppo_jax.program.stash import StashClass


def _rest_names(q_TNH, leaves) -> dict:
    """Names the arrays that a backward needs in order not to recompute the token-local parts of a layer."""
    return {"q": q_TNH, **{f"rest{i}": leaf for i, leaf in enumerate(leaves)}}


class Stage:
    """The layers of one device: what they are, and how their stash looks."""

    def __init__(
        self,
        block: Block,
        weights: Weights,
        num_layers: int,
        places: StashPlan,
        shares: SharesLayout | None = None,
        slots=None,
    ):
        """Keeps the weights [groups, layers, ...], already in the compute dtype, and the places of the stash.

        Where parameters are gathered group by group, `weights` has their shapes, and `slots` the parameters of the
        groups whose turn it is, [slots, layers, elements]. `shares` is None where layers return none.
        """
        self.block, self.weights, self.num_layers, self.places = block, weights, num_layers, places
        self.shares, self.slots = shares, weights.params if slots is None else slots

    def holding(self, slots) -> "Stage":
        """Returns the same stage with these parameters in its slots."""
        return Stage(self.block, self.weights, self.num_layers, self.places, self.shares, slots)

    def layer_weights(self, unit: "Unit", layer) -> Weights:
        """Picks one layer's weights."""

        def pick(x, like, slot):
            return buffers.read(x, (slot, layer), x.shape[2:]).reshape(like.shape[2:])

        params = jax.tree.map(lambda x, like: pick(x, like, unit.weight_slot), self.slots, self.weights.params)
        return Weights(params, jax.tree.map(lambda x: pick(x, x, unit.group), self.weights.others))

    def shapes(self, x_TD: jax.ShapeDtypeStruct, positions_T: jax.ShapeDtypeStruct) -> "LayerShapes":
        """Traces one layer abstractly."""
        weights = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[2:], x.dtype), self.weights)
        q, k, _, sinks = jax.eval_shape(self.block.before, weights, x_TD, positions_T)
        chosen = jax.eval_shape(self.block.choose, weights, x_TD, q)
        before = after = None
        if self.places.rest != "recompute":
            before = Residuals.of(self.block.vjp_before, weights, x_TD, positions_T)
            after = Residuals.of(self.block.vjp_after, weights, x_TD, q, chosen)
        return LayerShapes(q, k, sinks, chosen, before, after)

    def layout(self, stash, num_slots: int, x_TD, positions_T, *, has_short_rows: bool = False) -> StashLayout:
        """Lays out the stash of one class."""
        shapes = self.shapes(x_TD, positions_T)
        named, chosen = {"x": x_TD}, shapes.chosen_Tk
        if self.places.inputs == "recompute":
            if chosen is not None:
                named["chosen"] = jax.ShapeDtypeStruct(
                    (x_TD.shape[0], self.num_layers, *chosen.shape[1:]), chosen.dtype
                )
            return StashLayout(chunk_entries(stash, named), 1, num_slots)
        if chosen is not None:
            named["chosen"] = chosen
        if not stash.recomputes:
            named["out"] = shapes.q_TNH
            named["lse"] = jax.ShapeDtypeStruct(shapes.q_TNH.shape[:2], accumulator(shapes.q_TNH.dtype))
        if self.places.rest != "recompute":
            named.update(_rest_names(shapes.q_TNH, (*shapes.before.shapes, *shapes.after.shapes)))
        if self.places.kv == "host":
            named.update(dict.fromkeys(KEYS_VALUES, shapes.k_TKH))
        again = {"rebuild": ("x",), "host": KEYS_VALUES}.get(self.places.kv, ())
        return StashLayout(chunk_entries(stash, named), self.num_layers, num_slots, again, has_short_rows)


class LayerShapes(NamedTuple):
    """Shapes of q, k, sinks and choices, and how a layer's vjp functions come apart (None where recomputed)."""

    q_TNH: jax.ShapeDtypeStruct
    k_TKH: jax.ShapeDtypeStruct
    sinks_N: jax.ShapeDtypeStruct | None
    chosen_Tk: jax.ShapeDtypeStruct | None
    before: Residuals | None
    after: Residuals | None


class Unit(NamedTuple):
    """This device's unit of a tick: group of layers and its slots, chunk in the cache, positions, stash slot.

    Where layers return shares, training has also the unit's sequence, which of its tokens are real, and in a backward
    the gradient of the shares' sums, if they have a penalty.
    """

    group: jax.Array
    weight_slot: jax.Array
    sum_slot: jax.Array
    chunk: Chunk
    positions_T: jax.Array
    stash_slot: jax.Array
    sequence: jax.Array | None = None
    is_real_T: jax.Array | None = None
    gradient_nW: jax.Array | None = None


class Memory(NamedTuple):
    """What layers write to besides their outputs: keys and values, and in training the sums of shares, if any."""

    cache: Cache
    shares_MvnW: jax.Array | None = None


class Again(NamedTuple):
    """What a layer chose when it ran first; None for a layer that chooses nothing."""

    chosen_Tk: jax.Array | None


def run_layers(num_layers: int, body, carry, held=None):
    """Applies `body(carry, step)` for step 0..num_layers-1; `held` is held back until the last step.

    The whole scan can overlap a copy started before the scan: the barrier keeps the compiler from starting it
    later, and the last layer by itself keeps the barrier from being the last thing. One layer alone has no scan, and
    `held` is held back until its end.

    Returns:
        the carry and `held`.
    """
    if held is not None and num_layers == 1:
        first, *rest = body(carry, jnp.int32(0))
        first, held = lax.optimization_barrier((first, held))
        return (first, *rest), held
    ahead = num_layers if held is None else num_layers - 1
    if ahead:
        carry, _ = lax.scan(lambda c, step: (body(c, step), None), carry, jnp.arange(ahead, dtype=jnp.int32))
    if held is not None:
        # The last layer's number goes through the barriers too, or its recomputation is hoisted before them.
        first, *rest = carry
        first, last, held = buffers.hold(first, jnp.int32(num_layers - 1), held)
        carry = body((first, *rest), last)
    return carry, held


def forward(stage: Stage, unit: Unit, x_TD, memory: Memory, split: Split, stash=None, held=None, early=None):
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
    whole_layers = layout is not None and layout.num_layers == stage.num_layers
    if layout is not None and not whole_layers:
        parts = layout.put(*parts, unit.stash_slot, 0, {"x": x_TD})

    def body(carry, layer):
        x, memory, parts, early = carry
        y, memory, values = _forward_layer(stage, x, unit, layer, memory, split, early=early)
        if whole_layers:
            parts = layout.put(*parts, unit.stash_slot, layer, values)
        elif layout is not None:
            parts = layout.put_choices(*parts, unit.stash_slot, layer, values)
        return y, memory, tuple(parts), values["early"]

    carry = x_TD, memory, tuple(parts), early
    (y_TD, memory, parts, early), held = run_layers(stage.num_layers, body, carry, held)
    return y_TD, memory, parts, held, early


def _forward_layer(stage, x, unit, layer, memory, split, *, early=None, again=None):
    """One layer; returns its output, the memory and all that may be stashed (unused parts are never computed).

    Where `again` is given, the layer runs again: its keys and values are in the memory, and its shares have been added.
    """
    weights, cache = stage.layer_weights(unit, layer), memory.cache
    save_rest = stage.places.rest != "recompute"
    if save_rest:
        projected, vjp_before = stage.block.vjp_before(weights, x, unit.positions_T)
    else:
        projected = stage.block.before(weights, x, unit.positions_T)
    q, k, v, _ = projected
    if again is None:
        cache = teams.write_prefix(cache, k, v, unit.chunk, layer, split)
    out, lse = _attend(projected, cache, unit.chunk, layer, split)
    if early is not None:
        out, early = lax.optimization_barrier((out, early))
    chosen = stage.block.choose(weights, x, out) if again is None else again.chosen_Tk
    values = {"x": x, "out": out, "lse": lse, "k": k, "v": v, "early": early, "chosen": chosen}
    if save_rest:
        (y, shares), vjp_after = stage.block.vjp_after(weights, x, out, chosen)
        shapes = stage.shapes(*(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (x, unit.positions_T)))
        values |= _rest_names(q, (*shapes.before.take(vjp_before), *shapes.after.take(vjp_after)))
    else:
        y, shares = stage.block.after(weights, x, out, chosen)
    memory = memory._replace(cache=cache)
    if unit.is_real_T is not None and again is None:
        place = (unit.sequence, unit.group, layer)
        memory = memory._replace(
            shares_MvnW=buffers.add(memory.shares_MvnW, place, stage.shares.of_tokens(shares, unit.is_real_T))
        )
    return y, memory, values


def _attend(projected: Projected, cache: Cache, chunk: Chunk, layer, split: Split) -> tuple[jax.Array, jax.Array]:
    """Returns the output and the LSE of a chunk's queries over their prefix and the layer's sinks."""
    out, lse = teams.forward(projected.q_TNH, projected.k_TKH, cache, chunk, layer, split)
    return (out, lse) if projected.sinks_N is None else with_sinks(out, lse, projected.sinks_N)


class Sums(NamedTuple):
    """What a backward adds to: dK and dV of the prefix, and the layers' gradients [slots, layers, ...]."""

    prefix: Cache
    layers: object


class Splits(NamedTuple):
    """What travels on the ring in a backward; and in a forward that is made again, with the chunk's tags for it.

    `again` is 1 where attention is computed again although the stash has its outputs, which are not the chunk's.
    """

    backward: Split
    forward: Split
    forward_chunk: Chunk
    again: jax.Array | int = 0


def backward(stage: Stage, unit: Unit, dy_TD, cache: Cache, sums: Sums, splits: Splits, stash, held=None):
    """Runs a group of layers backward on a chunk, after the later chunks of the sequence.

    An only chunk's keys and values may be written again here, layer by layer; see `StashPlan.kv`.

    Args:
        stage: the layers.
        unit: the chunk; `unit.chunk` has the tags of the backward.
        dy_TD: cotangent of the last layer's output, zero for padding.
        cache: keys and values of the prefix.
        sums: accumulators.
        splits: how `seq` is divided.
        stash: (layout, kept buffers, part fetched from the host).
        held: arrays prefetched from the host for the next tick, see `run_layers`.

    Returns:
        dx_TD, cache, sums, held.
    """
    layout, kept, fetched = stash
    writes = stage.places.kv == "recompute"
    if layout.num_layers != stage.num_layers:
        layout, kept, fetched = _rerun(stage, unit, layout.get(kept, fetched, unit.stash_slot, 0), cache, splits)
        unit = unit._replace(stash_slot=0)

    def body(carry, step):
        dy, sums, early, *written = carry
        layer = stage.num_layers - 1 - step
        saved = layout.get(kept, fetched, unit.stash_slot, layer) | {"early": early}
        before = written[0] if writes else cache
        dx, sums, after, early = _backward_layer(stage, unit, layer, dy, saved, before, sums, splits)
        return (dx, sums, early, after) if writes else (dx, sums, early)

    # Behind the only layer sums of all experts are added and scattered, beside which XLA would put the copies.
    early, held = (held, None) if stage.num_layers == 1 and stage.block.chooses else (None, held)
    carry = dy_TD, sums, early, *[cache] * writes
    (dx_TD, sums, early, *written), held = run_layers(stage.num_layers, body, carry, held)
    return dx_TD, written[0] if writes else cache, sums, held if early is None else early


def rebuild(stage: Stage, unit: Unit, cache: Cache, split: Split, stash, behind=None) -> Cache:
    """Writes the keys and values of a chunk in a group of layers again.

    They are in its stash, or are computed from the layer inputs there.

    Args:
        stage: the layers.
        unit: the chunk; `unit.group` is the group of layers.
        cache: keys and values; the chunk's are written.
        split: how `seq` is divided.
        stash: (layout, kept buffers, what was fetched from the host).
        behind: see `attention.sequence.write_blocks`.
    """
    layout, kept, fetched = stash

    def body(carry, layer):
        (cache,) = carry
        values = layout.get_again(kept, fetched, unit.stash_slot, layer)
        if layout.again == KEYS_VALUES:
            k, v = values["k"], values["v"]
        else:
            _, k, v, _ = stage.block.before(stage.layer_weights(unit, layer), values["x"], unit.positions_T)
        return (teams.write_prefix(cache, k, v, unit.chunk, layer, split, behind=behind),)

    return run_layers(stage.num_layers, body, (cache,))[0][0]


def _rerun(stage, unit, saved, cache, splits):
    """Recomputes a chunk's stash from the stage's input; the chunk's keys and values are still in the cache."""
    x_TD = saved["x"]
    stash_x = jax.ShapeDtypeStruct(x_TD.shape, x_TD.dtype)
    shapes = stage.shapes(stash_x, unit.positions_T)
    q_TNH = shapes.q_TNH
    named = {"x": stash_x, "out": q_TNH, "lse": jax.ShapeDtypeStruct(q_TNH.shape[:2], accumulator(q_TNH.dtype))}
    if shapes.chosen_Tk is not None:
        named["chosen"] = shapes.chosen_Tk
    layout = StashLayout(chunk_entries(StashClass(x_TD.shape[0]), named), stage.num_layers, 0)
    unit = unit._replace(chunk=splits.forward_chunk)

    def body(carry, layer):
        x, kept = carry
        chosen = None
        if shapes.chosen_Tk is not None:
            chosen = lax.dynamic_index_in_dim(saved["chosen"], layer, 1, keepdims=False)
        y, _, values = _forward_layer(stage, x, unit, layer, Memory(cache), splits.forward, again=Again(chosen))
        return y, layout.put(kept, None, 0, layer, values)[0]

    (_, kept), _ = run_layers(stage.num_layers, body, (x_TD, layout.kept_buffers()))
    return layout, kept, None


def _saved_vjps(stage, weights, saved, unit):
    """Rebuilds q, the shape of k and the vjp of `before` from saved leaves; the vjp of `after` needs `out` first.

    Keys and values themselves are computed only where the backward writes them again. Sinks are the layer's own.
    """
    x = saved["x"]
    shapes = stage.shapes(*(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (x, unit.positions_T)))
    wanted = (*shapes.before.shapes, *shapes.after.shapes)
    leaves = [saved[f"rest{i}"].reshape(leaf.shape) for i, leaf in enumerate(wanted)]
    cut = len(shapes.before.shapes)
    vjp_before = shapes.before.restore(leaves[:cut], weights, x, unit.positions_T)
    projected = Projected(saved["q"], shapes.k_TKH, shapes.k_TKH)
    if stage.places.kv == "recompute" or shapes.sinks_N is not None:
        projected = stage.block.before(weights, x, unit.positions_T)._replace(q_TNH=saved["q"])
    chosen = saved.get("chosen")
    return projected, vjp_before, lambda out: shapes.after.restore(leaves[cut:], weights, x, out, chosen)


def _made_vjps(stage, weights, saved, unit):
    """Returns what `_saved_vjps` returns, recomputed from the layer's input."""
    x = saved["x"]
    projected, vjp_before = stage.block.vjp_before(weights, x, unit.positions_T)
    return projected, vjp_before, lambda out: stage.block.vjp_after(weights, x, out, saved.get("chosen"))[1]


def _backward_layer(stage, unit, layer, dy, saved, cache, sums, splits):
    """One layer; returns the cotangent of its input, the accumulators, the cache, and what `forward` calls `early`."""
    weights = stage.layer_weights(unit, layer)
    vjps = _saved_vjps if "q" in saved else _made_vjps
    projected, vjp_before, vjp_after = vjps(stage, weights, saved, unit)
    q, k, v, sinks = projected
    if stage.places.kv == "recompute":
        cache = teams.write_prefix(cache, k, v, splits.forward_chunk, layer, splits.forward)

    def attend(_):
        return _attend(projected, cache, splits.forward_chunk, layer, splits.forward)

    if "out" in saved:
        with jax.named_scope("attention_turn"):
            out, lse = when(splits.again, attend, (saved["out"], saved["lse"]))
    else:
        out, lse = attend(None)
    dshares = () if stage.shares is None else stage.shares.cotangents(unit.gradient_nW, layer, unit.is_real_T)
    dparams_after, dx_after, dout = vjp_after(out)((dy, dshares))
    layers, place = sums.layers, (unit.sum_slot, layer)
    if stage.block.chooses:
        # The gradients of all experts are as large as a tick's work: they are gone before attention's backward, and the
        # sums are not sliced before they are there.
        dparams_after, layers = lax.optimization_barrier((dparams_after, layers))
        dout, layers = lax.optimization_barrier((dout, _added(layers, place, dparams_after)))
    attended = Attended(q, out, lse, dout)
    dq, dk, dv, prefix = teams.backward(attended, k, cache, sums.prefix, unit.chunk, layer, splits.backward)
    early = saved["early"]
    if early is not None:
        dq, early = lax.optimization_barrier((dq, early))
    dsinks = None
    if sinks is not None:
        # Collectives are ordered as if every gradient of `before` needed dq, that of sinks too.
        dsinks = sinks_gradient(sinks, out, lse, dout) + buffers.after(dq).astype(sinks.dtype)
    dparams_before, dx_before = vjp_before(Projected(dq, dk, dv, dsinks))
    layers = _added(layers, place, *[dparams_after] * (not stage.block.chooses), dparams_before)
    return dx_after + dx_before, Sums(prefix, layers), cache, early


def _added(sums, place, *parts):
    """Adds the gradients of a layer's parameters, in parts, to their sums [slots, layers, ...]."""

    def add(total, *grads):
        first, *rest = (x.astype(total.dtype) for x in grads)
        return buffers.add(total, place, sum(rest, start=first).reshape(total.shape[2:]))

    return jax.tree.map(add, sums, *parts)
