"""Whether a user's block keeps the contract of a layer, tried on two tokens when it is first used.

Chunks, stages and devices each see a part of the tokens, and a layer's methods run again in the backward. So each token
goes through `before_attention` and `after_attention` by itself, in the compute dtype, the same way every time.

Letters: T tokens, D hidden size, N query heads, K key/value heads, H head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from sppo_jax.mixers.mixer import Operands
from sppo_jax.pipeline.block import Block, Weights
from sppo_jax.pipeline.probe.mixer import NUM_TOKENS, check_mixer
from sppo_jax.pipeline.probe.refusal import close, refuse, shape_text

# Positions of the two tokens: far from each other, and not those that a method could number by itself.
_POSITIONS = (5, 3)


def check_block(layers: nnx.Module, model: nnx.Module) -> None:
    """Checks that the methods of layers of one type fit the pipeline.

    Args:
        layers: the stacked layers, of whose parameters the shapes alone count; values are drawn for one layer.
        model: their `Decoder`.

    Raises:
        ValueError: the methods mix tokens, draw random numbers, keep state, or give other dtypes or widths.
    """
    block, name, dtype = Block(layers), type(layers).__name__, model.dtype
    hidden_size = model.embedding.get_value().shape[1]
    with jax.ensure_compile_time_eval():
        weights = Weights(_first_layer(nnx.state(layers, nnx.Param)), _first_layer(block.others))
        x_TD = _noise(0, (2, hidden_size), dtype)
        positions_T = jnp.asarray(_POSITIONS, jnp.int32)
        if block.has_state:
            of_mixer = _noise(3, (NUM_TOKENS, hidden_size), dtype), jnp.arange(NUM_TOKENS, dtype=jnp.int32)
            out = check_mixer(block, weights, *of_mixer, name)
            like = jax.ShapeDtypeStruct((2, *out.shape[1:]), out.dtype)
        else:
            like = _check_attention(block, weights, x_TD, positions_T, name)
        _check_after(block, weights, x_TD, like, name)
        _check_state(block, weights, x_TD, positions_T, like, name)
        out_TNH = _noise(1, like.shape, like.dtype)
        before, after = jax.jit(partial(_before, block)), jax.jit(partial(_after, block))
        _check_tokens(f"{name}.before_attention", partial(before, weights), x_TD, positions_T, dtype)
        _check_tokens(f"{name}.after_attention", partial(after, weights), x_TD, out_TNH, dtype)


def _first_layer(state: nnx.State) -> nnx.State:
    """Returns one layer's arrays; draws random ones where the state has only shapes."""

    def take(leaf):
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf[0]
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return jnp.zeros(leaf.shape[1:], leaf.dtype)
        # Matrices whose products stay near 1.
        fan_in = leaf.shape[1] if len(leaf.shape) > 2 else 1
        return _noise(2, leaf.shape[1:], leaf.dtype, fan_in**-0.5)

    return jax.tree.map(take, state)


def _noise(seed: int, shape: tuple[int, ...], dtype, scale: float = 1.0) -> jax.Array:
    # Of numpy: jax would compile a generator for each shape.
    return jnp.asarray(scale * np.random.default_rng(seed).normal(size=shape), dtype)


def _check_attention(block: Block, weights: Weights, x_TD, positions_T, name: str) -> jax.ShapeDtypeStruct:
    """Checks widths and dtypes of what attention gets; returns the shape of what it gives."""
    q, k, v, sinks = jax.eval_shape(block.before, weights, x_TD, positions_T)
    size, dtype = x_TD.shape, x_TD.dtype
    for what, got in (("q", q), ("k", k), ("v", v)):
        if len(got.shape) != 3 or got.shape[0] != size[0] or got.shape[2] != q.shape[-1]:
            refuse(
                f"{name}.before_attention must return {what} as [tokens, heads, size]",
                shape_text(got),
                f"reshape {what}",
            )
        if got.dtype != dtype:
            refuse(
                f"{name}.before_attention must return {what} in the compute dtype {dtype}",
                shape_text(got),
                f"cast {what}",
            )
    if k.shape != v.shape or q.shape[1] % k.shape[1]:
        heads = f"{q.shape[1]}, {k.shape[1]} and {v.shape[1]}"
        rule = f"{name}.before_attention must return as many heads for k as for v, and a multiple of this number for q"
        refuse(rule, f"heads of q, k and v: {heads}", "change the heads")
    if sinks is not None and sinks.shape != (q.shape[1],):
        rule = f"{name}.before_attention must return sinks as one score for each of the {q.shape[1]} heads of q"
        refuse(rule, shape_text(sinks), "return them as the fourth result, or return q, k and v alone")
    return q


def _check_after(block: Block, weights: Weights, x_TD, out_TNH, name: str) -> None:
    """Checks widths and dtypes of what the last method returns."""
    size, dtype = x_TD.shape, x_TD.dtype
    y, shares = jax.eval_shape(partial(_after, block), weights, x_TD, out_TNH)
    if y.shape != size or y.dtype != dtype:
        rule = f"{name}.after_attention must return the next layer's input, {list(size)} in {dtype}"
        refuse(rule, shape_text(y), "project or cast the result")
    for share in jax.tree.leaves(shares):
        if share.shape[:1] != size[:1] or not jnp.issubdtype(share.dtype, jnp.floating):
            rule = f"{name}.after_attention must return shares as floating-point arrays [tokens, ...]"
            refuse(rule, shape_text(share), "return a share for each token")


def _before(block: Block, weights: Weights, x_TD: jax.Array, positions_T: jax.Array):
    """Returns what `before_attention` returns of each token."""
    projected = block.before(weights, x_TD, positions_T)
    return projected.heads if isinstance(projected, Operands) else projected


def _after(block: Block, weights: Weights, x_TD: jax.Array, out_TNH: jax.Array):
    """Returns what `after_attention` returns where a layer that chooses has chosen first."""
    return block.after(weights, x_TD, out_TNH, block.choose(weights, x_TD, out_TNH))


def _check_state(block: Block, weights: Weights, x_TD, positions_T, out_TNH, name: str) -> None:
    """Checks that the methods change nothing in their module: neither counters of random keys nor statistics."""
    found: dict[str, bool] = {}

    def run(weights, x_TD, positions_T, out_TNH):
        layer = nnx.merge(block.graphdef, weights.params, weights.others, copy=True)
        before = jax.tree.leaves(nnx.state(layer))
        layer.before_attention(x_TD, positions_T)
        choices = (layer.choose(x_TD, out_TNH),) if block.chooses else ()
        layer.after_attention(x_TD, out_TNH, *choices)
        state = nnx.state(layer)
        after, variables = jax.tree.leaves(state), jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, nnx.Variable))
        found["same"] = len(after) == len(before) and all(new is old for new, old in zip(after, before, strict=True))
        found["random"] = any(isinstance(variable, nnx.RngState) for variable in variables)

    jax.eval_shape(run, weights, x_TD, positions_T, out_TNH)
    if not found["same"]:
        refuse(
            f"{name} must do the same to a token every time, because the backward runs the methods again",
            "a layer that draws random numbers" if found["random"] else "a layer that changes its own state",
            "remove the random numbers (dropout: deterministic=True)" if found["random"] else "remove the state",
        )


def _check_tokens(what: str, method: Callable[..., Any], x_TD, other_T, dtype) -> None:
    """Checks that a token's result does not depend on the token beside it."""
    together = _rows(method(x_TD, other_T), 0)
    alone = _rows(method(x_TD[:1], other_T[:1]), 0)
    beside_another = _rows(method(x_TD.at[1].multiply(-3), other_T.at[1].multiply(2)), 0)
    is_close = all(close(a, b, dtype) for a, b in zip(together, alone, strict=True))
    # The same sizes are computed in the same order: here nothing is rounded differently.
    same = all(np.array_equal(a, b, equal_nan=True) for a, b in zip(together, beside_another, strict=True))
    if not (is_close and same):
        refuse(
            f"{what} must treat every token by itself, because a device sees only some of the tokens",
            "a result for a token that depends on the tokens next to it",
            "mix tokens only in attention",
        )


def _rows(results: Any, row: int) -> list[np.ndarray]:
    return [np.asarray(x[row]).astype(np.float64) for x in jax.tree.leaves(results)]
