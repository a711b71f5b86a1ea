"""Fills XLA's pools of pinned host memory before anything else asks for some; see `hardware.pinned_limit`.

A pool that is filled to its limit has the regions that the plan counts on. What a run asks for later is there, whatever
the order in which state, stash and saves ask. Pages are pinned here, device beside device, and not in the first step,
in which all devices of a process wait for each other.
"""

from __future__ import annotations

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
from sppo_jax.processes.environment import pool_requests

_ROW = 2**18  # uint32 elements of a MiB
_MIB = 2**20


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
        with ThreadPoolExecutor(len(devices)) as threads:
            list(threads.map(partial(fill, requests), devices))
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


def fill(requests: Sequence[int], device: jax.Device) -> None:
    """Lets one device's pool register a region for each request, and gives all of them back.

    Args:
        requests: bytes of each, whole MiB.
        device: the device.
    """
    sharding = NamedSharding(Mesh(np.array([device]), ("device",)), PartitionSpec())
    row = jax.device_put(np.zeros((1, _ROW), np.uint32), sharding)
    held = []  # one that is given back would be taken for the next request
    for num_bytes in requests:
        held.append(jax.block_until_ready(taker(num_bytes // _MIB, sharding)(row, np.int32(0))))
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
