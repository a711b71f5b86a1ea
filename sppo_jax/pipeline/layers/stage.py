"""A stage's layers: what they are, how their stash looks, and what passes through them carry.

Letters: T tokens of a tick on one device, D hidden size, N query heads, K key/value heads, H head dim, k choices of a
token, n layers of a group, W elements of a layer's shares.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax

from sppo_jax.arrays import buffers
from sppo_jax.arrays.dtypes import accumulator
from sppo_jax.attention.spreading.sequence import Cache, Chunk, Split
from sppo_jax.mixers.mixer import Operands
from sppo_jax.models.stacks import of_stack
from sppo_jax.pipeline.block import Block, Projected, Residuals, Weights
from sppo_jax.pipeline.layer_types import WHOLE, At, Number
from sppo_jax.pipeline.layers.token_sums import SharesLayout
from sppo_jax.pipeline.params.group_rows import GroupRows
from sppo_jax.pipeline.pasts import states as mixing
from sppo_jax.pipeline.stash.buffers import KEYS_VALUES, STATE, TAILS, StashLayout, chunk_entries
from sppo_jax.plan.parts import StashPlan


def rest_names(projected: Projected | Operands, leaves) -> dict:
    """Names the arrays that a backward needs in order not to recompute the token-local parts of a layer."""
    rest = {f"rest{i}": leaf for i, leaf in enumerate(leaves)}
    if isinstance(projected, Operands):
        return mixing.numbered("heads", projected.heads) | rest
    return {"q": projected.q_TNH} | rest


@dataclass(frozen=True)
class Layers:
    """The layers of a group: the block of each type, and the type of each layer.

    Args:
        blocks: by type.
        stacks: the name of the stack of each type's parameters; None where all layers are alike.
        layer_types: of each layer of the group.
        groups: the same of each group of the stage; two groups may differ only where there is one stage.
        kv: the types of each cache, whose keys and values have one shape.
        shares: the types whose layers return shares.
        windows: the tokens that a token attends to in layers of each type; 0: all before it.
        tails: the shape [K, W, H] of a tail, of types whose caches hold a tail and a chunk; see `pipeline.pasts.tails`.
        states: the types of each buffer of states, which have one shape.
        state_shapes: of each type whose layers have a state.
        rows: where the layers of a group lie in the stacks of which only some groups have layers.
        traced: the shapes that `Stage.shapes` has found in one trace; every tick of a program asks for some.
    """

    blocks: Mapping[str | None, Block]
    stacks: Mapping[str | None, str | None]
    layer_types: tuple[str | None, ...]
    groups: tuple[tuple[str | None, ...], ...]
    kv: tuple[tuple[str | None, ...], ...]
    shares: tuple[str | None, ...]
    windows: Mapping[str | None, int]
    tails: Mapping[str | None, tuple[int, int, int]] = field(default_factory=dict)
    states: tuple[tuple[str | None, ...], ...] = ()
    state_shapes: Mapping[str | None, mixing.StateShape] = field(default_factory=dict)
    rows: Mapping[str | None, GroupRows] = field(default_factory=dict)
    traced: dict[tuple, "LayerShapes"] = field(default_factory=dict, compare=False, repr=False)

    @property
    def patterns(self) -> tuple[tuple[str | None, ...], ...]:
        """The types of groups, each once."""
        return tuple(dict.fromkeys(self.groups))

    def cache_of(self, layer_type: str | None) -> int:
        """Returns which cache has the keys and values of a type."""
        return next(number for number, layer_types in enumerate(self.kv) if layer_type in layer_types)

    def states_of(self, layer_type: str | None) -> int:
        """Returns which buffer has the states of a type."""
        return next(number for number, layer_types in enumerate(self.states) if layer_type in layer_types)

    def in_stack(self, at: At) -> Number:
        """Returns a layer's number among those of the group whose parameters are in its stack."""
        stack = self.stacks[at.layer_type]
        return at.among([layer_type for layer_type, name in self.stacks.items() if name == stack])

    def row(self, stack: str | None, group: jax.Array) -> jax.Array:
        """Returns where the layers of a group lie in a stack."""
        return self.rows[stack].row(group) if stack in self.rows else group

    def attends_to_all(self, layer_type: str | None) -> bool:
        """Returns whether a type's layers have keys and values of a whole sequence."""
        return not self.blocks[layer_type].has_state and layer_type not in self.tails

    @property
    def choosing(self) -> tuple[str | None, ...]:
        """The types whose layers choose."""
        return tuple(layer_type for layer_type, block in self.blocks.items() if block.chooses)

    def count(self, layer_types: Sequence[str | None]) -> int:
        """Returns the layers of a group that are of some types, the most of any group."""
        return max(sum(map(group.count, layer_types)) for group in self.groups)


class Stage:
    """The layers of one device: what they are, and how their stash looks."""

    def __init__(
        self, layers: Layers, weights: Weights, places: StashPlan, shares: SharesLayout | None = None, slots=None
    ):
        """Keeps the weights [groups, layers, ...], already in the compute dtype, and the places of the stash.

        Where parameters are gathered group by group, `weights` has their shapes, and `slots` the parameters of the
        groups whose turn it is, [slots, layers, elements]. `shares` is None where layers return none.
        """
        self.layers, self.weights, self.places = layers, weights, places
        self.shares, self.slots = shares, weights.params if slots is None else slots

    @property
    def num_layers(self) -> int:
        return len(self.layers.layer_types)

    def stashes_input_alone(self, layout: StashLayout) -> bool:
        """Returns whether a group has only its input in the stash; of a lone layer without a name that is all of it."""
        if None not in self.layers.blocks:
            return self.places.inputs == "recompute"
        return layout.num_layers != self.num_layers

    @property
    def runs_again(self) -> bool:
        """Whether a group of layers has its first layer's input alone in the stash, and runs again in a backward."""
        return self.places.inputs == "period"

    def writes_late(self, layer_type: str | None) -> bool:
        """Returns whether a layer's backward writes its chunk's keys and values again.

        The chunk is the only one of its sequence, or no later chunk needs more of it than a tail.
        """
        return not self.runs_again and (self.places.kv == "recompute" or layer_type in self.layers.tails)

    def holding(self, slots) -> "Stage":
        """Returns the same stage with these parameters in its slots."""
        return Stage(self.layers, self.weights, self.places, self.shares, slots)

    @property
    def is_resident(self) -> bool:
        """Whether the slots are those of all groups."""
        return self.slots is self.weights.params

    def slot(self, stack: str | None, slot: jax.Array) -> jax.Array:
        """Returns where the layers of a stack lie in a slot, which is a group's number where weights are resident."""
        return self.layers.row(stack, slot) if self.is_resident else slot

    def layer_weights(self, unit: "UnitOnDevice", at: At, x: jax.Array) -> Weights:
        """Picks one layer's weights; `x` is what the layer works on.

        Layers of several types are no loop, and a compiler would pick the weights of all of them at once. So those with
        experts are picked after `x` is there. Of the first layer `x` may be a part of a buffer that is written before
        the compiler would read it here: it would copy the buffer.
        """
        stack, number = self.layers.stacks[at.layer_type], self.layers.in_stack(at)
        if self.layers.blocks[at.layer_type].chooses and len(set(self.layers.layer_types)) > 1 and not at.is_first:
            number += buffers.after(x)

        def pick(x, like, slot):
            return buffers.read(x, (slot, number), x.shape[2:]).reshape(like.shape[2:])

        weight_slot, row = self.slot(stack, unit.weight_slot), self.layers.row(stack, unit.group)
        slots, likes, others = (of_stack(x, stack) for x in (self.slots, *self.weights))
        params = jax.tree.map(lambda x, like: pick(x, like, weight_slot), slots, likes)
        return Weights(params, jax.tree.map(lambda x: pick(x, x, row), others))

    def shapes(
        self, layer_type: str | None, x_TD: jax.ShapeDtypeStruct, positions_T: jax.ShapeDtypeStruct
    ) -> "LayerShapes":
        """Traces one layer of a type abstractly, once for each length."""
        key = layer_type, self.places.rest, *((x.shape, x.dtype) for x in (x_TD, positions_T))
        if key not in self.layers.traced:
            self.layers.traced[key] = self._trace(layer_type, x_TD, positions_T)
        return self.layers.traced[key]

    def _trace(
        self, layer_type: str | None, x_TD: jax.ShapeDtypeStruct, positions_T: jax.ShapeDtypeStruct
    ) -> "LayerShapes":
        block, stack = self.layers.blocks[layer_type], self.layers.stacks[layer_type]
        whole = Weights(*(of_stack(x, stack) for x in self.weights))
        weights = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[2:], x.dtype), whole)
        projected = jax.eval_shape(block.before, weights, x_TD, positions_T)
        out = projected[0]
        if block.has_state:
            of_token = self.layers.state_shapes[layer_type].out_NV
            out = jax.ShapeDtypeStruct((x_TD.shape[0], *of_token.shape), of_token.dtype)
        chosen = jax.eval_shape(block.choose, weights, x_TD, out)
        before = after = None
        if self.places.rest != "recompute":
            before = Residuals.of(block.vjp_before, weights, x_TD, positions_T)
            after = Residuals.of(block.vjp_after, weights, x_TD, out, chosen)
        return LayerShapes(projected, out, chosen, before, after)

    def layout(self, stash, num_slots: int, x_TD, positions_T, *, has_short_rows: bool = False) -> StashLayout:
        """Lays out the stash of one class."""
        shapes = {layer_type: self.shapes(layer_type, x_TD, positions_T) for layer_type in self.layers.blocks}
        if self.places.inputs == "recompute":
            of_group = {WHOLE.layer_type: {"x": x_TD} | self._choices(x_TD, shapes)}
            states = {layer_type: self.state_arrays(layer_type) for layer_type in shapes}
            entries = chunk_entries(stash, of_group, [(WHOLE.layer_type,)])
            return StashLayout(entries | chunk_entries(stash, states, self.layers.groups), 1, num_slots)
        if self.runs_again:
            of_layers = {one: self._of_layer_again(one, of_type, stash) for one, of_type in shapes.items()}
            groups = [(WHOLE.layer_type, *layer_types) for layer_types in self.layers.groups]
            entries = chunk_entries(stash, {WHOLE.layer_type: {"x": x_TD}} | of_layers, groups, self._makes_again)
            return StashLayout(entries, self.num_layers, num_slots, has_short_rows)
        named = {one: {"x": x_TD} | self._stashed(one, of_type, stash) for one, of_type in shapes.items()}
        entries = chunk_entries(stash, named, self.layers.groups, self._makes_again)
        return StashLayout(entries, self.num_layers, num_slots, has_short_rows)

    def _makes_again(self, layer_type: str | None, name: str) -> bool:
        """Returns whether a stashed array makes keys and values be there again.

        Inputs of layers with a tail do not. They have room of their own where every group has as many.
        """
        if self.places.kv == "host":
            return name in KEYS_VALUES
        if self.places.kv != "rebuild":
            return False
        if self.runs_again:
            return name in ("x", "chosen", *TAILS) or name.startswith(STATE)
        tails = {sum(one in self.layers.tails for one in layer_types) for layer_types in self.layers.groups}
        return name == "x" and not (layer_type in self.layers.tails and len(tails) == 1)

    def _of_layer_again(self, layer_type: str | None, shapes: "LayerShapes", stash) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns what a layer stashes of a group that runs again: all but its input.

        In a group of several layers one with a window runs again for the layers behind it; a lone one stashes its
        output.
        """
        named = self._stashed(layer_type, shapes, stash)
        if layer_type not in self.layers.tails or max(map(len, self.layers.groups)) == 1:
            return named
        return {name: x for name, x in named.items() if name in ("chosen", *TAILS)}

    def _choices(self, x_TD, shapes: Mapping[str | None, "LayerShapes"]) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the choices of all layers of a group, which lie beside its input."""
        choosing = self.layers.choosing
        if not choosing:
            return {}
        chosen = shapes[choosing[0]].chosen_Tk
        size = (x_TD.shape[0], self.layers.count(choosing), *chosen.shape[1:])
        return {"chosen": jax.ShapeDtypeStruct(size, chosen.dtype)}

    def state_arrays(self, layer_type: str | None) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the arrays of the state before a chunk in a layer of a type."""
        of_type = self.layers.state_shapes.get(layer_type)
        return {} if of_type is None else mixing.numbered(STATE, of_type.state)

    def stashed_state(self, at: At, saved: Mapping[str, jax.Array]) -> Any:
        """Returns the state before a chunk from a layer's stash; None for a layer without a state."""
        of_type = self.layers.state_shapes.get(at.layer_type)
        return None if of_type is None else mixing.unnumbered(STATE, saved, of_type.state)

    def _stashed(self, layer_type: str | None, shapes: "LayerShapes", stash) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns what a layer stashes besides its input."""
        named, attends = self.state_arrays(layer_type), not self.layers.blocks[layer_type].has_state
        if shapes.chosen_Tk is not None:
            named["chosen"] = shapes.chosen_Tk
        if attends and not stash.recomputes:
            named["out"] = shapes.out_TNH
            named["lse"] = jax.ShapeDtypeStruct(shapes.out_TNH.shape[:2], accumulator(shapes.out_TNH.dtype))
        if self.places.rest != "recompute":
            named.update(rest_names(shapes.projected, (*shapes.before.shapes, *shapes.after.shapes)))
        if layer_type in self.layers.tails:
            tail_KWH = jax.ShapeDtypeStruct(self.layers.tails[layer_type], shapes.projected.k_TKH.dtype)
            named.update(dict.fromkeys(TAILS, tail_KWH))
        elif attends and self.places.kv == "host":
            named.update(dict.fromkeys(KEYS_VALUES, shapes.projected.k_TKH))
        return named


class LayerShapes(NamedTuple):
    """Shapes of what a layer gives to its mixer, of what it gets, and of its choices.

    And how its vjp functions come apart (None where recomputed).
    """

    projected: Projected | Operands
    out_TNH: jax.ShapeDtypeStruct
    chosen_Tk: jax.ShapeDtypeStruct | None
    before: Residuals | None
    after: Residuals | None


class UnitOnDevice(NamedTuple):
    """This device's unit of a tick: group of layers and its slots, chunk in the cache, positions, stash slot.

    The chunk has masks for each window of the layers. The pattern of the group's layers is an int where it is known.

    Where layers return shares, training has also the unit's place among the sums, which of its tokens are real, from
    which packed rows they come if documents may have moved, and in a backward the gradient of the shares' sums, if they
    have a penalty. `mixed` is there where layers have a state.
    """

    group: jax.Array
    weight_slot: jax.Array
    sum_slot: jax.Array
    chunks: dict[int, Chunk]
    positions_T: jax.Array
    stash_slot: jax.Array
    pattern: jax.Array | int = 0
    sequence: jax.Array | None = None
    is_real_T: jax.Array | None = None
    packed_rows_T: jax.Array | None = None
    gradient_nW: jax.Array | None = None
    mixed: mixing.StateUnit | None = None


class Memory(NamedTuple):
    """What layers write to besides their outputs: keys and values, states, and in training sums of shares, if any."""

    caches: tuple[Cache, ...]
    shares_MvnW: jax.Array | None = None
    states: tuple = ()


class Again(NamedTuple):
    """What a layer that runs again has of its first run.

    Args:
        chosen_Tk: what it chose; None for a layer that chooses nothing.
        state: what it began with; None for a layer without a state.
        saved: its stash, where a period runs again.
        writes: whether its keys and values are written again.
        attends: 1 where the attention outputs of its stash are not the chunk's.
    """

    chosen_Tk: jax.Array | None
    state: Any = None
    saved: dict[str, jax.Array] = {}
    writes: bool = False
    attends: jax.Array | int = 0


class Sums(NamedTuple):
    """What a backward adds to: dK and dV of the prefix, and the layers' gradients [slots, layers, ...].

    `dstates` has the cotangents of states, which each backward replaces.
    """

    prefixes: tuple[Cache, ...]
    layers: object
    dstates: tuple = ()


class Splits(NamedTuple):
    """What travels on the ring in a backward; and in a forward that is made again, with the chunk's tags for it.

    `again` is 1 where attention is computed again although the stash has its outputs, which are not the chunk's.
    """

    backward: Split
    forward: Split
    forward_chunks: dict[int, Chunk]
    again: jax.Array | int = 0
