"""Clusters of the same devices that are larger or smaller, as far as there are such clusters."""

import math
from dataclasses import replace

from sppo_jax.hardware.cluster import Cluster, slice_of
from sppo_jax.hardware.existing import shape_of_chips, slice_shapes

# The hosts of the largest cluster that is tried.
_MOST_HOSTS = 128


def resized(cluster: Cluster, num_devices: int) -> Cluster | None:
    """Returns a cluster with another number of devices; None: there is no such one.

    A lone host becomes another lone host or, beyond a usual host, equal hosts; several hosts stay whole.

    Args:
        cluster: the kind of devices and hosts.
        num_devices: in all.
    """
    device, each = cluster.device, cluster.devices_per_host
    if device.platform == "tpu":
        chips, rest = divmod(num_devices, device.devices_per_chip)
        shape = None if rest else shape_of_chips(device.name, chips)
        if shape is None:
            return None
        return replace(slice_of(device, shape), host_bytes=cluster.host_bytes, spare=cluster.spare)
    if cluster.num_hosts > 1:
        return replace(cluster, num_hosts=num_devices // each) if num_devices % each == 0 else None
    most = max(each, device.devices_per_host) if device.most_per_host else num_devices
    each = max(size for size in range(1, most + 1) if num_devices % size == 0)
    return replace(cluster, num_hosts=num_devices // each, devices_per_host=each)


def every_size(cluster: Cluster, per_host: int) -> list[int]:
    """Returns numbers of devices, rising: those of a part of a host, of whole hosts, or of slices of TPUs.

    Args:
        cluster: the kind of devices.
        per_host: devices of a whole host.
    """
    most = _MOST_HOSTS * per_host
    if cluster.device.platform == "tpu":
        name, per_chip = cluster.device.name, cluster.device.devices_per_chip
        sizes = {math.prod(shape) * per_chip for shape in slice_shapes(name)}
        return sorted(size for size in sizes if size <= most)
    return [*range(1, per_host), *range(per_host, most + 1, per_host)]


def doubled_sizes(cluster: Cluster, per_host: int, multiple: int) -> list[int]:
    """Returns those of `every_size` that are 1, 2, 4, ... devices or hosts; arguments as there.

    Args:
        cluster: the kind of devices.
        per_host: devices of a whole host.
        multiple: of which the number of devices must be a multiple: what it is doubled to comes too.
    """
    every = every_size(cluster, per_host)
    starts = {1, per_host, multiple, math.lcm(multiple, per_host)}
    doubled = {start * 2**power for start in starts for power in range(every[-1].bit_length())}
    return sorted(doubled & set(every))
