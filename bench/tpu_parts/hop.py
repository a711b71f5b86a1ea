"""Part `hop`: what a hop of a ring of devices takes, alone and beside the attention kernel."""

from __future__ import annotations

from collections.abc import Iterator

import jax.numpy as jnp
from jax import lax

from bench.gpu_parts.case import Case, Emit
from bench.gpu_parts.program import Program, Target, target_here, timer_of
from bench.tpu_parts.kernel import TINY, arrays_of, blocks_of, forward_work, meets_of
from sppo_jax.attention.tpu.forward import Partial, forward
from sppo_jax.profile.measure import Work
from sppo_jax.profile.timing import AXIS

DEVICES = 4
HOP, KERNEL, BOTH = "hop of keys and values", "kernel", "kernel beside the hop"


def cases(*, tiny: bool) -> list[Case]:
    """List the cases."""
    if tiny:
        return [_case("tiny", TINY, 15)]
    sizes = {"queries": 8192, "keys": 65536, "run_s": 0.3}
    return [
        _case("1 key-value head of 128", {"heads": (1, 4, 128)} | sizes, 60),
        _case("8 key-value heads of 128", {"heads": (8, 1, 128)} | sizes, 60),
    ]


def _case(name: str, settings: dict, expected_s: float) -> Case:
    return Case(
        part="hop",
        name=name,
        settings=settings | {"devices": DEVICES},
        expected_s=expected_s,
        limit_s=6 * expected_s,
        devices=DEVICES,
        folder="tpu_parts",
    )


def programs(settings: dict, target: Target) -> Iterator[Program]:
    """List the programs of a case."""
    for name, work in _works(settings, target).items():
        yield Program(name, *timer_of(settings, target).program(*work))


def run(settings: dict, device: str, emit: Emit) -> None:
    """Measure; a row each."""
    target, found = target_here(device, DEVICES), {}
    for name, work in _works(settings, target).items():
        found[name] = timer_of(settings, target).seconds(*work)
        emit({"what": name, "seconds": found[name], "bytes_s": _bytes(settings) / found[name] if name == HOP else None})
    hidden = (found[HOP] + found[KERNEL] - found[BOTH]) / min(found[HOP], found[KERNEL])
    emit({"what": "of the shorter one that is hidden", "share": hidden})


def _bytes(settings: dict) -> int:
    num_kv_heads, _, head_dim = settings["heads"]
    return 2 * num_kv_heads * settings["keys"] * head_dim * jnp.dtype(jnp.bfloat16).itemsize


def _works(settings: dict, target: Target) -> dict[str, Work]:
    blocks = blocks_of(settings, target)
    make, kernel = forward_work(settings, blocks)

    def send(x):
        return lax.ppermute(x, AXIS, [(i, (i + 1) % DEVICES) for i in range(DEVICES)])

    def both(state):
        q, k, v, found = state
        meets = meets_of(settings, blocks)
        found = Partial(*forward(q, (k, v, (0, 0)), meets, found, interpret=blocks.is_interpreted))
        return q, send(k), send(v), found

    hop = (lambda: arrays_of(settings)[1:]), (lambda kv: tuple(map(send, kv)))
    return {HOP: hop, KERNEL: (make, kernel), BOTH: (make, both)}
