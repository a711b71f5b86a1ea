"""Layers of several types: a stack of each, and their walk in the order of the model.

Letters: L_k layers of type k, L_s layers of stack s.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from sppo_jax.program.fold import Loop, fold, unfold


class LayerStacks(nnx.Module):
    """The layers of a model of several types: an attribute of each stack's name is its layers, [L_s, ...], in order.

    Kinds whose parameters have one shape share a stack (`ModelConfig.stacks`): a group of layers may have any of them.
    """

    def __init__(self, stacks: Mapping[str, Mapping[str, nnx.Module]], names: Sequence[str]):
        """Joins the layers of the types of each stack.

        Args:
            stacks: of each stack's name the layers of each of its types, [L_k, ...].
            names: the type of each layer of the model.

        Raises:
            ValueError: types that share a stack have other parameters.
        """
        graphs = {}
        for name, of_types in stacks.items():
            stack, found = _joined(name, of_types, [layer_type for layer_type in names if layer_type in of_types])
            setattr(self, name, stack)
            graphs |= {layer_type: (name, graph) for layer_type, graph in found.items()}
        self.graphs = _Graphs(tuple(graphs.items()))

    @property
    def penalty(self) -> Any:
        """The penalty of the shares of all layers that return some; None without one."""
        penalties = (getattr(stack, "penalty", None) for stack in stacks_of(self).values())
        return next((penalty for penalty in penalties if penalty is not None), None)


@dataclass(frozen=True)
class _Graphs:
    """Of each type its stack's name, and the module of its layers without arrays; hashable, as a jit asks."""

    items: tuple[tuple[str, tuple[str, nnx.GraphDef]], ...]


def _joined(
    name: str, of_types: Mapping[str, nnx.Module], order: Sequence[str]
) -> tuple[nnx.Module, dict[str, nnx.GraphDef]]:
    """Returns the layers of some types as one module, in the order of the model; and the graph of each type."""
    graphs, states = {}, []
    for layer_type, layers in of_types.items():
        graphs[layer_type], state = nnx.split(layers)
        states.append(state)
    if len(states) == 1:
        return next(iter(of_types.values())), graphs
    shapes = [jax.tree.map(lambda x: x.shape[1:], state) for state in states]
    if any(other != shapes[0] for other in shapes[1:]):
        raise ValueError(
            f"layer types that differ in their window or rotation alone must have parameters of one shape, got "
            f"other ones in {', '.join(of_types)} ({name}); let no shape depend on the window or the rotation"
        )
    # The layers of a type begin behind those of the types before.
    first = dict(zip(of_types, np.cumsum([0, *(order.count(layer_type) for layer_type in of_types)]), strict=False))
    passed: Counter[str] = Counter()
    rows = []
    for layer_type in order:
        rows.append(int(first[layer_type]) + passed[layer_type])
        passed[layer_type] += 1
    state = jax.tree.map(lambda *xs: jnp.concatenate(xs)[np.array(rows)], *states)
    return nnx.merge(next(iter(graphs.values())), state), graphs


def stacks_of(layers: nnx.Module) -> dict[str | None, nnx.Module]:
    """Returns for each type of a decoder's layers a module of the type with all layers of its stack.

    One under None where all layers are alike.
    """
    if not isinstance(layers, LayerStacks):
        return {None: layers}
    states = {name: nnx.state(getattr(layers, name)) for _, (name, _) in layers.graphs.items}
    return {layer_type: nnx.merge(graph, states[name]) for layer_type, (name, graph) in layers.graphs.items}


def stack_names(layers: nnx.Module) -> dict[str | None, str | None]:
    """Returns the name of the stack of each type of a decoder's layers; None under None where all are alike."""
    if not isinstance(layers, LayerStacks):
        return {None: None}
    return {layer_type: name for layer_type, (name, _) in layers.graphs.items}


def of_stack(tree: Any, name: str | None) -> Any:
    """Returns the part of a tree of layers' arrays that belongs to a stack; all of it where all layers are alike."""
    return tree if name is None else tree[name]


def scan_layers(
    names: Sequence[str],
    stacks: Mapping[str, Any],
    stack_of: Mapping[str, str],
    body: Callable[[str, Any, Any], tuple[Any, Any]],
    carry: Any,
) -> tuple[Any, dict[str, Any]]:
    """Applies `body(layer_type, carry, layer) -> (carry, result)` to all layers in order, repeated parts in scans.

    Args:
        names: the type of each layer.
        stacks: trees of arrays [L_s, ...] by the name of the stack.
        stack_of: the name of the stack of each type.
        body: runs a layer, whose arrays have no leading dim.
        carry: what goes into the first layer.

    Returns:
        What the last layer carries, and the results of each stack's layers, stacked [L_s, ...].
    """
    return _scan(fold(names), stacks, stack_of, body, carry)


def _scan(items: tuple, stacks: Mapping[str, Any], stack_of: Mapping[str, str], body: Callable, carry: Any):
    taken: Counter[str] = Counter()
    results: dict[str, list] = {}
    for item in items:
        counts = Counter(stack_of[layer_type] for layer_type in unfold([item]))
        part = {name: _cut(stacks[name], taken[name], count) for name, count in counts.items()}
        taken += counts
        if isinstance(item, Loop):
            carry, found = _loop(item, part, stack_of, body, carry)
        else:
            name = stack_of[item]
            carry, one = body(item, carry, jax.tree.map(lambda x: x[0], part[name]))
            found = {name: jax.tree.map(lambda x: x[None], one)}
        for name, result in found.items():
            results.setdefault(name, []).append(result)
    return carry, {k: jax.tree.map(lambda *xs: jnp.concatenate(xs), *parts) for k, parts in results.items()}


def _cut(stack: Any, begin: int, count: int) -> Any:
    return jax.tree.map(lambda x: x[begin : begin + count], stack)


def _loop(loop: Loop, part: Mapping[str, Any], stack_of: Mapping[str, str], body: Callable, carry: Any):
    rows = jax.tree.map(lambda x: x.reshape(loop.count, -1, *x.shape[1:]), dict(part))
    carry, found = jax.lax.scan(lambda c, row: _scan(loop.body, row, stack_of, body, c), carry, rows)
    return carry, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), found)
