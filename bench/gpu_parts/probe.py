"""Part `probe`: does a loop whose count the compiler does not know wait for a host copy that is under way?

XLA reads on the host, after each turn of such a loop, whether the loop goes on. The byte that it reads may queue behind
a large copy to the host. A turn of the outer loop here writes a row to the host, and runs an inner loop of matrix
products that take longer than the copy. The second case takes inner loops into CUDA graphs, which read nothing.

Letters: R matrices of a row, N rows and columns of a matrix.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax import lax

from bench.gpu_parts.case import Case, Emit
from bench.gpu_parts.program import Program, Target, median, random_arrays, target_here, timed
from bench.gpu_parts.room import needed_gib
from sppo_jax.arrays import buffers
from sppo_jax.compat import to_device, to_host

GRAPHS_FLAG = "--xla_gpu_enable_command_buffer=+WHILE"
# Nothing in CUDA graphs. Every name is that of a kind; "NONE" is refused.
NO_GRAPHS_FLAG = "--xla_gpu_enable_command_buffer="
# What the inner loop is, and whether the outer loop writes to the host.
LOOPS = {
    "count known": (False, False),
    "count known, host writes": (False, True),
    "count not known": (True, False),
    "count not known, host writes": (True, True),
}


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
        loop = functools.partial(_loop, settings["turns"], unknown, writes)
        yield Program(name, target.jit(loop, uses_host=True), arguments)


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


def waits(turn_s: dict[str, float], inner: int) -> dict[str, float]:
    """Return what loops of unknown counts cost.

    Args:
        turn_s: seconds of a turn of the outer loop, by name.
        inner: turns of the inner loop.

    Returns:
        gap_s: seconds that a host write adds to a turn, beyond what a write adds where the count is known;
        read_s: seconds of an inner turn's read without a host write.
    """
    known, known_writes, unknown, unknown_writes = (turn_s[name] for name in LOOPS)
    return {"gap_s": (unknown_writes - unknown) - (known_writes - known), "read_s": (unknown - known) / inner}


def _loop(turns: int, unknown: bool, writes: bool, x_RNN: jax.Array, w_NN: jax.Array, inner_1: jax.Array) -> tuple:
    """Run the outer loop; return a piece of each buffer, so that nothing is left out."""
    inner = inner_1[0] if unknown else x_RNN.shape[0]
    w_NN = w_NN * jnp.asarray(w_NN.shape[0] ** -0.5, w_NN.dtype)  # so that products keep their size

    def turn(i, carry):
        x_RNN, host = carry
        host = [buffers.write(buffer, (i,), to_host(x_RNN)) for buffer in host]
        y_NN = lax.fori_loop(0, inner, lambda _, y: (y @ w_NN) @ w_NN, x_RNN[0])
        y_NN, host = lax.optimization_barrier((y_NN, host))  # a write may end here, and not before
        return buffers.write(x_RNN, (0,), y_NN @ w_NN), host

    host = [to_host(jnp.zeros((turns, *x_RNN.shape), x_RNN.dtype))] if writes else []
    x_RNN, host = lax.fori_loop(0, turns, turn, (x_RNN, host))
    return x_RNN[0, :1], [to_device(buffers.read(buffer, (0, 0, 0), (1, x_RNN.shape[-1]))) for buffer in host]
