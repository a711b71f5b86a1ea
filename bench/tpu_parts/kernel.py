"""Part `kernel`: the attention kernel for TPUs, forward and backward, on one core and on two, and what is charged.

A chunk is the last one of a sequence. FLOPs are counted as two products forward and five backward over visible pairs.

Letters: K key-value heads, G query heads of each, H head dim, T queries, S keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import jax.numpy as jnp

from bench.gpu_parts.case import Case, Emit
from bench.gpu_parts.program import TIMED_RUNS, Program, Target, target_here
from sppo_jax.attention.intervals import Intervals, Meets
from sppo_jax.attention.pallas_blocks import Blocks, choose_blocks, target_of
from sppo_jax.attention.tpu.backward import QueryRows, backward
from sppo_jax.attention.tpu.forward import Partial, forward
from sppo_jax.attention.tpu.pallas import with_blocks
from sppo_jax.hardware import Device
from sppo_jax.hardware.tpu_chips import TPU_CHIPS
from sppo_jax.models.counts import ATTENTION_BACKWARD, chunk_pairs
from sppo_jax.plan.parts import cache_head_dim
from sppo_jax.predict.seconds.tpu_attention import TpuCall, tpu_pairs
from sppo_jax.profile.measure import Work, normal
from sppo_jax.profile.timing import Timer

_DTYPE = jnp.bfloat16
# Key-value heads, query heads of each, elements of a head.
SHAPES = ((1, 4, 128), (8, 4, 128), (1, 4, 256), (8, 8, 64))
TINY = {"heads": (2, 2, 64), "queries": 256, "keys": 512, "cores": [1, 2], "run_s": 0.001}


def cases(*, tiny: bool) -> list[Case]:
    """List the cases."""
    if tiny:
        return [_case(TINY, 20)]
    sizes = {"queries": 8192, "keys": 65536, "cores": [1, 2], "run_s": 0.3}
    return [_case({"heads": heads} | sizes, 60) for heads in SHAPES]


def _case(settings: dict, expected_s: float) -> Case:
    return Case(
        part="kernel",
        name=_what(settings),
        settings=settings,
        expected_s=expected_s,
        limit_s=6 * expected_s,
        folder="tpu_parts",
    )


def _what(settings: dict) -> str:
    num_kv_heads, num_groups, head_dim = settings["heads"]
    return f"{num_kv_heads} x {num_groups} heads of {head_dim}"


def programs(settings: dict, target: Target) -> Iterator[Program]:
    """List the programs of a case."""
    for name, _, work in _works(settings, target):
        yield Program(name, *_timer(settings, target).program(*work))


def run(settings: dict, device: str, emit: Emit) -> None:
    """Measure; a row for each number of cores and direction."""
    target = target_here(device)
    (num_kv_heads, num_groups, head_dim), (_, pairs) = settings["heads"], _chunk(settings)
    for name, cores, work in _works(settings, target):
        seconds = _timer(settings, target).seconds(*work)
        flops = 4 * head_dim * num_kv_heads * num_groups * pairs
        flops *= ATTENTION_BACKWARD if name.startswith("backward") else 1
        row = {"what": _what(settings), "way": name, "cores": cores, "seconds": seconds, "flops_s": flops / seconds}
        emit(row | {"charged_s": charged_s(settings, target.device, cores, name.partition(",")[0])})


def charged_s(settings: dict, device: Device, cores: int, direction: str) -> float | None:
    """Return the planner's seconds; None on a CPU.

    Args:
        settings: of the case.
        device: that runs it.
        cores: of it that work.
        direction: "forward" or "backward".
    """
    if not device.has_bundles:
        return None
    (num_kv_heads, num_groups, head_dim), (start, _) = settings["heads"], _chunk(settings)
    size = jnp.dtype(_DTYPE).itemsize
    call = TpuCall(head_dim, num_kv_heads, num_groups, window=0, members=1, compute_bytes=size)
    number = ("forward", "backward").index(direction)
    pairs = tpu_pairs(device, call)(start, settings["queries"])[number]
    of_device = num_kv_heads * num_groups * pairs * device.score_s(size, head_dim)[number]
    return of_device * TPU_CHIPS[device.name].cores / cores


def _chunk(settings: dict) -> tuple[int, int]:
    """Return the tokens before the chunk, and its visible pairs."""
    start = settings["keys"] - settings["queries"]
    return start, chunk_pairs(start, settings["queries"])


def _timer(settings: dict, target: Target) -> Timer:
    return Timer(devices=target.devices[:1], run_s=settings["run_s"], runs=TIMED_RUNS)


def _works(settings: dict, target: Target) -> Iterator[tuple[str, int, Work]]:
    """Yield what is timed, by its name and cores."""
    blocks = blocks_of(settings, target)
    for cores in settings["cores"]:
        if cores <= blocks.cores:
            own = replace(blocks, cores=cores)
            yield f"forward, cores: {cores}", cores, forward_work(settings, own)
            yield f"backward, cores: {cores}", cores, backward_work(settings, own)


def blocks_of(settings: dict, target: Target) -> Blocks:
    """Return the blocks that a run would take on the devices."""
    kind, size = target.devices[0].device_kind, jnp.dtype(_DTYPE).itemsize
    return choose_blocks(target_of(kind, settings["heads"][1], size), settings["queries"], settings["keys"])


def meets_of(settings: dict, blocks: Blocks) -> Meets:
    """Return where the chunk's queries meet the keys: one document."""
    start, _ = _chunk(settings)
    hi = start + 1 + jnp.arange(settings["queries"], dtype=jnp.int32)
    return with_blocks(Intervals(jnp.zeros_like(hi), hi), settings["keys"], blocks)


def arrays_of(settings: dict):
    """Draw queries [K, G, T, H], and keys and values as a cache has them."""
    num_kv_heads, num_groups, head_dim = settings["heads"]
    cache = (1, 1, num_kv_heads, settings["keys"], cache_head_dim("pallas", head_dim))
    q = normal(0, (num_kv_heads, num_groups, settings["queries"], head_dim), _DTYPE)
    return q, normal(1, cache, _DTYPE), normal(2, cache, _DTYPE)


def forward_work(settings: dict, blocks: Blocks) -> Work:
    """Return what is timed forward: each turn goes on from the result of the turn before."""

    def make():
        q, k, v = arrays_of(settings)
        return q, k, v, Partial(jnp.zeros(q.shape, jnp.float32), jnp.full(q.shape[:3], -jnp.inf, jnp.float32))

    def turn(state):
        q, k, v, found = state
        return q, k, v, forward(q, (k, v, (0, 0)), meets_of(settings, blocks), found, interpret=blocks.is_interpreted)

    return make, turn


def backward_work(settings: dict, blocks: Blocks) -> Work:
    """Return what is timed backward: each turn adds to the sums of the turn before."""

    def make():
        q, k, v = arrays_of(settings)
        rows = QueryRows(normal(3, q.shape, _DTYPE), normal(4, q.shape[:3], jnp.float32), jnp.zeros(q.shape[:3]))
        sums = jnp.zeros((blocks.cores, *q.shape)), jnp.zeros(k.shape), jnp.zeros(k.shape)
        return q, k, v, rows, sums

    def turn(state):
        q, k, v, rows, sums = state
        meets, interpret = meets_of(settings, blocks), blocks.is_interpreted
        return q, k, v, rows, tuple(backward(q, (k, v, (0, 0)), meets, rows, sums, (0, 0), interpret=interpret))

    return make, turn
