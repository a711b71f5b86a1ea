"""Layers of several kinds: a stack of each, and their walk in the order of the model.

Letters: L_k layers of kind k, n_k of them in a part of the model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from sppo_jax.program.fold import Loop, fold, unfold


class LayerStacks(nnx.Module):
    """The layers of a model of several kinds: an attribute of each kind's name is its layers, stacked [L_k, ...]."""

    def __init__(self, stacks: Mapping[str, nnx.Module]):
        """Takes the stack of each kind."""
        self.kinds = tuple(stacks)
        for name, stack in stacks.items():
            setattr(self, name, stack)

    @property
    def penalty(self) -> Any:
        """The penalty of the shares of all layers that return some; None without one."""
        penalties = (getattr(getattr(self, kind), "penalty", None) for kind in self.kinds)
        return next((penalty for penalty in penalties if penalty is not None), None)


def stacks_of(layers: nnx.Module) -> dict[str | None, nnx.Module]:
    """Returns the stack of each kind of a decoder's layers; one under None where all are alike."""
    return {name: getattr(layers, name) for name in layers.kinds} if isinstance(layers, LayerStacks) else {None: layers}


def of_kind(tree: Any, kind: str | None) -> Any:
    """Returns the part of a tree of layers' arrays that belongs to a kind; all of it where all layers are alike."""
    return tree if kind is None else tree[kind]


def scan_layers(
    names: Sequence[str], stacks: Mapping[str, Any], body: Callable[[str, Any, Any], tuple[Any, Any]], carry: Any
) -> tuple[Any, dict[str, Any]]:
    """Applies `body(kind, carry, layer) -> (carry, result)` to all layers in order, repeated parts in scans.

    Args:
        names: the kind of each layer.
        stacks: trees of arrays [L_k, ...] by kind.
        body: runs a layer, whose arrays have no leading dim.
        carry: what goes into the first layer.

    Returns:
        What the last layer carries, and the results of each kind's layers, stacked [L_k, ...].
    """
    return _scan(fold(names), stacks, body, carry)


def _scan(items: tuple, stacks: Mapping[str, Any], body: Callable, carry: Any) -> tuple[Any, dict[str, Any]]:
    taken: Counter[str] = Counter()
    results: dict[str, list] = {}
    for item in items:
        counts = Counter(unfold([item]))
        part = {kind: _cut(stacks[kind], taken[kind], count) for kind, count in counts.items()}
        taken += counts
        if isinstance(item, Loop):
            carry, found = _loop(item, part, body, carry)
        else:
            carry, one = body(item, carry, jax.tree.map(lambda x: x[0], part[item]))
            found = {item: jax.tree.map(lambda x: x[None], one)}
        for kind, result in found.items():
            results.setdefault(kind, []).append(result)
    return carry, {k: jax.tree.map(lambda *xs: jnp.concatenate(xs), *parts) for k, parts in results.items()}


def _cut(stack: Any, begin: int, count: int) -> Any:
    return jax.tree.map(lambda x: x[begin : begin + count], stack)


def _loop(loop: Loop, part: Mapping[str, Any], body: Callable, carry: Any) -> tuple[Any, dict[str, Any]]:
    rows = jax.tree.map(lambda x: x.reshape(loop.count, -1, *x.shape[1:]), dict(part))
    carry, found = jax.lax.scan(lambda c, row: _scan(loop.body, row, body, c), carry, rows)
    return carry, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), found)
