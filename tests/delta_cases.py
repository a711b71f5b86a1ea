"""The gated delta rule token by token, the convolution tap by tap, and what their tests share."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sppo_jax.mixers.delta import Heads, State, Taps
from sppo_jax.mixers.mixer import Operands, TokenRun


@dataclass(frozen=True)
class Total:
    """A mixer of a user's own: the sum of a document's values so far; heads are an array [T, N, V]."""

    reach: int = 1

    def empty_state(self, operands):
        _, heads, size = operands.heads.shape
        return jnp.zeros((heads, size), operands.heads.dtype)

    def mix(self, operands, state, place):
        is_real = (place.documents_T >= 0)[:, None, None]
        values = jnp.where(is_real, operands.heads, 0)
        of = jnp.concatenate([place.before_W[-1:], place.documents_T])
        of = lax.cummax(of)
        same = jnp.tril(of[1:, None] == of[None, 1:])
        out = jnp.einsum("ts,snv->tnv", same.astype(values.dtype), values)
        out = out + jnp.where((of[1:] == of[0])[:, None, None], state, 0)
        return jnp.where(is_real, out, 0), out[-1]

    def flops_per_token(self, operands):
        return 0.0


def sequential(tokens, documents_T, before, state_NKV):
    """The definition of the rule, token by token."""

    def step(carry, one):
        state, seen = carry
        q, k, v, g, b, document = one
        start = jnp.where(document == seen, state, 0) * jnp.exp(g)[:, None, None]
        wrong = v - jnp.einsum("nkv,nk->nv", start, k)
        after = start + jnp.einsum("nk,nv->nkv", k, b[:, None] * wrong)
        out = jnp.einsum("nkv,nk->nv", after, q)
        real = document >= 0
        return (jnp.where(real, after, state), jnp.where(real, document, seen)), jnp.where(real, out, 0)

    seen = jnp.asarray(before, jnp.int32)
    (state, _), out = lax.scan(step, (state_NKV, seen), (*tokens, documents_T))
    return out, state


def plain_mix(operands, state, place):
    """The whole mixer from definitions: taps that are looked up, then the rule token by token.

    Args:
        operands, state, place: as `GatedDelta.mix` takes them.

    Returns:
        The output, and the state behind the run.
    """
    heads, taps = Heads(*operands.heads), Taps(*operands.constants)

    reach = taps.q.shape[-1] - 1
    wides = [jnp.concatenate([jnp.moveaxis(tail, 1, 0), x]) for tail, x in zip(state[:3], heads[:3], strict=True)]
    tails = (jnp.moveaxis(lax.dynamic_slice_in_dim(wide, place.num_real, reach), 0, 1) for wide in wides)

    def convolved(x, wide, taps):
        of = jnp.concatenate([place.before_W[place.before_W.shape[0] - reach :], place.documents_T])
        tokens, total = np.arange(x.shape[0]), jnp.zeros_like(x)
        for tap in range(taps.shape[-1]):
            same = (of[tokens + tap] == place.documents_T) & (place.documents_T >= 0)
            total = total + jnp.where(same[:, None, None], wide[tokens + tap], 0) * taps[..., tap]
        return jax.nn.silu(total)

    q, k, v = (convolved(*one) for one in zip(heads[:3], wides, taps, strict=True))

    def unit(x):
        return x / jnp.sqrt(jnp.sum(x * x, -1, keepdims=True) + 1e-6)

    times = v.shape[1] // k.shape[1]
    q, k = (jnp.repeat(unit(x), times, axis=1) for x in (q, k))
    tokens = (q / k.shape[2] ** 0.5, k, v, heads.g, heads.b)
    out, memory = sequential(tokens, place.documents_T, place.before_W[-1], state.memory)
    return out, State(*tails, memory)


def draw_operands(rng, length, *, key_heads=2, value_heads=4, key_size=6, value_size=5, taps=4, dtype=np.float64):
    """Draws operands of a run: decays between none and a few per cent of what was."""

    def normal(*dims):
        return jnp.asarray(rng.normal(size=dims), dtype)

    key, value = (length, key_heads, key_size), (length, value_heads, value_size)
    wide = np.float64 if dtype == np.float64 else np.float32
    g = jnp.asarray(-np.exp(rng.normal(-1, 2, (length, value_heads))), wide)
    b = jnp.asarray(rng.uniform(0, 1, (length, value_heads)), wide)
    constants = Taps(*(normal(heads, size, taps) for _, heads, size in (key, key, value)))
    return Operands(Heads(normal(*key), normal(*key), normal(*value), g, b), constants)


def draw_documents(rng, length, count):
    """Draws documents [T] of any lengths, whose numbers rise by one or two."""
    cuts = np.sort(rng.choice(np.arange(1, length), size=count - 1, replace=False))
    numbers = np.cumsum(rng.integers(1, 3, count))
    return numbers[np.searchsorted(cuts, np.arange(length), side="right")].astype(np.int32)


def place_of(documents, start, stop, room=0, reach=3):
    """Returns the place of the tokens start to stop of a sequence, with so many tokens of padding behind."""
    before = np.concatenate([np.full(reach, -1, np.int32), documents])[start : start + reach]
    of = np.concatenate([documents[start:stop], np.full(room, -1, np.int32)])
    return TokenRun(jnp.asarray(of), jnp.asarray(before), jnp.asarray(stop - start, jnp.int32))


def cut_operands(operands, start, stop, room=0, fill=7.0):
    """Returns the operands of the tokens start to stop, with padding of any value behind."""

    def cut(x):
        x = x[start:stop]
        return jnp.concatenate([x, jnp.full((room, *x.shape[1:]), fill, x.dtype)])

    return Operands(Heads(*map(cut, operands.heads)), operands.constants)


def share_of(operands, members, member):
    """Returns one member's share of the heads; key heads are repeated where they are too few."""

    def cut(x, axis):
        size = x.shape[axis]
        if size % members:
            x = jnp.repeat(x, members // size, axis=axis)
        return jnp.split(x, members, axis=axis)[member]

    return Operands(Heads(*(cut(x, 1) for x in operands.heads)), Taps(*(cut(x, 0) for x in operands.constants)))


def worst(got, want):
    """Returns the largest error of any array, as a share of its largest value."""

    def one(a, b):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        return float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-300)) if b.size else 0.0

    return max(jax.tree.leaves(jax.tree.map(one, got, want)))
