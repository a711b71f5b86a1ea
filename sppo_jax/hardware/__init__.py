"""Devices, clusters, and the files in which measured figures of a device are kept."""

from sppo_jax.hardware.capacity import (
    installed_spare,
    most_pinned_bytes,
    pool_bytes,
    usable_bytes,
    usable_host_bytes,
)
from sppo_jax.hardware.cluster import Cluster, make_cluster, measured, parse_cluster, with_profile
from sppo_jax.hardware.datasheets import DEVICES
from sppo_jax.hardware.device import Device
from sppo_jax.hardware.find import device_of, find_device, local_cluster
from sppo_jax.hardware.present import num_gpus, visible_gpus

__all__ = [
    "DEVICES",
    "Cluster",
    "Device",
    "device_of",
    "find_device",
    "installed_spare",
    "local_cluster",
    "make_cluster",
    "measured",
    "most_pinned_bytes",
    "num_gpus",
    "parse_cluster",
    "pool_bytes",
    "usable_bytes",
    "usable_host_bytes",
    "visible_gpus",
    "with_profile",
]
