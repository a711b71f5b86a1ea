"""Part `probe`: does a loop whose count the compiler does not know wait for a host copy that is under way?

The loops are those of `sppo_jax.profile.loops`. The second case takes inner loops into CUDA graphs, which read nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import jax.numpy as jnp

from bench.gpu_parts.case import Case, Emit
from bench.gpu_parts.program import Program, Target, median, random_arrays, target_here, timed
from bench.gpu_parts.room import needed_gib
from sppo_jax.profile.loops import LOOPS, loop, waits

GRAPHS_FLAG = "--xla_gpu_enable_command_buffer=+WHILE"
# Nothing in CUDA graphs. Every name is that of a kind; "NONE" is refused.
NO_GRAPHS_FLAG = "--xla_gpu_enable_command_buffer="


def cases(*, tiny: bool) -> list[Case]:
    """List the cases: loops as XLA runs them by itself, and in CUDA graphs."""
    # A row is 512 MiB: 10 ms at 50 GB/s. Its eight products take about 13 ms.
    settings = {"turns": 4, "inner": 4, "side": 64} if tiny else {"turns": 8, "inner": 4, "side": 8192}
    needs = {} if tiny else {"hbm_gib": 16.0, "host_gib": needed_gib(4)}
    return [
        Case(
            part="probe", name=name, settings=settings, expected_s=10 if tiny else 12, limit_s=150, flags=flags, **needs
        )
        for name, flags in (("loops", ""), ("loops in CUDA graphs", GRAPHS_FLAG))
    ]


def programs(settings: dict, target: Target) -> Iterator[Program]:
    """List the programs of a case."""
    side, inner = settings["side"], settings["inner"]
    arguments = (target.shape(inner, side, side), target.shape(side, side), target.shape(1, dtype=jnp.int32))
    for name, (unknown, writes) in LOOPS.items():
        run_loop = functools.partial(loop, settings["turns"], unknown, writes)
        yield Program(name, target.jit(run_loop, uses_host=True), arguments)


def run(settings: dict, device: str, emit: Emit) -> None:
    """Time each loop; then say what the copy adds to the loop whose count is not known."""
    target = target_here(device)
    found = list(programs(settings, target))
    x, w, _ = found[0].arguments
    arrays = [*random_arrays([x, w]), jnp.full((1,), settings["inner"], jnp.int32)]
    # One after the other: the products of all programs are those that the first one finds fastest.
    steps = {program.name: program.lower().compile() for program in found}
    turn_s = {}
    for name, step in steps.items():
        seconds = [s / settings["turns"] for s in timed(functools.partial(step, *arrays))]
        turn_s[name] = median(seconds)
        emit({"what": name, "turn_s": seconds})
    emit({"what": "waits", **waits(turn_s, settings["inner"])})
