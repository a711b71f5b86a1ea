"""Seconds of collectives among the devices of a timer: rings, pairs and all-to-alls.

Letters: E elements of a device, D devices.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from sppo_jax.profile.timing import AXIS, Timer


def ring_bytes_s(timer: Timer, pairs: Sequence[tuple[int, int]], num_bytes: int) -> list[float]:
    """Returns the bytes a second that each device of this process sends.

    Args:
        timer: of devices that exchange.
        pairs: who sends to whom, by their places among the devices.
        num_bytes: that a device sends.
    """
    seconds = timer.device_seconds(lambda: _start(num_bytes), lambda x_E: lax.ppermute(x_E, AXIS, pairs))
    return [num_bytes / one for one in seconds]


def rate_of(timer: Timer, way: str, num_bytes: int) -> list[float]:
    """Returns the bytes a second that leave each device of this process.

    Args:
        timer: of devices that exchange.
        way: "ring" or "all-to-all".
        num_bytes: that a device has.
    """
    size = len(timer.devices)
    if way == "ring":
        return ring_bytes_s(timer, [(k, (k + 1) % size) for k in range(size)], num_bytes)
    part = -(-num_bytes // (4 * size))

    def turn(x_DE: jax.Array) -> jax.Array:
        return lax.all_to_all(x_DE, AXIS, 0, 0)

    seconds = timer.device_seconds(lambda: _start(4 * part * size).reshape(size, part), turn)
    return [4 * part * (size - 1) / one for one in seconds]


def _start(num_bytes: int) -> jax.Array:
    return lax.iota(jnp.int32, num_bytes // 4) + lax.axis_index(AXIS)
