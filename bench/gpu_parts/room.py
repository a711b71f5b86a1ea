"""The memory that a case may take: HBM as planned for the installed jax, host memory as XLA's pool pins it. No jax."""

from __future__ import annotations

import math
from dataclasses import replace

from sppo_jax.hardware import Cluster, Device, installed_spare, make_cluster

_GIB = 2**30
# What the limit of a filled pool, in whole GiB, is above what a plan takes.
_POOL_GIB = 1
# What a process takes on its host besides what it pins: Python, CUDA, the compiler.
_PROCESS_GIB = 8


def cluster_of(device: Device, num_devices: int = 1) -> Cluster:
    """Return devices to plan for; plans leave free what the installed jax needs beyond what is predicted.

    Args:
        device: the planner's figures of one device.
        num_devices: how many.
    """
    return replace(make_cluster(device, num_devices), spare=installed_spare(device))


def pinned_bytes(num_bytes: int) -> int:
    """Return the host memory that XLA's pool pins for one allocation: the next power of two, every page of it.

    Args:
        num_bytes: of the allocation; the host temporaries of a program are one.
    """
    return 2 ** math.ceil(math.log2(num_bytes)) if num_bytes > 1 else num_bytes


def needed_gib(planned_gib: float) -> float:
    """Return the GiB of host memory that a process needs whose plan may take some GiB, in a pool that it fills."""
    return planned_gib + _POOL_GIB * (planned_gib > 0) + _PROCESS_GIB
