"""Part `exact`: attention kernels and the delta rule against float32, a step with its stash on the host against kept.

A kernel's error may be at most twice that of plain attention in bfloat16, all products rounded: out, LSE, dQ, dK, dV.
The inputs are the same bfloat16 values everywhere.

Letters: T queries of a chunk, S keys (prefix, chunk, and room), N query heads, K key/value heads, H head dim.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from bench.gpu_parts import exact_delta, exact_step
from bench.gpu_parts.case import Case, Emit
from bench.gpu_parts.program import Program, Target, target_here
from sppo_jax.attention import flash
from sppo_jax.attention.spreading import sequence
from sppo_jax.attention.spreading.sequence import Cache, Chunk, Split
from sppo_jax.attention.tags import Tags, visible

NAMES = ("out", "lse", "dq", "dk", "dv")
KERNELS = ("cudnn", "blockwise")
MOST_TIMES_DENSE = 2.0
# What rounding alone can make of figures whose dense error happens to be zero.
_ROUNDING = {"lse": 2e-5}
_LOWEST_EXP = -88.7  # exp of less is no normal float32

# Prefix and chunk in tokens, then what is special.
PATTERNS = {
    "one document": (4096, 1024, {}),
    "packed documents": (4096, 1024, {"documents": (1500, 1, 2000, 700, 1, 64, 512)}),
    "ragged lengths": (3000, 1000, {}),
    "length % 128 = 64": (4160, 1088, {}),
    "LSE below -88.7": (4096, 1024, {"shift": 5.0}),
    "length % 128 = 64, LSE below -88.7": (4160, 1088, {"shift": 5.0}),
    "a last document of one token, LSE below -88.7": (4096, 1024, {"documents": (4000, 1119, 1), "shift": 5.0}),
    "most rows see nothing, LSE of -inf": (4096, 1024, {"documents": (4096, 65)}),
    "no prefix": (0, 1024, {}),
    "many merges": (4096, 1024, {"tile": 512}),
    "packed documents in a window": (4096, 1024, {"documents": (1500, 1, 2000, 700, 1, 64, 512), "window": 200}),
    "a window longer than the chunk": (4096, 1024, {"window": 2048}),
}
TINY_PATTERNS = {
    "packed documents": (32, 24, {"documents": (20, 1, 27), "shift": 0.0}),
    "LSE below -88.7": (32, 24, {"shift": 5.0}),
    "a last document of one token, LSE below -88.7": (32, 24, {"documents": (30, 25, 1), "shift": 5.0}),
    "most rows see nothing, LSE of -inf": (32, 24, {"documents": (32, 10)}),
    "many merges": (32, 24, {"tile": 8}),
    "packed documents in a window": (32, 24, {"documents": (20, 1, 27), "window": 7}),
}
# The kernel of most heads first; the other kernel is plain jnp, so one case takes a layout of each size.
_LAYOUTS = {
    128: [[16, 16, 128], [16, 4, 128]],
    64: [[8, 8, 64], [8, 1, 64]],
    80: [[4, 4, 80]],
    96: [[8, 4, 96]],
}
_SECONDS_A_LAYOUT = 82.0  # measured on one H100 with 16 cores; most of it compiles plain attention


def cases(*, tiny: bool) -> list[Case]:
    """List the cases."""
    if tiny:
        settings = {"heads": [[2, 1, 64]], "kernels": list(KERNELS), "patterns": list(TINY_PATTERNS), "tiny": True}
        kernels = [Case(part="exact", name="heads of 64", settings=settings, expected_s=15, limit_s=120)]
    else:
        kernels = [_case(f"heads of {size}", "cudnn", heads) for size, heads in _LAYOUTS.items()]
        kernels.append(_case("blockwise", "blockwise", [heads[-1] for heads in _LAYOUTS.values()]))
    return [*kernels, *exact_delta.cases(tiny=tiny), *exact_step.cases(tiny=tiny)]


def _case(name: str, kernel: str, heads: list[list[int]]) -> Case:
    return Case(
        part="exact",
        name=name,
        settings={"heads": heads, "kernels": [kernel], "patterns": list(PATTERNS), "tiny": False},
        expected_s=5 + _SECONDS_A_LAYOUT * len(heads),
        limit_s=120 + 2 * _SECONDS_A_LAYOUT * len(heads),
        hbm_gib=16,
    )


def programs(settings: dict, target: Target) -> Iterator[Program]:
    """List the programs of a case."""
    if "model" in settings:
        yield from exact_step.programs(settings, target)
        return
    if "delta" in settings:
        yield from exact_delta.programs(settings["delta"], target)
        return
    for heads, pattern, shape in _shapes(settings):
        arguments = tuple(target.shape(*dims, dtype=dtype) for dims, dtype in _argument_shapes(heads, shape))
        for kernel in settings["kernels"]:
            yield Program(_name(kernel, heads, pattern), _by_kernel(target, kernel, shape), arguments)


def run(settings: dict, device: str, emit: Emit) -> None:
    """Compare; a row for each kernel, head layout and pattern."""
    target = target_here(device)
    if "model" in settings:
        exact_step.run(settings, target, emit)
        return
    if "delta" in settings:
        exact_delta.run(settings["delta"], target, emit)
        return
    for heads, pattern, shape in _shapes(settings):
        arrays = _arrays(heads, shape)
        start, window = shape[0], shape[2].get("window", 0)
        right = _dense(jnp.float32, start, window)(*arrays)
        plain = _dense(jnp.bfloat16, start, window)(*arrays)
        bounds = {name: _error(name, plain[name], right) for name in NAMES}
        for kernel in settings["kernels"]:
            got = _by_kernel(target, kernel, shape)(*arrays)
            errors = {name: _error(name, got[name], right) for name in NAMES}
            emit(_row(_name(kernel, heads, pattern), errors, bounds, _untouched(got, right)))


def _shapes(settings: dict) -> Iterator[tuple[list[int], str, tuple]]:
    patterns = TINY_PATTERNS if settings["tiny"] else PATTERNS
    for heads in settings["heads"]:
        for pattern in settings["patterns"]:
            yield heads, pattern, patterns[pattern]


def _name(kernel: str, heads: list[int], pattern: str) -> str:
    return f"{kernel}, {heads[0]}/{heads[1]} heads of {heads[2]}, {pattern}"


def _argument_shapes(heads: list[int], shape: tuple) -> list[tuple[tuple[int, ...], jnp.dtype]]:
    """Shapes of q, k, v, dout, and the documents of all tokens."""
    prefix, chunk, _ = shape
    num_heads, num_kv_heads, head_dim = heads
    q, k = (chunk, num_heads, head_dim), (prefix + chunk, num_kv_heads, head_dim)
    return [(dims, jnp.bfloat16) for dims in (q, k, k, q)] + [((prefix + chunk,), jnp.int32)]


def _arrays(heads: list[int], shape: tuple) -> list[jax.Array]:
    """Draw the arguments; padding ends the chunk where documents do not fill it."""
    prefix, chunk, special = shape
    rng = np.random.default_rng(0)
    *floats, _ = _argument_shapes(heads, shape)
    q, k, v, dout = (rng.normal(size=dims).astype(np.float32) for dims, _ in floats)
    shift = special.get("shift", 0.0)
    q, k = q - shift, k + shift  # every score becomes about -shift^2 sqrt(H)
    documents = np.full(prefix + chunk, -1, np.int32)
    lengths = special.get("documents", (prefix + chunk,))
    begins = np.cumsum((0, *lengths))
    for number, (begin, end) in enumerate(zip(begins, begins[1:], strict=False)):
        documents[begin:end] = number
    return [*(jnp.asarray(x, jnp.bfloat16) for x in (q, k, v, dout)), jnp.asarray(documents)]


def _positions(documents_S: jax.Array) -> jax.Array:
    """Return positions that increase within each document."""
    return jnp.arange(documents_S.shape[0], dtype=jnp.int32)


def _by_kernel(target: Target, kernel: str, shape: tuple) -> Callable:
    """Return the executor's own attention, forward and backward, jitted; the keys of a past tile may be forced."""
    prefix, chunk, special = shape
    split = Split(1, 1, "q", kernel, special.get("window", 0))
    return _attention(target, split, prefix, chunk, special.get("tile", flash.MAX_TILE))


@functools.lru_cache  # patterns of one shape share a program
def _attention(target: Target, split: Split, prefix: int, chunk: int, tile: int) -> Callable:
    def attend(q_TNH, k_SKH, v_SKH, dout_TNH, documents_S):
        keys = sequence.member_tags(_positions(documents_S), documents_S, split, chunk)
        tags = sequence.chunk_tags(keys, jnp.int32(prefix), jnp.int32(chunk), chunk, split, bound=None)
        at = Chunk(jnp.int32(0), jnp.int32(prefix), jnp.int32(chunk), tags)

        def buffer(x_SKH):
            return jnp.pad(x_SKH.swapaxes(0, 1), ((0, 0), (0, chunk), (0, 0)))[None, None]

        cache = Cache(buffer(k_SKH), buffer(v_SKH))
        out, lse = sequence.forward(q_TNH, cache, at, 0, split)
        sums = Cache(*(jnp.zeros(x.shape, jnp.float32) for x in cache))
        dq, sums = sequence.backward(sequence.Attended(q_TNH, out, lse, dout_TNH), cache, sums, at, 0, split)
        dk, dv = (x[0, 0, :, : prefix + chunk].swapaxes(0, 1) for x in sums)
        return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}

    def attend_by_tiles(*arrays):
        with mock.patch.object(flash, "MAX_TILE", tile):
            return attend(*arrays)

    return target.jit(attend_by_tiles)


@functools.lru_cache
def _dense(dtype, start: int, window: int) -> Callable:
    """Return plain attention by einsum and autodiff, every product in `dtype`."""

    def attend(q_TNH, k_SKH, v_SKH, dout_TNH, documents_S):
        positions_S = _positions(documents_S)
        mask_TS = visible(Tags(positions_S[start:], documents_S[start:]), Tags(positions_S, documents_S), window)
        groups = q_TNH.shape[1] // k_SKH.shape[1]

        def forward(q_TNH, k_SKH, v_SKH):
            k, v = (jnp.repeat(x, groups, axis=1) for x in (k_SKH, v_SKH))
            scores = jnp.einsum("tnh,snh->nts", q_TNH, k) * jnp.asarray(q_TNH.shape[-1] ** -0.5, dtype)
            scores = jnp.where(mask_TS, scores.astype(jnp.float32), -jnp.inf)
            lse_NT = jax.nn.logsumexp(scores, axis=-1)
            shares = jnp.where(mask_TS, jnp.exp(scores - jnp.where(jnp.isinf(lse_NT), 0, lse_NT)[..., None]), 0)
            return jnp.einsum("nts,snh->tnh", shares.astype(dtype), v), lse_NT.T

        cast = [x.astype(dtype) for x in (q_TNH, k_SKH, v_SKH)]
        out, pull, lse = jax.vjp(forward, *cast, has_aux=True)
        dq, dk, dv = pull(dout_TNH.astype(dtype))
        return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}

    def precise(*arrays):
        with jax.default_matmul_precision("highest" if dtype == jnp.float32 else "default"):
            return attend(*arrays)

    return jax.jit(precise)


def _error(name: str, got: jax.Array, right: dict[str, jax.Array]) -> float:
    """Return |got - right| / |right|; for an LSE the largest difference, over queries that see something."""
    want = np.asarray(right[name], np.float64)
    got = np.asarray(got.astype(jnp.float32), np.float64)
    if name != "lse":
        return float(np.linalg.norm(got - want) / np.linalg.norm(want))
    sees = np.isfinite(want)
    return float(np.abs(got[sees] - want[sees]).max())


def _untouched(got: dict[str, jax.Array], right: dict[str, jax.Array]) -> bool:
    """Return whether queries that see nothing have an output and a dQ of zero and an LSE of -inf."""
    nothing = np.isneginf(np.asarray(right["lse"]))
    zeros = [np.asarray(got[name].astype(jnp.float32))[nothing] for name in ("out", "dq")]
    return all((x == 0).all() for x in zeros) and bool(np.isneginf(np.asarray(got["lse"])[nothing]).all())


def _row(name: str, errors: dict, bounds: dict, untouched: bool) -> dict:
    """Judge a comparison; an error that is no number fails."""
    times = {key: errors[key] / max(bounds[key], _ROUNDING.get(key, 1e-7)) for key in NAMES}
    worst = max(times, key=lambda key: times[key] if times[key] == times[key] else np.inf)
    ok = all(value <= MOST_TIMES_DENSE for value in times.values()) and untouched
    row = {"what": name, "ok": bool(ok), "errors": errors, "dense_errors": bounds, "worst": worst}
    return row | {"times_dense": times[worst], "untouched": untouched}
