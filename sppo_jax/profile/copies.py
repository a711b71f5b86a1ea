"""Seconds of copies between devices and pinned host memory: out, back, both ways at once; one device alone, or all.

Letters: R rows of a buffer on the host, E elements of a row.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from sppo_jax.arrays import buffers
from sppo_jax.compat import compiler_options, to_device, to_host
from sppo_jax.profile.timing import AXIS, Timer, seconds_of

WAYS = ("out", "back", "both")
# Passes over all rows in the short loop, and in the long one: the difference leaves out what comes before.
_SHORT, _LONG = 2, 6


def copy_bytes_s(timer: Timer, way: str, num_rows: int, row_bytes: int) -> list[float]:
    """Returns the bytes a second, one way, of each device of this process, while all devices of the timer copy.

    Args:
        timer: gives the devices and the number of runs.
        way: "out" to the host, "back", or "both" at once.
        num_rows: of the buffer on the host.
        row_bytes: bytes of a row.
    """
    short, long = (_program(timer, way, passes, num_rows, row_bytes) for passes in (_SHORT, _LONG))
    for step in (short, long):
        seconds_of(step)  # loads what runs
    runs = [(seconds_of(short), seconds_of(long)) for _ in range(timer.runs)]
    short_s, long_s = (list(map(statistics.median, zip(*times, strict=True))) for times in zip(*runs, strict=True))
    num_bytes = num_rows * row_bytes * (_LONG - _SHORT)
    return [num_bytes / max(b - a, b * 1e-3) for a, b in zip(short_s, long_s, strict=True)]


def _program(timer: Timer, way: str, passes: int, num_rows: int, row_bytes: int) -> Callable:
    here = partial(_copy, way, passes, num_rows, row_bytes // 4)
    everywhere = jax.shard_map(here, mesh=timer.mesh, in_specs=(), out_specs=P(AXIS), check_vma=False)
    return jax.jit(everywhere, compiler_options=compiler_options(timer.devices[0].platform, True, 1))


def _copy(way: str, passes: int, num_rows: int, elements: int) -> jax.Array:
    """Returns a piece of all that was copied, so that nothing is left out, [1, 2]."""

    def fill(row, carry):
        x_E, host_RE = carry
        return x_E + x_E, buffers.write(host_RE, (row,), to_host(x_E))

    def turn(row, carry):
        x_E, seen_E, waiting_RE, written_RE = carry
        if way in ("out", "both"):
            written_RE = buffers.write(written_RE, (row,), to_host(x_E))
        if way in ("back", "both"):
            seen_E = seen_E + to_device(buffers.read(waiting_RE, (row,), x_E.shape))
        return x_E + x_E, seen_E, waiting_RE, written_RE  # what is copied out differs from turn to turn

    x_E = lax.iota(jnp.float32, elements)
    waiting_RE = to_host(jnp.zeros((num_rows, elements), jnp.float32))
    x_E, waiting_RE = lax.fori_loop(0, num_rows, fill, (x_E, waiting_RE))
    # One row more, or the compiler makes one buffer of the two.
    written_RE = to_host(jnp.zeros((num_rows + 1, elements), jnp.float32))
    carry = (x_E, jnp.zeros_like(x_E), waiting_RE, written_RE)
    carry = lax.fori_loop(0, passes, lambda _, c: lax.fori_loop(0, num_rows, turn, c), carry)
    _, seen_E, _, written_RE = carry
    seen = jnp.sum(to_device(buffers.read(written_RE, (0,), (elements,)))[:1])
    return jnp.stack([seen, seen_E[0]])[None]


def paired_bytes_s(timer: Timer, sent: int, copied: int) -> tuple[list[float], list[float]]:
    """Returns the bytes a second that each device sends in a ring: by itself, and beside copies to the host and back.

    Args:
        timer: of devices that exchange.
        sent: elements of 4 bytes that a device sends.
        copied: elements of 4 bytes that a device copies out and back meanwhile.
    """
    size = len(timer.devices)
    pairs = [(k, (k + 1) % size) for k in range(size)]

    def make():
        return lax.iota(jnp.int32, sent), lax.iota(jnp.int32, copied)

    def alone(state):
        return lax.ppermute(state[0], AXIS, pairs), state[1]

    def beside(state):
        x_E, y_E = state
        return lax.ppermute(x_E, AXIS, pairs), to_device(to_host(y_E)) + 1

    first, second = ([4 * sent / s for s in timer.device_seconds(make, turn)] for turn in (alone, beside))
    return first, second
