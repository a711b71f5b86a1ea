"""The types of a group's layers: one after another in nested scans, each layer with its number among those of its type.

A type is a name, or None where all layers are alike. Two groups of one stage may have other types, of as many layers of
each stack.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from sppo_jax.arrays import buffers
from sppo_jax.models.stacks import stacks_of
from sppo_jax.pipeline.block import Block
from sppo_jax.program.fold import Loop, fold, unfold

Number = jax.Array | int


@dataclass(frozen=True)
class At:
    """A layer of a group.

    Args:
        layer_type: its type.
        before: how many layers of each type come before it.
        is_first: whether it surely runs before all others, so that what it works on comes from outside the group.
    """

    layer_type: str | None
    before: Mapping[str | None, Number] = field(default_factory=lambda: {None: 0})
    is_first: bool = False

    def among(self, layer_types: Sequence[str | None]) -> Number:
        """Returns the layer's number among those of some types."""
        return reduce(_plus, (self.before[layer_type] for layer_type in layer_types if layer_type in self.before))


# Where something of the group as a whole lies.
WHOLE = At(None)


def blocks_of(layers: nnx.Module) -> dict[str | None, Block]:
    """Returns the block of each type of a decoder's layers."""
    return {layer_type: Block(stack) for layer_type, stack in stacks_of(layers).items()}


def others_of(blocks: Mapping[str | None, Block], stacks: Mapping[str | None, str | None]) -> Any:
    """Returns the arrays of all blocks that are no parameters, by stack; `stacks` has the stack of each type."""
    others = {stacks[layer_type]: block.others for layer_type, block in blocks.items()}
    return others[None] if None in others else others


def with_part(tree: Any, stack: str | None, part: Any) -> Any:
    """Returns a tree of layers' arrays with another part for a stack; `models.stacks.of_stack` reads it."""
    if stack is None:
        return part
    leaves = iter(jax.tree.leaves(part))
    return jax.tree_util.tree_map_with_path(lambda path, x: next(leaves) if path[0].key == stack else x, tree)


def run_layers(layer_types: Sequence[str | None], body: Callable, carry, held=None, *, backward: bool = False):
    """Applies `body(carry, at)` to the layers of a group; `held` is held back until the last one.

    The whole scan can overlap a copy started before the scan: the barrier keeps the compiler from starting it
    later, and the last layer by itself keeps the barrier from being the last thing. One layer alone has no scan, and
    `held` is held back until its end.

    Args:
        layer_types: of each layer.
        body: runs a layer.
        carry: a tuple.
        held: a tree of arrays.
        backward: whether the last layer comes first.

    Returns:
        the carry and `held`.
    """
    order = tuple(reversed(layer_types)) if backward else tuple(layer_types)
    walk = _Walk(body, Counter(layer_types) if backward else None)
    if held is not None and len(order) == 1:
        first, *rest = body(carry, walk.at(order[0], {order[0]: jnp.int32(0)}))
        first, held = lax.optimization_barrier((first, held))
        return (first, *rest), held
    ahead = order if held is None else order[:-1]
    if ahead:
        # A layer by itself is no loop among others, so that it is known to be the first.
        items = fold(ahead) if len(set(order)) > 1 else (Loop(len(ahead), ahead[:1]),)
        carry = walk.run(items, carry, dict.fromkeys(order, 0))
    if held is not None:
        # The last layer's number goes through the barriers too, or its recomputation is hoisted before them.
        first, *rest = carry
        first, last, held = buffers.hold(first, jnp.int32(len(ahead)), held)
        done: dict[str | None, Number] = dict(Counter(ahead))
        done[order[-1]] = last if len(set(order)) == 1 else last - (len(ahead) - done.get(order[-1], 0))
        carry = body((first, *rest), walk.at(order[-1], done))
    return carry, held


class _Walk:
    """A walk over layers.

    Args:
        body: runs a layer.
        totals: layers of each type, where the walk is backward.
    """

    def __init__(self, body: Callable, totals: Mapping[str | None, int] | None):
        self.body, self.totals = body, totals

    def at(self, layer_type: str | None, done: Mapping[str | None, Number]) -> At:
        """Returns the layer of a type that comes after so many layers of each type."""
        is_first = all(isinstance(number, int) and not number for number in done.values())
        if self.totals is None:
            return At(layer_type, done, is_first)
        return At(layer_type, {k: self.totals[k] - (k == layer_type) - number for k, number in done.items()}, is_first)

    def run(self, items: tuple, carry, done: Mapping[str | None, Number]):
        """Runs the layers of folded items, behind those that are done."""
        passed: Counter[str | None] = Counter()
        for item in items:
            here = {layer_type: _plus(number, passed[layer_type]) for layer_type, number in done.items()}
            counts = Counter(unfold([item]))
            if isinstance(item, Loop):

                def iteration(carry, turn, item=item, here=here, counts=counts):
                    moved = {one: _plus(x, _times(turn, counts[one] // item.count)) for one, x in here.items()}
                    return self.run(item.body, carry, moved), None

                carry, _ = lax.scan(iteration, carry, jnp.arange(item.count, dtype=jnp.int32))
            else:
                carry = self.body(carry, self.at(item, here))
            passed += counts
        return carry


def _plus(a: Number, b: Number) -> Number:
    """Returns a sum; a 0 that is known adds no operation."""
    if isinstance(a, int) and a == 0:
        return b
    return a if isinstance(b, int) and b == 0 else a + b


def _times(turn: jax.Array, each: int) -> Number:
    return turn * each if each > 1 else turn if each else 0
