"""Fills XLA's pools of pinned host memory before anything else asks for some; see `hardware.pinned_limit`.

A pool that is filled to its limit has the regions that the plan counts on. What a run asks for later is there, whatever
the order in which state, stash and saves ask. Pages are pinned here, device beside device, and not in the first step,
in which all devices of a process wait for each other.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sppo_jax.compat import in_host_memory, to_host
from sppo_jax.files.format_bytes import format_bytes
from sppo_jax.hardware import machine
from sppo_jax.plan.plan import Plan
from sppo_jax.processes import distributed
from sppo_jax.processes.environment import pool_requests

_ROW = 2**18  # uint32 elements of a MiB
_MIB = 2**20
_SAY_S = 15.0


def fill_pools(plan: Plan, devices: Sequence[jax.Device]) -> None:
    """Lets the pool of every device register its regions, and gives them back to the pool.

    Args:
        plan: whose bytes the pools hold; nothing happens where it keeps nothing on the host.
        devices: of this process in the plan's mesh; only GPUs have such pools.

    Raises:
        ValueError: the system does not let so much memory be pinned.
    """
    if not devices or devices[0].platform not in ("gpu", "cuda", "rocm"):
        return
    requests = pool_requests(plan)
    if not requests:
        return
    try:
        with _Progress(sum(requests), len(devices)) as progress, ThreadPoolExecutor(len(devices)) as threads:
            list(threads.map(partial(fill, requests, done=progress.add), devices))
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(_problem(sum(requests), len(devices), str(error).splitlines()[0][:200])) from None


def fill_pools_of_mesh(plan: Plan) -> None:
    """Fills the pools of this process's devices in a plan's mesh, of the first devices that jax finds."""
    devices = jax.devices()[: plan.mesh.num_devices]
    fill_pools(plan, [device for device in devices if device.process_index == jax.process_index()])


def _problem(num_bytes: int, num_devices: int, why: str) -> str:
    lockable = machine.lockable_bytes()
    change = "free memory of the host, or set hardware.host_bytes to what is free"
    if lockable is not None and lockable < num_bytes:
        change += f"; if pinned memory counts as locked here (ulimit -l is {format_bytes(lockable)}), raise ulimit -l"
    return (
        f"the host must let XLA pin {format_bytes(num_bytes)} for each of {num_devices} devices, got: {why}; {change}"
    )


class _Progress:
    """Context manager that says now and then how much is pinned: devices of one process share a lock of the system."""

    def __init__(self, num_bytes: int, num_devices: int) -> None:
        """Takes the bytes of a device, and the number of devices of this process."""
        self._total, self._bytes, self._begin_s = num_bytes * num_devices, 0, time.monotonic()
        self._lock, self._left = threading.Lock(), threading.Event()

    def add(self, num_bytes: int) -> None:
        """Counts a region that is pinned; any thread may call it."""
        with self._lock:
            self._bytes += num_bytes

    def text(self) -> str:
        """Returns how much is pinned, and how fast."""
        rate = self._bytes / max(1e-3, time.monotonic() - self._begin_s)
        done, total = format_bytes(self._bytes), format_bytes(self._total)
        return f"pinned {done} of {total} of host memory, {format_bytes(rate)} a second"

    def __enter__(self) -> _Progress:
        threading.Thread(target=self._say, name="pinning", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()
        if time.monotonic() - self._begin_s > _SAY_S:
            distributed.say(self.text())

    def _say(self) -> None:
        while not self._left.wait(_SAY_S):
            distributed.say(self.text())


def fill(requests: Sequence[int], device: jax.Device, done: Callable[[int], None] = lambda num_bytes: None) -> None:
    """Lets one device's pool register a region for each request, and gives all of them back.

    Args:
        requests: bytes of each, whole MiB.
        device: the device.
        done: called with the bytes of each region that is there.
    """
    sharding = NamedSharding(Mesh(np.array([device]), ("device",)), PartitionSpec())
    row = jax.device_put(np.zeros((1, _ROW), np.uint32), sharding)
    held = []  # one that is given back would be taken for the next request
    for num_bytes in requests:
        held.append(jax.block_until_ready(taker(num_bytes // _MIB, sharding)(row, np.int32(0))))
        done(num_bytes)
    for array in held:
        array.delete()


def taker(num_rows: int, sharding: NamedSharding) -> Callable[[jax.Array, np.int32], jax.Array]:
    """Returns a program that takes so many MiB of pinned host memory and writes one row of them.

    Args:
        num_rows: MiB.
        sharding: of one device.
    """

    def take(row: jax.Array, place: jax.Array) -> jax.Array:
        host = to_host(jnp.zeros((num_rows, _ROW), jnp.uint32))
        return lax.dynamic_update_slice(host, to_host(row), (place, jnp.int32(0)))

    return jax.jit(take, out_shardings=in_host_memory(sharding))
