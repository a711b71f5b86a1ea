"""A chunk's pass through a mixer with a state: what comes of the chunks before, and what goes back to them.

A forward reads the state that the chunk before has left, and leaves its own. A backward starts from the state in the
chunk's stash, and hands the state's cotangent on to the chunk before. Differentiation sees no exchange between devices.

Letters: T tokens of a tick on one device, N heads, V size of a head's output, M members of `seq`, R of a ring.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from sppo_jax.arrays import buffers
from sppo_jax.mixers import heads
from sppo_jax.mixers.mixer import Operands, StateMixer, TokenRun


class StateShape(NamedTuple):
    """What a layer with a state keeps and gives.

    Args:
        state: tree of the shapes of one layer's state on one device.
        out_NV: of a token's output, all heads.
    """

    state: Any
    out_NV: jax.ShapeDtypeStruct


class StateUnit(NamedTuple):
    """What a unit of a tick is to layers with a state.

    Args:
        places: the chunk's place, by how many tokens before it are told.
        slot: of the states, one of a sequence on a virtual stage.
        grad_slot: of the states' cotangents.
        is_first: whether the chunk is the first of its sequence.
        is_active: whether there is a unit.
    """

    places: dict[int, TokenRun]
    slot: jax.Array
    grad_slot: jax.Array
    is_first: jax.Array
    is_active: jax.Array

    def before(self, buffer: Any, layer, empty: Any) -> Any:
        """Returns the state before the chunk: what the chunk before has left, or that before a sequence."""
        old = _read(buffer, (self.slot, layer))
        return jax.tree.map(lambda first, x: jnp.where(self.is_first, first, x), empty, old)

    def leave(self, buffer: Any, layer, state: Any) -> Any:
        """Returns the buffer with the state behind the chunk; an idle stage writes nothing."""
        return _write(buffer, (self.slot, layer), state, self.is_active)

    def cotangent(self, grads: Any, layer) -> Any:
        """Returns the cotangent of the state behind the chunk."""
        return _read(grads, (self.grad_slot, layer))

    def hand_on(self, grads: Any, layer, dstate: Any) -> Any:
        """Returns the buffer with the cotangent of the state before the chunk.

        The first chunk leaves zeros, for the last chunk of the next sequence in the slot.
        """
        dstate = jax.tree.map(lambda x: jnp.where(self.is_first, 0, x), dstate)
        return _write(grads, (self.grad_slot, layer), dstate, self.is_active)


def _read(buffer: Any, where: tuple) -> Any:
    return jax.tree.map(lambda x: buffers.read(x, where, x.shape[2:]), buffer)


def _write(buffer: Any, where: tuple, value: Any, is_active: jax.Array) -> Any:
    def write(x, new):
        return buffers.write(x, where, jnp.where(is_active, new, buffers.read(x, where, x.shape[2:])))

    return jax.tree.map(write, buffer, value)


def numbered(name: str, tree: Any) -> dict[str, Any]:
    """Names the arrays of a tree."""
    return {f"{name}{i}": leaf for i, leaf in enumerate(jax.tree.leaves(tree))}


def unnumbered(name: str, saved: Mapping[str, Any], like: Any) -> Any:
    """Returns the tree whose arrays `numbered` has named, in the shapes of `like`."""
    leaves, tree = jax.tree.flatten(like)
    return jax.tree.unflatten(tree, [saved[f"{name}{i}"].reshape(leaf.shape) for i, leaf in enumerate(leaves)])


def alike(states: dict[str | None, StateShape]) -> tuple[tuple[str | None, ...], ...]:
    """Returns the types whose layers have a state, those of one shape of state together."""
    found: list[list[str | None]] = []
    for layer_type, shape in states.items():
        same = next((layer_types for layer_types in found if states[layer_types[0]].state == shape.state), None)
        if same is None:
            found.append([layer_type])
        else:
            same.append(layer_type)
    return tuple(map(tuple, found))


def empty_state(mixer: StateMixer, operands: Operands, num_members: int) -> Any:
    """Returns the state of this device's heads before a sequence; `operands` has those of all heads."""
    return mixer.empty_state(heads.own_shapes(operands, num_members))


def state_shape(mixer: StateMixer, operands: Operands, num_members: int) -> StateShape:
    """Traces a mixer abstractly on operands of all heads."""
    num_tokens = jax.tree.leaves(operands.heads)[0].shape[0]
    numbers = jax.ShapeDtypeStruct((num_tokens,), jnp.int32), jax.ShapeDtypeStruct((mixer.reach,), jnp.int32)
    place = TokenRun(*numbers, jax.ShapeDtypeStruct((), jnp.int32))
    out, _ = jax.eval_shape(lambda o, p: mixer.mix(o, mixer.empty_state(o), p), operands, place)
    state = jax.eval_shape(lambda: empty_state(mixer, operands, num_members))
    return StateShape(state, jax.ShapeDtypeStruct(out.shape[1:], out.dtype))


def chunk_place(documents_RS: jax.Array, start, length, size: int, reach: int) -> TokenRun:
    """Returns the place of a chunk.

    Args:
        documents_RS: documents of its sequence, [R, S / R + spare].
        start, length: its first token and its tokens, of the whole sequence.
        size: tokens of the tick on one ring member.
        reach: how many tokens before the chunk are told.
    """
    num_ring = documents_RS.shape[0]
    chunk = buffers.read(documents_RS, (0, buffers.quotient(start, num_ring)), (num_ring, size)).T.reshape(-1)
    documents_T = jnp.where(jnp.arange(chunk.size, dtype=jnp.int32) < length, chunk, -1)
    before = start - reach + jnp.arange(reach, dtype=jnp.int32)
    at = jnp.maximum(before, 0)
    before_W = jnp.where(before >= 0, documents_RS[at % num_ring, at // num_ring], -1)
    return TokenRun(documents_T, before_W, jnp.sum(documents_T >= 0, dtype=jnp.int32))


def forward(
    mixer: StateMixer, operands: Operands, state: Any, place: TokenRun, num_members: int
) -> tuple[jax.Array, Any]:
    """Mixes a chunk.

    Args:
        mixer: the layer's mixer.
        operands: of this device's tokens, all heads.
        state: before the chunk, of this device's heads.
        place: the chunk's.
        num_members: members of `seq`.

    Returns:
        out_TNV, and the state behind the chunk.
    """
    own = Operands(heads.scatter(operands.heads, num_members), heads.own_constants(operands.constants, num_members))
    out, state = mixer.mix(own, state, place)
    return _all_heads(out, num_members), state


def vjp(
    mixer: StateMixer, operands: Operands, state: Any, place: TokenRun, num_members: int
) -> tuple[jax.Array, Callable]:
    """Mixes a chunk again; arguments as `forward`.

    Returns:
        out_TNV, and a function of its cotangent and that of the state behind the chunk: it returns the cotangents of
        the operands, those of constants a sum over this device's heads alone, and of the state before the chunk.
    """
    constants, pull_constants = jax.vjp(lambda x: heads.own_constants(x, num_members), operands.constants)
    own = Operands(heads.scatter(operands.heads, num_members), constants)
    (out, _), pull = jax.vjp(lambda operands, state: mixer.mix(operands, state, place), own, state)

    def back(dout_TNV: jax.Array, dstate: Any) -> tuple[Operands, Any]:
        down, dbefore = pull((heads.scatter(dout_TNV, num_members), dstate))
        dheads = heads.gather(down.heads, operands.heads, num_members)
        (dconstants,) = pull_constants(down.constants)
        return Operands(dheads, dconstants), dbefore

    return _all_heads(out, num_members), back


def _all_heads(out: jax.Array, num_members: int) -> jax.Array:
    num_tokens, num_heads, size = out.shape
    like = jax.ShapeDtypeStruct((num_tokens // num_members, num_heads * num_members, size), out.dtype)
    return heads.gather(out, like, num_members)
