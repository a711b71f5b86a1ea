"""Does a loop whose count the compiler does not know wait for a host copy that is under way, and for how long?

XLA reads on the host, after each turn of such a loop, whether the loop goes on. The byte that it reads may queue behind
a large copy to the host. A turn of the outer loop here writes a row to the host, and runs an inner loop of matrix
products that take longer than the copy.

Letters: R matrices of a row, N rows and columns of a matrix.
"""

from __future__ import annotations

import statistics
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from sppo_jax.arrays import buffers
from sppo_jax.compat import compiler_options, to_device, to_host
from sppo_jax.profile.timing import AXIS, Timer, seconds_of

# What the inner loop is, and whether the outer loop writes to the host.
LOOPS = {
    "count known": (False, False),
    "count known, host writes": (False, True),
    "count not known": (True, False),
    "count not known, host writes": (True, True),
}
_INNER = 4


def waits(turn_s: dict[str, float], inner: int) -> dict[str, float]:
    """Returns what loops of unknown counts cost.

    Args:
        turn_s: seconds of a turn of the outer loop, by name.
        inner: turns of the inner loop.

    Returns:
        gap_s: seconds that a host write adds to a turn, beyond what a write adds where the count is known;
        read_s: seconds of an inner turn's read without a host write.
    """
    known, known_writes, unknown, unknown_writes = (turn_s[name] for name in LOOPS)
    return {"gap_s": (unknown_writes - unknown) - (known_writes - known), "read_s": (unknown - known) / inner}


def wait_share(turn_s: dict[str, float]) -> float:
    """Returns the share of a copy for which a loop of an unknown count waits, 0..1.

    Args:
        turn_s: seconds of a turn of the outer loop, by name, and of a copy by itself under "copy".
    """
    return min(1.0, max(0.0, waits(turn_s, _INNER)["gap_s"] / turn_s["copy"]))


def loop_seconds(timer: Timer, turns: int, side: int) -> dict[str, float]:
    """Returns the seconds of a turn of each of `LOOPS`, and of a "copy" by itself; of the slowest device here.

    Args:
        timer: gives the devices and the number of runs.
        turns: of the outer loop.
        side: rows and columns of the matrices.
    """
    found = {}
    cases = {**LOOPS, "copy": (False, True), "nothing": (False, False)}
    for name, (unknown, writes) in cases.items():
        inner = 0 if name in ("copy", "nothing") else _INNER
        here = partial(_program, turns, unknown, writes, side, inner)
        everywhere = jax.shard_map(here, mesh=timer.mesh, in_specs=P(), out_specs=P(AXIS), check_vma=False)
        step = jax.jit(everywhere, compiler_options=compiler_options(timer.devices[0].platform, True, 1))
        count = jnp.full((1,), inner, jnp.int32)
        seconds_of(step, count)
        found[name] = statistics.median(max(seconds_of(step, count)) for _ in range(timer.runs)) / turns
    copy_s = found.pop("copy") - found.pop("nothing")
    return found | {"copy": max(copy_s, 1e-9)}


def _program(turns: int, unknown: bool, writes: bool, side: int, inner: int, inner_1: jax.Array) -> jax.Array:
    x_RNN = jnp.ones((_INNER, side, side), jnp.bfloat16)
    x_NN, hosts = loop(turns, unknown, writes, x_RNN, jnp.ones((side, side), jnp.bfloat16), inner_1, inner)
    return jnp.stack([x_NN[0, 0], *(host[0, 0] for host in hosts)])[None]


def loop(
    turns: int,
    unknown: bool,
    writes: bool,
    x_RNN: jax.Array,
    w_NN: jax.Array,
    inner_1: jax.Array,
    num_inner: int | None = None,
) -> tuple:
    """Runs the outer loop; returns a piece of each buffer, so that nothing is left out.

    Args:
        turns: of the outer loop.
        unknown: whether the inner loop's count is `inner_1`.
        writes: whether the outer loop writes to the host.
        x_RNN: what is copied out, and the first of it is multiplied.
        w_NN: by which it is multiplied.
        inner_1: turns of the inner loop.
        num_inner: the same, where the count is known; None: R.
    """
    inner = inner_1[0] if unknown else x_RNN.shape[0] if num_inner is None else num_inner
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
