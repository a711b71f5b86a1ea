"""Devices on hosts: clusters by their names, and devices with measured figures."""

import difflib
import math
from dataclasses import dataclass, replace
from pathlib import Path

from sppo_jax.hardware.datasheets import DEVICES
from sppo_jax.hardware.device import Device
from sppo_jax.hardware.existing import nearest_shapes, shape_of_chips, slice_shapes
from sppo_jax.hardware.measured_figures import Profile, read_profile

# Above any machine; a planner that tries every divisor of more would not come back.
_MOST_DEVICES = 2**20
# Devices of a host that copy at once without slowing each other.
_FEW_DEVICES = 4


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Devices of one kind on hosts of one kind.

    Args:
        device: one device.
        num_hosts: hosts.
        devices_per_host: devices of each.
        host_bytes: memory of each host that activations may take.
        topology: chips along each dim of a TPU slice; empty elsewhere.
        spare: share of what a run gets of a device that plans leave free; None: as `capacity` says for the newest jax.
    """

    device: Device
    num_hosts: int
    devices_per_host: int
    host_bytes: int
    topology: tuple[int, ...] = ()
    spare: float | None = None

    @property
    def num_devices(self) -> int:
        return self.num_hosts * self.devices_per_host

    @property
    def num_linked(self) -> int:
        """Devices that are joined by the links of a host: those of the host, or of several."""
        return max(self.devices_per_host, self.device.linked_devices)

    @property
    def device_host_bytes(self) -> int:
        """Host memory that one device can have for itself; at least 1, because shares of it are shown."""
        return max(1, self.host_bytes // self.devices_per_host)

    @property
    def host_link_bytes_s(self) -> float:
        """Bytes a second of a device to its host, one way, while all devices of the host copy both ways."""
        share = self.device.host_memory_bytes_s / (2 * self.devices_per_host)
        return min(self.device.host_link_bytes_s, self._beside_others_bytes_s, share)

    @property
    def shares_host_link(self) -> bool:
        """Whether what is assumed of a host's other devices slows a device's copies."""
        return self.host_link_bytes_s == self._beside_others_bytes_s

    @property
    def _beside_others_bytes_s(self) -> float:
        few, many = self.device.host_links_bytes_s
        return few if self.devices_per_host <= _FEW_DEVICES else many

    @property
    def slot_bytes_s(self) -> float:
        """Bytes a second of what a device copies to its host and sends to other hosts, together; inf: apart."""
        device = self.device
        if self.num_hosts == 1:
            return math.inf
        return max(device.slot_bytes_s, device.host_link_bytes_s, device.network_bytes_s)

    @property
    def name(self) -> str:
        """The name that `parse_cluster` reads."""
        shape = self.topology or (self.num_hosts, max(1, self.devices_per_host // self.device.devices_per_chip))
        if self.device.platform == "tpu":
            shape = self.topology or shape_of_chips(self.device.name, math.prod(shape)) or shape
        return f"{self.device.name}:{'x'.join(map(str, shape))}"

    def link_bytes_s(self, span: int) -> float:
        """Returns bytes a second, one way, between members that span so many neighbouring devices."""
        return self.device.link_bytes_s if span <= self.num_linked else self.device.network_bytes_s


def make_cluster(device: Device, num_devices: int = 1) -> Cluster:
    """Returns usual hosts of a device, as few as hold `num_devices`; a lone host has no more devices than asked for."""
    per_host = num_devices if device.name == "cpu" else min(num_devices, device.devices_per_host)
    num_hosts = -(-num_devices // per_host)
    return Cluster(device=device, num_hosts=num_hosts, devices_per_host=per_host, host_bytes=device.host_bytes)


def _nearest(name: str) -> list[str]:
    """Returns the known devices whose names begin as this one, then those that are spelled like this one."""
    begin = sorted((known for known in DEVICES if f"{known}-".startswith(f"{name}-")), key=len)
    return [*begin, *(known for known in difflib.get_close_matches(name, DEVICES) if known not in begin)]


def parse_cluster(text: str) -> Cluster:
    """Reads NAME:HOSTSxDEVICES (e.g. a100-80g:16x8), or a TPU slice by its chips (e.g. v5p:4x4x4).

    Raises:
        ValueError: the device is not known, the shape is not positive whole numbers, or there is no such cluster.
    """
    name, _, shape = text.strip().partition(":")
    rule = "a cluster must read NAME:HOSTSxDEVICES, e.g. a100-80g:16x8, h200:1x1, or a TPU slice such as v5p:4x4x4"
    if name not in DEVICES:
        raise ValueError(
            f"{rule}, got {text!r}; name one of the devices {', '.join(_nearest(name.lower()) or DEVICES)}"
        )
    device = DEVICES[name]
    sizes = shape.split("x")
    if not all(size.isdecimal() and int(size) > 0 for size in sizes):
        raise ValueError(f"{rule}, with every size at least 1, got {text!r}; give the sizes")
    dims = tuple(map(int, sizes))
    num_devices = math.prod(dims) * device.devices_per_chip
    if num_devices > _MOST_DEVICES:
        raise ValueError(
            f"a cluster must have at most {_MOST_DEVICES:,} devices, got {text!r}; make the cluster smaller"
        )
    if device.platform != "tpu":
        if len(dims) != 2:
            raise ValueError(f"{rule}, got {text!r} with {len(dims)} sizes; give hosts and devices a host")
        _check_host(device, *dims)
        return Cluster(device=device, num_hosts=dims[0], devices_per_host=dims[1], host_bytes=device.host_bytes)
    _check_slice(device, dims)
    return slice_of(device, dims)


def slice_of(device: Device, shape: tuple[int, ...]) -> Cluster:
    """Returns the TPU slice of a shape in chips."""
    return replace(make_cluster(device, math.prod(shape) * device.devices_per_chip), topology=shape)


def _check_host(device: Device, num_hosts: int, per_host: int) -> None:
    """Refuses hosts of more GPUs than there are; names the fewest hosts that have as many in all."""
    most = device.most_per_host
    if not most or per_host <= most:
        return
    total = num_hosts * per_host
    each = max(size for size in range(1, most + 1) if total % size == 0)
    raise ValueError(
        f"a host of {device.name} must have at most {most} devices, got {device.name}:{num_hosts}x{per_host}; name "
        f"{device.name}:{total // each}x{each}"
    )


def _check_slice(device: Device, shape: tuple[int, ...]) -> None:
    """Refuses a TPU slice that does not exist; names those nearest to it."""
    if shape in slice_shapes(device.name):
        return
    near = " or ".join(f"{device.name}:{'x'.join(map(str, one))}" for one in nearest_shapes(device.name, shape))
    raise ValueError(
        f"a TPU slice must have a shape that exists, got {device.name}:{'x'.join(map(str, shape))}, "
        f"{math.prod(shape)} chips; name {near}"
    )


def measured(device: Device, path: Path) -> Device:
    """Returns a device with the figures that `sppo profile` or `sppo check` measured in the place of the datasheet's.

    Args:
        device: the device, whose capacities stay.
        path: the JSON file.

    Raises:
        ValueError: the file cannot be read, lacks figures, or was measured on another device.
    """
    profile = read_profile(path)
    if profile.device != device.name:
        raise ValueError(
            f"hardware.measured must be of the device that the plan is for, {device.name}, got {path}, measured on "
            f"{profile.device}; run sppo profile or sppo check on {device.name}, or leave out hardware.measured"
        )
    return with_profile(device, profile)


def with_profile(device: Device, profile: Profile) -> Device:
    """Returns a device with measured figures in the place of the datasheet's; its capacities stay."""
    attention = profile.attention_rates
    forward, backward = attention.fastest("forward"), attention.fastest("backward")
    return replace(
        device,
        matmul_flops_s=profile.matmul_flops_s,
        matmul_efficiency=profile.layer_flops_s / profile.matmul_flops_s,
        elementwise_efficiency=0.0,  # whole layers were measured
        attention_efficiency=forward / profile.matmul_flops_s,
        attention_backward=2.5 * forward / backward,
        attention_backward_in_blocks=0.0,
        attention_rates=attention,
        attention_head_dim=profile.head_dim,
        attention_block=profile.attention_block,
        has_bundles=False,
        hbm_bytes_s=profile.hbm_bytes_s,
        host_link_bytes_s=profile.host_link_bytes_s or device.host_link_bytes_s,
        # Copies were measured on all devices at once.
        host_memory_bytes_s=math.inf if profile.host_link_bytes_s else device.host_memory_bytes_s,
        host_links_bytes_s=(math.inf, math.inf) if profile.host_link_bytes_s else device.host_links_bytes_s,
        link_bytes_s=min(filter(None, (profile.link_bytes_s, profile.all_to_all_bytes_s)), default=device.link_bytes_s),
        network_bytes_s=profile.network_bytes_s or device.network_bytes_s,
        loop_wait_share=1.0 if profile.loop_wait_share is None else profile.loop_wait_share,
        overhead_s=profile.overhead_s,
        overhead_tokens=round(profile.overhead_tokens),
        assumed=False,
    )
