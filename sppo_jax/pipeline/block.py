"""One layer as pure functions of its weights, and the arrays to save so that a backward need not run them again.

Letters: T tokens, D hidden size, N query heads, K key/value heads, H head dim, k choices of a token.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
from flax import nnx

from sppo_jax.attention.mixer import Attention, mixer_of
from sppo_jax.mixers.mixer import Operands


class Weights(NamedTuple):
    """A layer's state: trained parameters, and all other arrays of its module (constants of a user's block)."""

    params: nnx.State
    others: nnx.State


class Projected(NamedTuple):
    """What a layer gives to attention, or its cotangents; `sinks_N` is None for a layer without sinks."""

    q_TNH: jax.Array
    k_TKH: jax.Array
    v_TKH: jax.Array
    sinks_N: jax.Array | None = None


class Block:
    """A layer module taken apart: `before` and `after` attention, as functions that `jax.vjp` can differentiate."""

    def __init__(self, layers: nnx.Module):
        """Takes the stacked layers of a decoder (parameters [L, ...]) or any module with the two methods."""
        for name in ("before_attention", "after_attention"):
            if not callable(getattr(layers, name, None)):
                raise ValueError(
                    f"a layer must have the method {name}, got {type(layers).__name__} without {name}; write the "
                    "method as in "
                    "DecoderLayer"
                )
        self.graphdef, _, self.others = nnx.split(layers, nnx.Param, ...)
        self.penalty = getattr(layers, "penalty", None)
        self.mixer = mixer_of(layers)
        self.chooses = callable(getattr(layers, "choose", None))

    @property
    def has_state(self) -> bool:
        """Whether the layer has a mixer with a state in place of attention."""
        return not isinstance(self.mixer, Attention)

    def _merge(self, weights: Weights):
        return nnx.merge(self.graphdef, weights.params, weights.others)

    def before(self, weights: Weights, x_TD: jax.Array, positions_T: jax.Array) -> Projected | Operands:
        """Returns what attention gets, or a mixer with a state."""
        projected = self._merge(weights).before_attention(x_TD, positions_T)
        return projected if self.has_state else Projected(*projected)

    def choose(self, weights: Weights, x_TD: jax.Array, out_TNH: jax.Array) -> jax.Array | None:
        """Returns integers chosen_Tk, which the backward needs; None for a layer that chooses nothing."""
        return self._merge(weights).choose(x_TD, out_TNH) if self.chooses else None

    def after(self, weights: Weights, x_TD: jax.Array, out_TNH: jax.Array, chosen_Tk: jax.Array | None = None):
        """Returns y_TD, and each token's shares, a tree of arrays [T, ...]: () for a layer that returns none."""
        choices = () if chosen_Tk is None else (chosen_Tk,)
        result = self._merge(weights).after_attention(x_TD, out_TNH, *choices)
        return result if isinstance(result, tuple) else (result, ())

    def vjp_before(self, weights: Weights, x_TD, positions_T):
        """Returns what `before` returns, and the function from its cotangents to those of the parameters and x."""
        return jax.vjp(
            _keep_products(lambda p, x: self.before(weights._replace(params=p), x, positions_T)), weights.params, x_TD
        )

    def vjp_after(self, weights: Weights, x_TD, out_TNH, chosen_Tk=None):
        """Returns (y, shares) and the function from their cotangents to those of the parameters, x and out."""

        def after(params, x, out):
            return self.after(weights._replace(params=params), x, out, chosen_Tk)

        return jax.vjp(_keep_products(after), weights.params, x_TD, out_TNH)


def _keep_products(f: Callable) -> Callable:
    """Makes the vjp of `f` save only matrix products: norms and activations are cheap to recompute and large."""
    # Forward and backward lie in different ticks, so no barrier is needed to keep the compiler from merging them.
    return jax.checkpoint(f, policy=jax.checkpoint_policies.dots_saveable, prevent_cse=False)


class Constant(NamedTuple):
    """A leaf that is the same in every call."""

    value: jax.Array


class Residuals(NamedTuple):
    """How to take a vjp function apart into arrays worth saving, and to put it together again.

    Leaves that are the function's own arguments (weights above all) are not saved, nor are constants such as rotary
    frequencies.

    Args:
        treedef: of the function.
        origin: of each leaf: None where it is saved, the number of an argument, or a `Constant`.
        shapes: of the leaves that are saved.
    """

    treedef: jax.tree_util.PyTreeDef
    origin: tuple
    shapes: tuple

    @classmethod
    def of(cls, vjp: Callable, *args) -> "Residuals":
        """Traces `vjp(*args) -> (outputs, vjp function)` abstractly and finds where the function's leaves come from."""
        found = {}

        def probe(*args):
            _, function = vjp(*args)
            leaves, found["treedef"] = jax.tree.flatten(function)
            flat = jax.tree.leaves(args)
            found["origin"] = tuple(_origin(leaf, flat) for leaf in leaves)
            return [leaf for leaf, source in zip(leaves, found["origin"], strict=True) if source is None]

        shapes = tuple(jax.eval_shape(probe, *args))
        return cls(found["treedef"], found["origin"], shapes)

    def take(self, function: Callable) -> list[jax.Array]:
        """Returns the leaves to save."""
        leaves = jax.tree.leaves(function)
        assert len(leaves) == len(self.origin), "a layer must trace the same way each time"
        return [leaf for leaf, source in zip(leaves, self.origin, strict=True) if source is None]

    def restore(self, saved: list[jax.Array], *args) -> Callable:
        """Rebuilds the vjp function from saved leaves and the same arguments."""
        flat, rest = jax.tree.leaves(args), iter(saved)

        def leaf(source):
            if isinstance(source, Constant):
                return source.value
            return next(rest) if source is None else flat[source]

        return jax.tree.unflatten(self.treedef, [leaf(source) for source in self.origin])


def _origin(leaf, arguments: list) -> "int | Constant | None":
    if not isinstance(leaf, jax.core.Tracer):
        return Constant(leaf)
    return next((number for number, argument in enumerate(arguments) if argument is leaf), None)
