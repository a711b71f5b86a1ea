"""Whether a layer's mixer with a state keeps its contract, tried on a few tokens when the layer is first used.

A sequence comes in chunks, which end in padding; the devices of a stage share the heads; and documents lie one behind
the other. So the mixer runs in two parts, for each share of the heads, and beside other documents and padding.

Letters: T tokens, D hidden size, N heads, V size of a head's output.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sppo_jax.mixers.mixer import Operands, StateMixer, TokenRun
from sppo_jax.pipeline.block import Block, Weights
from sppo_jax.pipeline.probe.refusal import close, refuse, shape_text

# Documents of a few tokens, which are cut in the middle: within a document, at its end, and a token behind it.
_DOCUMENTS = ((0, 0, 0, 0, 0, 1, 1, 1), (0, 0, 0, 0, 1, 1, 1, 1), (0, 0, 0, 1, 1, 1, 1, 2))
NUM_TOKENS = len(_DOCUMENTS[0])
_HALF = NUM_TOKENS // 2


class _Tried(NamedTuple):
    """A mixer on a few tokens: `run(operands, state, place)` is its jitted `mix`."""

    mixer: StateMixer
    run: Any
    operands: Operands
    name: str
    dtype: Any

    def mix(self, operands: Operands, documents: Any, before: Any = (), state: Any = None):
        """Returns out and state as numpy arrays; `before` are documents of the tokens before."""
        reach = self.mixer.reach
        before_W = np.concatenate([np.full(reach, -1), np.asarray(before, int)])[len(before) :][:reach]
        place = TokenRun(*(np.asarray(x, np.int32) for x in (documents, before_W, np.sum(np.asarray(documents) >= 0))))
        state = self.mixer.empty_state(operands) if state is None else state
        # Arrays of numpy: each operation of jax outside of the jit would be compiled by itself.
        return jax.tree.map(np.asarray, self.run(operands, state, place))

    def check(self, rule: str, got: Any, want: Any, change: str) -> None:
        """Checks that two trees of arrays are the same but for rounding."""
        pairs = zip(*map(jax.tree.leaves, (got, want)), strict=True)
        if not all(close(*(x.astype(np.float64) for x in pair), self.dtype) for pair in pairs):
            refuse(f"{self.name}.mix {rule}", "another output or state", change)


def check_mixer(block: Block, weights: Weights, x_TD: jax.Array, positions_T: jax.Array, name: str) -> jax.Array:
    """Checks a layer's mixer with a state.

    Args:
        block: the layer.
        weights: its arrays.
        x_TD: inputs of `NUM_TOKENS` tokens.
        positions_T: their positions.
        name: the layer's class.

    Returns:
        out_TNV of the mixer.

    Raises:
        ValueError: the operands have other shapes, or the mixer breaks a rule of `mixers.mixer.StateMixer`.
    """
    mixer = block.mixer
    if not isinstance(mixer, StateMixer) or not isinstance(mixer.reach, int) or mixer.reach < 0:
        refuse(
            f"the mixer of {name} must be an Attention, or have empty_state, mix, flops_per_token and a whole reach",
            f"a {type(mixer).__name__}",
            "write it as in sppo_jax.mixers.mixer.StateMixer",
        )
    _check_operands(jax.eval_shape(block.before, weights, x_TD, positions_T), name)
    operands = jax.tree.map(np.asarray, jax.jit(block.before)(weights, x_TD, positions_T))
    tried = _Tried(mixer, jax.jit(mixer.mix), operands, type(mixer).__name__, x_TD.dtype)
    documents = [0] * NUM_TOKENS
    out, _ = tried.mix(operands, documents)
    _check_out(out, operands, tried)
    for parts in _DOCUMENTS:
        _check_parts(tried, parts)
    _check_documents(tried)
    _check_padding(tried)
    _check_heads(tried, out.shape[1])
    return out


def _check_operands(operands: Any, name: str) -> None:
    what = f"{name}.before_attention must return Operands for a mixer with a state"
    if not isinstance(operands, Operands):
        refuse(what, f"a {type(operands).__name__}", "return Operands(heads, constants)")
    for leaf in jax.tree.leaves(operands.heads):
        if leaf.ndim < 2 or leaf.shape[0] != NUM_TOKENS or not jnp.issubdtype(leaf.dtype, jnp.floating):
            refuse(f"{what}, with heads as floating-point arrays [tokens, heads, ...]", shape_text(leaf), "reshape it")
    for leaf in jax.tree.leaves(operands.constants):
        if leaf.ndim < 1 or not jnp.issubdtype(leaf.dtype, jnp.floating):
            refuse(f"{what}, with constants as floating-point arrays [heads, ...]", shape_text(leaf), "reshape it")


def _check_out(out: np.ndarray, operands: Operands, tried: _Tried) -> None:
    if len(out.shape) != 3 or out.shape[0] != NUM_TOKENS:
        refuse(f"{tried.name}.mix must return its output as [tokens, heads, size]", shape_text(out), "reshape it")
    counts = [x.shape[1] for x in jax.tree.leaves(operands.heads)]
    counts += [x.shape[0] for x in jax.tree.leaves(operands.constants)]
    if any(out.shape[1] % count for count in counts):
        rule = f"the {out.shape[1]} heads of {tried.name}'s output must be a multiple of the heads of each operand"
        refuse(rule, f"{sorted(set(counts))}", "change the heads")


def _cut(operands: Operands, begin: int, end: int) -> Operands:
    return operands._replace(heads=jax.tree.map(lambda x: x[begin:end], operands.heads))


def _check_parts(tried: _Tried, documents: tuple[int, ...]) -> None:
    first, second = _cut(tried.operands, 0, _HALF), _cut(tried.operands, _HALF, NUM_TOKENS)
    out_a, state = tried.mix(first, documents[:_HALF])
    out_b, state = tried.mix(second, documents[_HALF:], documents[:_HALF], state)
    whole = tried.mix(tried.operands, documents)
    rule = "must give in two parts what it gives as a whole, because a sequence comes in chunks"
    tried.check(
        rule,
        (np.concatenate([out_a, out_b]), state),
        whole,
        "keep in the state what later tokens need of earlier ones",
    )


def _check_documents(tried: _Tried) -> None:
    """Checks that a document sees nothing of the one before it, in one part with it or in the next."""
    for documents in _DOCUMENTS:
        own = np.asarray(documents) > 0
        others = _scaled(tried.operands, np.where(own, 1, -3))
        rule, change = "must keep documents apart", "let a token see the state and the tokens of its own document alone"
        outs = [tried.mix(x, documents)[0][own] for x in (tried.operands, others)]
        tried.check(rule, *outs, change)


def _check_padding(tried: _Tried) -> None:
    real = np.arange(NUM_TOKENS) < _HALF
    documents = np.where(real, 0, -1)
    padded = tried.mix(_scaled(tried.operands, np.where(real, 1, -3)), documents)
    out, state = tried.mix(_cut(tried.operands, 0, _HALF), documents[:_HALF])
    rule = "must let padding change nothing and give it zeros, because a chunk may be shorter than its tick"
    want = np.concatenate([out, np.zeros_like(padded[0][_HALF:])]), state
    tried.check(rule, padded, want, "read Place.num_real")


def _check_heads(tried: _Tried, num_heads: int) -> None:
    """Checks each head alone, and shares of some heads."""
    documents = [0] * NUM_TOKENS
    out, state = tried.mix(tried.operands, documents)
    rule = "must give each share of the heads what it gives to all, because devices share the heads"
    for members in {num_heads, *(2,) * (num_heads % 2 == 0)} - {1}:
        shares = [tried.mix(_share(tried.operands, member, members), documents) for member in range(members)]
        outs, states = zip(*shares, strict=True)
        # Heads that several shares have lie in each of their states.
        joined = jax.tree.map(lambda whole, *parts: _joined(whole, parts), state, *states)
        got = np.concatenate(outs, axis=1), joined
        tried.check(rule, got, (out, state), "mix no heads, and read their number from the operands")


def _share(operands: Operands, member: int, num_members: int) -> Operands:
    """Returns a member's share of the heads, as `mixers.heads` gives it."""

    def cut(x: np.ndarray, dim: int) -> np.ndarray:
        x = np.repeat(x, math.lcm(x.shape[dim], num_members) // x.shape[dim], axis=dim)
        return np.split(x, num_members, axis=dim)[member]

    return Operands(*(jax.tree.map(partial(cut, dim=dim), tree) for tree, dim in zip(operands, (1, 0), strict=True)))


def _joined(whole: np.ndarray, parts: tuple[np.ndarray, ...]) -> np.ndarray:
    joined = np.concatenate(parts)
    return joined if joined.shape == whole.shape else whole


def _scaled(operands: Operands, factor_T: np.ndarray) -> Operands:
    def scale(x):
        return (x * factor_T.reshape(-1, *[1] * (x.ndim - 1))).astype(x.dtype)

    return operands._replace(heads=jax.tree.map(scale, operands.heads))
