"""Part `attention`: FLOP/s of each kernel by queries and prefix, as the executor calls it, and of cuDNN's calls alone.

FLOPs are counted as two products forward and five backward over the pairs that exist.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import jax.numpy as jnp

from bench.gpu_parts.case import Case, Emit
from bench.gpu_parts.program import TIMED_RUNS, Program, Target, target_here, timer_of
from sppo_jax.attention import cudnn
from sppo_jax.config import ModelConfig
from sppo_jax.models.counts import ATTENTION_BACKWARD, chunk_pairs, layer_costs
from sppo_jax.profile import measure
from sppo_jax.profile.measure import Work, attention_work, default_model, default_sizes

_K = 1024


def cases(*, tiny: bool) -> list[Case]:
    """List the cases: each kernel behind each prefix, cuDNN's calls alone, and what `sppo profile` stores."""
    if tiny:
        return [_case("blockwise behind 64", {"kernel": "blockwise", "prefix": 64, "queries": [32], "run_s": 0.001}, 5)]
    short, long = [_K, 4 * _K, 8 * _K, 32 * _K], [8 * _K, 32 * _K]
    found = []
    for kernel, prefixes in (("cudnn", (0, 32, 128, 512)), ("blockwise", (0, 32))):
        for prefix in prefixes:
            queries = long[:1] if kernel == "blockwise" else long if prefix == 512 else short
            settings = {"kernel": kernel, "prefix": prefix * _K, "queries": queries, "run_s": 0.1}
            found.append(
                _case(f"{kernel} behind {prefix}K", settings, 10 + 8 * len(queries) + prefix * len(queries) / 24)
            )
    for name, shape, queries, head_dim in (
        ("a large rectangle", "rectangle", long, 128),
        ("a small rectangle", "rectangle", short[:2], 128),
        ("a triangle", "triangle", short, 128),
        *((f"a rectangle, heads of {size}", "rectangle", long[:1], size) for size in (64, 80, 96)),
        ("a triangle, heads of 64", "triangle", long[:1], 64),
    ):
        settings = {"calls": shape, "keys": 32 * _K, "queries": queries, "run_s": 0.1, "head_dim": head_dim}
        found.append(_case(f"cudnn, {name}", settings, 8 + 3 * len(queries)))
    return [*found, _case("profile", {"profile": True}, 140)]


def _case(name: str, settings: dict, expected_s: float) -> Case:
    needs = {"hbm_gib": 24.0} if expected_s > 5 else {}
    return Case(
        part="attention", name=name, settings=settings, expected_s=expected_s, limit_s=3 * expected_s + 90, **needs
    )


def programs(settings: dict, target: Target) -> Iterator[Program]:
    """List the programs of a case; `sppo profile`'s own figures need no others than these."""
    if "profile" in settings:
        return
    timer, model = timer_of(settings, target), _model(settings, target)
    for queries in settings["queries"]:
        for way, (work, _) in _works(settings, model, queries).items():
            yield Program(f"{_what(settings)}, {queries} queries, {way}", *timer.program(*work))


def run(settings: dict, device: str, emit: Emit) -> None:
    """Measure; a row for each number of queries and way."""
    target = target_here(device)
    model = _model(settings, target)
    if "profile" in settings:
        sizes = dataclasses.replace(default_sizes(target.platform, quick=False), run_s=0.1, runs=TIMED_RUNS)
        emit({"what": "profile", "profile": dataclasses.asdict(measure.measure(model, sizes, print))})
        return
    timer = timer_of(settings, target)
    for queries in settings["queries"]:
        for way, (work, flops) in _works(settings, model, queries).items():
            seconds = timer.seconds(*work)
            row = {"what": _what(settings), "queries": queries, "way": way, "seconds": seconds}
            emit(row | {"prefix": settings.get("prefix"), "flops_s": flops / seconds})


def _model(settings: dict, target: Target) -> ModelConfig:
    model = default_model(target.platform)
    return dataclasses.replace(model, head_dim=settings.get("head_dim", model.head_dim))


def _what(settings: dict) -> str:
    if "calls" in settings:
        heads = f", heads of {settings['head_dim']}" if settings.get("head_dim", 128) != 128 else ""
        keys = f" of {settings['keys'] // _K}K keys" if settings["calls"] == "rectangle" else ""
        return f"cudnn's {settings['calls']}{keys}{heads}"
    return f"{settings['kernel']} behind {settings['prefix']}"


def _works(settings: dict, model: ModelConfig, queries: int) -> dict[str, tuple[Work, float]]:
    """Return what is timed forward and backward, each with its FLOPs."""
    if "calls" in settings:
        causal = settings["calls"] == "triangle"
        keys = queries if causal else settings["keys"]
        forward, backward = _call_work(model, queries, keys, causal=causal)
        pairs = queries * keys / (2 if causal else 1)
    else:
        prefix, dtype = settings["prefix"], jnp.dtype(model.compute_dtype)
        forward, backward = attention_work(model, settings["kernel"], queries, prefix, dtype)
        pairs = chunk_pairs(prefix, queries)
    flops = layer_costs(model).pair_flops * pairs
    return {"forward": (forward, flops), "backward": (backward, ATTENTION_BACKWARD * flops)}


def _call_work(model: ModelConfig, queries: int, keys: int, *, causal: bool) -> tuple[Work, Work]:
    """Time one call of the fused kernel, forward and backward, without the loops and merges around it."""
    num_heads, num_kv_heads, head_dim = model.num_heads, model.num_kv_heads, model.head_dim
    lengths = jnp.int32(queries), jnp.int32(keys)

    def make():
        q = measure.normal(0, (num_heads, queries, head_dim), jnp.bfloat16)
        k, v = (measure.normal(seed, (num_kv_heads, keys, head_dim), jnp.bfloat16) for seed in (1, 2))
        return q, k, v

    def forward(state):
        q, k, v = state
        out, _ = cudnn.forward(cudnn.CudnnOperands(q, k, v, *lengths), causal=causal)
        return q + out, k, v

    def make_backward():
        state = make()
        out, lse = cudnn.forward(cudnn.CudnnOperands(*state, *lengths), causal=causal)
        return *state, out, lse, measure.normal(3, out.shape, jnp.bfloat16)

    def backward(state):
        q, k, v, out, lse, dout = state
        results = cudnn.CudnnResults(out, lse, dout)
        dq, dk, dv = cudnn.backward(cudnn.CudnnOperands(q, k, v, *lengths), results, causal=causal)
        return q, k + dk, v + dv, out, lse, dout + dq

    return (make, forward), (make_backward, backward)
