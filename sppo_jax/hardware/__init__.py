"""Devices, clusters, and the files in which measured figures of a device are kept."""

from sppo_jax.hardware.capacity import installed_spare, pool_bytes, usable_bytes
from sppo_jax.hardware.cluster import (
    DEVICES,
    Cluster,
    Device,
    find_device,
    local_cluster,
    make_cluster,
    measured,
    parse_cluster,
    with_profile,
)

__all__ = [
    "DEVICES",
    "Cluster",
    "Device",
    "find_device",
    "installed_spare",
    "local_cluster",
    "make_cluster",
    "measured",
    "parse_cluster",
    "pool_bytes",
    "usable_bytes",
    "with_profile",
]
