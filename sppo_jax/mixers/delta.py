"""The mixer of a Gated DeltaNet layer: a short convolution of queries, keys and values, then the gated delta rule.

Letters: T tokens, G key heads, N value heads, K key size, V value size, W taps of the convolution.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sppo_jax.arrays.dtypes import accumulator
from sppo_jax.mixers import gated_delta
from sppo_jax.mixers.convolution import convolve
from sppo_jax.mixers.delta_work import Cut, cut_of, delta_flops
from sppo_jax.mixers.mixer import Operands, TokenRun

# Added to the square of a key's length, as in the models' own code.
_EPS = 1e-6


class Heads(NamedTuple):
    """What the rule reads of each token, before the convolution; N is a multiple of G.

    Args:
        q: [T, G, K].
        k: [T, G, K].
        v: [T, N, V].
        g: [T, N], logarithm of the decay, at least float32.
        b: [T, N], at least float32.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    g: jax.Array
    b: jax.Array


class Taps(NamedTuple):
    """The convolution's taps of each channel: q, k [G, K, W], v [N, V, W]."""

    q: jax.Array
    k: jax.Array
    v: jax.Array


class State(NamedTuple):
    """What a run hands to the next one: the last W - 1 tokens, and the memory of the rule.

    Args:
        q: [G, W - 1, K].
        k: [G, W - 1, K].
        v: [N, W - 1, V].
        memory: [N, K, V], at least float32.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    memory: jax.Array


@dataclass(frozen=True)
class GatedDelta:
    """Gated DeltaNet's mixer; operands are `Heads` and, as constants, `Taps`.

    Args:
        reach: tokens before a run whose documents it needs: one less than there are taps, and at least 1.
    """

    reach: int = 3

    def empty_state(self, operands: Operands) -> State:
        """Returns the state before a sequence, all zeros."""
        heads, taps = Heads(*operands.heads), Taps(*operands.constants)

        def tail(x: jax.Array, taps: jax.Array) -> jax.Array:
            return jnp.zeros((x.shape[1], taps.shape[-1] - 1, x.shape[2]), x.dtype)

        memory = (*heads.v.shape[1:2], heads.k.shape[2], heads.v.shape[2])
        tails = (tail(x, of) for x, of in zip(heads[:3], taps, strict=True))
        return State(*tails, jnp.zeros(memory, accumulator(heads.v.dtype)))

    def mix(self, operands: Operands, state: State, place: TokenRun) -> tuple[jax.Array, State]:
        """Returns out_TNV in the dtype of v, zero for padding, and the state behind the run."""
        heads, state = Heads(*operands.heads), State(*state)
        length, num_heads, value = heads.v.shape
        cut = cut_of(length, num_heads * max(heads.k.shape[2], value))
        run = jax.checkpoint(partial(_mix_stretch, spans=cut.spans), prevent_cse=False)
        # So the gradients of taps are summed over stretches in this dtype too.
        taps = Taps(*(x.astype(state.memory.dtype) for x in operands.constants))

        def next_stretch(state: State, stretch: tuple[Heads, TokenRun]) -> tuple[State, jax.Array]:
            out, state = run(stretch[0], taps, state, stretch[1])
            return state, out

        state, out = lax.scan(next_stretch, state, _stretches(heads, place, cut))
        return out.reshape(-1, num_heads, value)[:length], state

    def flops_per_token(self, operands: Operands) -> float:
        """Returns the FLOPs of a token in the recurrence, forward, and in the convolution."""
        heads, taps = Heads(*operands.heads), Taps(*operands.constants)
        (_, key_heads, key_size), (_, value_heads, value_size) = heads.k.shape, heads.v.shape
        return delta_flops(key_heads, value_heads, key_size, value_size, taps.k.shape[-1])


def _stretches(heads: Heads, place: TokenRun, cut: Cut) -> tuple[Heads, TokenRun]:
    """Cuts a run into stretches, [stretches, tokens, ...]; what is behind the run is padding."""
    room = cut.stretches * cut.tokens - place.documents_T.shape[0]

    def fit(x: jax.Array, fill: int = 0) -> jax.Array:
        x = jnp.pad(x, ((0, room),) + ((0, 0),) * (x.ndim - 1), constant_values=fill) if room else x
        return x.reshape(cut.stretches, cut.tokens, *x.shape[1:])

    starts = cut.tokens * jnp.arange(cut.stretches, dtype=jnp.int32)
    wide_T = jnp.concatenate([place.before_W, place.documents_T])
    # Documents behind padding are padding too: a stretch that begins there has no real token, and reads none of them.
    before = wide_T[starts[:, None] + jnp.arange(place.before_W.shape[0], dtype=jnp.int32)]
    num_real = jnp.clip(jnp.asarray(place.num_real, jnp.int32) - starts, 0, cut.tokens)
    return Heads(*map(fit, heads)), TokenRun(fit(place.documents_T, -1), before, num_real)


def _mix_stretch(heads: Heads, taps: Taps, state: State, place: TokenRun, *, spans: int) -> tuple[jax.Array, State]:
    """Runs convolution and rule over one stretch."""
    triples = zip(heads[:3], state[:3], taps, strict=True)
    (q, q_tail), (k, k_tail), (v, v_tail) = (convolve(x, tail, of, place) for x, tail, of in triples)
    wide = state.memory.dtype
    times = heads.v.shape[1] // heads.k.shape[1]
    # Queries and keys are of the models' own dtype between convolution and rule.
    q, k, v = (jax.nn.silu(x).astype(heads.v.dtype) for x in (q, k, v))
    # Without the barrier XLA for GPUs fuses convolution and norm into each of the products that read them, and looks
    # for tiles of these fusions for most of its time.
    q, k, v = lax.optimization_barrier((_of_length_one(q.astype(wide)), _of_length_one(k.astype(wide)), v))
    q, k = (jnp.repeat(x, times, axis=1) for x in (q, k))
    tokens = gated_delta.Tokens(
        q * heads.k.shape[2] ** -0.5, k, v.astype(wide), heads.g.astype(wide), heads.b.astype(wide)
    )
    out, memory = gated_delta.run(tokens, place.documents_T, place.before_W[-1], state.memory, spans)
    return out.astype(heads.v.dtype), State(q_tail, k_tail, v_tail, memory)


def _of_length_one(x: jax.Array) -> jax.Array:
    return x * lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + _EPS)
