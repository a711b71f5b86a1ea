"""The gated delta rule of part `exact`: the mixer in blocks and spans against its definition in float32.

Out, the state behind the run and every gradient: of operands, of taps, and of the state before the run.

Letters: T tokens, G key heads, N value heads, K key size, V value size, W taps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from bench.gpu_parts.case import Case, Emit
from bench.gpu_parts.program import Program, Target
from sppo_jax.mixers.delta import GatedDelta, Heads, State, Taps
from sppo_jax.mixers.mixer import Operands, TokenRun

# Tokens of documents: they begin and end within the taps, at blocks and elsewhere; what is left is padding. The first
# one goes on from the run before.
DOCUMENTS = (1000, 1, 2, 3, 64, 130, 1900, 1, 995)
PADDING = 100
TINY_DOCUMENTS, TINY_PADDING = (61, 1, 2, 64, 2100), 20
# The largest share of a size that an error may be, by the dtype of the operands: a product of three digits (TF32) where
# six are asked for is off by 1e-3, and values of bfloat16 are rounded by 4e-3. (On a
# CPU: 3e-6 and 4e-3.)
MOST = {"float32": 1e-4, "bfloat16": 1e-2}


def cases(*, tiny: bool) -> list[Case]:
    """List the case."""
    settings: dict[str, Any] = {"value_heads": 4, "key_heads": 2, "size": 128, "taps": 4, "tiny": tiny}
    if tiny:
        settings |= {"value_heads": 2, "key_heads": 1, "size": 8}
    needs = {} if tiny else {"hbm_gib": 16.0}
    settings = {"delta": settings}
    expected_s = 15 if tiny else 60
    return [Case(part="exact", name="the delta rule", settings=settings, expected_s=expected_s, limit_s=500, **needs)]


def programs(settings: dict, target: Target) -> Iterator[Program]:
    """List the programs of the case: the mixer alone, for its definition is no part of a step."""
    for dtype in MOST:
        shapes = jax.tree.map(lambda x: target.shape(*x.shape, dtype=x.dtype), _drawn(settings, dtype))
        yield Program(f"the delta rule, {dtype}", target.jit(_gradients(_mixer(settings).mix)), shapes)


def run(settings: dict, target: Target, emit: Emit) -> None:
    """Compare; a row for each dtype."""
    for dtype in MOST:
        arguments = _drawn(settings, dtype)
        got = target.jit(_gradients(_mixer(settings).mix))(*arguments)
        wide = jax.tree.map(lambda x: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x, arguments)
        with jax.default_matmul_precision("highest"):
            want = jax.jit(_gradients(by_token))(*wide)
        emit(_row(f"the delta rule, {dtype}, against its definition in float32", got, want, MOST[dtype]))


def _row(what: str, got: Any, want: Any, most: float) -> dict:
    """Judge a comparison; an error that is no number fails."""

    def error(x: jax.Array, right: jax.Array) -> float:
        x, right = (np.asarray(a.astype(jnp.float32), np.float64) for a in (x, right))
        return float(np.linalg.norm(x - right) / max(np.linalg.norm(right), 1e-30))

    errors = {
        jax.tree_util.keystr(path): error(x, right)
        for (path, x), right in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True)
    }
    worst = max(errors, key=lambda name: errors[name] if errors[name] == errors[name] else np.inf)
    return {"what": what, "ok": errors[worst] <= most, "worst": worst, "error": errors[worst], "most": most}


def _mixer(settings: dict) -> GatedDelta:
    return GatedDelta(settings["taps"] - 1)


def _gradients(mix: Callable) -> Callable:
    """Return the function of a run that gives out, the state behind, and all gradients of one sum of both."""

    def found(operands: Operands, state: State, place: TokenRun, dout_TNV: jax.Array) -> dict[str, Any]:
        (out, after), pull = jax.vjp(lambda operands, state: mix(operands, state, place), operands, state)
        down, before = pull((dout_TNV.astype(out.dtype), after))
        return {"out": out, "state": after, "gradients": down, "state_gradients": before}

    return found


def _drawn(settings: dict, dtype: str) -> tuple[Operands, State, TokenRun, jax.Array]:
    """Draw a run behind another one, with all that a backward needs."""
    lengths, padding = (TINY_DOCUMENTS, TINY_PADDING) if settings["tiny"] else (DOCUMENTS, PADDING)
    documents = np.concatenate([np.repeat(np.arange(len(lengths)), lengths), np.full(padding, -1)]).astype(np.int32)
    tokens, size, taps = documents.size, settings["size"], settings["taps"]
    rng, key = np.random.default_rng(0), (settings["key_heads"], size)
    value = (settings["value_heads"], size)

    def normal(*dims: int, scale: float = 1.0) -> jax.Array:
        return jnp.asarray(scale * rng.normal(size=dims), dtype)

    # Decays between a thousandth and all of what was, as in models at their start.
    g = jnp.asarray(-np.exp(rng.normal(-3, 2, (tokens, value[0]))), jnp.float32)
    b = jnp.asarray(rng.uniform(0, 1, (tokens, value[0])), jnp.float32)
    heads = Heads(normal(tokens, *key), normal(tokens, *key), normal(tokens, *value), g, b)
    constants = Taps(*(normal(*dims, taps, scale=0.5) for dims in (key, key, value)))
    tails = (normal(dims[0], taps - 1, size) for dims in (key, key, value))
    memory = jnp.asarray(rng.normal(size=(value[0], size, size)), jnp.float32)
    place = TokenRun(jnp.asarray(documents), jnp.zeros(taps - 1, jnp.int32), jnp.int32(tokens - padding))
    return Operands(heads, constants), State(*tails, memory), place, normal(tokens, *value)


def by_token(operands: Operands, state: State, place: TokenRun) -> tuple[jax.Array, State]:
    """The definition: taps that are looked up, then the rule token by token; arguments and results as `mix`."""
    heads, taps = Heads(*operands.heads), Taps(*operands.constants)
    of_T = place.documents_T
    (q, k, v), tails = zip(
        *(_convolved(*one, place) for one in zip(heads[:3], state[:3], taps, strict=True)), strict=True
    )
    times = v.shape[1] // k.shape[1]
    q, k = (jnp.repeat(x / jnp.sqrt(jnp.sum(x * x, -1, keepdims=True) + 1e-6), times, axis=1) for x in (q, k))

    def step(past: tuple, token: tuple) -> tuple[tuple, jax.Array]:
        memory, seen = past
        q, k, v, g, b, document = token
        kept = jnp.where(document == seen, memory, 0) * jnp.exp(g)[:, None, None]
        new = kept + jnp.einsum("nk,nv->nkv", k, b[:, None] * (v - jnp.einsum("nkv,nk->nv", kept, k)))
        is_real = document >= 0
        out = jnp.where(is_real, jnp.einsum("nkv,nk->nv", new, q), 0)
        return (jnp.where(is_real, new, memory), jnp.where(is_real, document, seen)), out

    begin = (state.memory, place.before_W[-1])
    (memory, _), out = lax.scan(step, begin, (q / heads.k.shape[2] ** 0.5, k, v, heads.g, heads.b, of_T))
    return out, State(*tails, memory)


def _convolved(
    x_TNC: jax.Array, tail_NWC: jax.Array, taps_NCW: jax.Array, place: TokenRun
) -> tuple[jax.Array, jax.Array]:
    """Return SiLU of the sums over a document's own last tokens, and the tokens that the next run needs."""
    reach, tokens = tail_NWC.shape[1], jnp.arange(x_TNC.shape[0], dtype=jnp.int32)
    wide = jnp.concatenate([jnp.moveaxis(tail_NWC, 1, 0), x_TNC])
    of = jnp.concatenate([place.before_W[place.before_W.size - reach :], place.documents_T])
    total = jnp.zeros_like(x_TNC)
    for tap in range(reach + 1):
        own = (of[tokens + tap] == place.documents_T) & (place.documents_T >= 0)
        total = total + jnp.where(own[:, None, None], wide[tokens + tap], 0) * taps_NCW[..., tap]
    return jax.nn.silu(total), jnp.moveaxis(lax.dynamic_slice_in_dim(wide, place.num_real, reach), 0, 1)
