"""What a run gets of a device's memory, and of its host's.

XLA takes a share of a GPU's whole memory as its pool when it starts. Everything else of a process must have its place
in the rest: the context and the code of the kernels, handles of cuBLAS and cuDNN, CUDA graphs, the buffers of NCCL.

Sources:
  The pool is a share of the TOTAL memory: `CreateBFCAllocator`, openxla/xla, xla/pjrt/gpu/gpu_helpers.cc.
  NCCL on eight H100: 1.06 GB a device with the context before the first all-to-all and 4.34 GB behind it. An all-to-all
  gives each pair of neighbours 32 channels of a 10 MiB buffer and two of 2 MiB (NVIDIA/nccl#1685).
  NVIDIA's own JAX images and their guide take 0.9, or 0.8, of a device ("Tips for High-Performance LLMs with JAX and
  XLA", JAX-Toolbox). Here eight H100 get 0.92 and 32 of them 0.91.
"""

from sppo_jax.hardware.cluster import Cluster
from sppo_jax.hardware.device import Device
from sppo_jax.version import jaxlib_version

_MiB, _GiB = 2**20, 2**30
# XLA's pool takes no more than this share of a GPU, however large the GPU is, and no less than NVIDIA's guide names.
MOST_SHARE, _LEAST_SHARE = 0.95, 0.80
# Outside the pool: context, code of kernels, handles and CUDA graphs; and NCCL's rings.
_OWN_BYTES, _NCCL_BYTES = 2 * _GiB, _GiB
_NEIGHBOUR_BYTES = 32 * (10 + 2 * 2) * _MiB
# Buffers for devices of other hosts: two channels each, and no all-to-all of a plan spans many hosts.
_NETWORK_BYTES = _GiB
# Share of the pool that a plan leaves free, for fragments, for other kernels than those that were compiled for, and for
# the error of the prediction: on jax 0.12 HBM is at most 4.0% above it, in all but two
# compiled plans 3% (bench/results/figures/fit.md).
_SPARE = 0.03
# XLA of jax 0.10 and 0.11 takes up to 11% more for the same steps.
OLD_SPARE, _FIRST_TIGHT = 0.10, (0, 12)
# CPUs and TPUs: nothing is known to live beside the programs, and plans leave a share of the memory itself.
_OTHER_SPARE = 0.06
# Share of a host's memory that stays free: the system, reading data, the array that a blocking save writes.
_HOST_RESERVE = 0.05
# Share of a host's memory that the pools of its devices may pin: the bytes of a plan, and what regions of the pool have
# more. The rest is for the system, the driver's tables of pinned pages (0.6% of them), reading data and staging copies.
PINNED_SHARE = 0.97


def pool_share(cluster: Cluster) -> float:
    """Returns the share of a device's memory that XLA's pool is given; 1 where XLA has no such pool.

    Args:
        cluster: the devices of a run, whose number decides what NCCL needs.
    """
    device, neighbours = cluster.device, cluster.devices_per_host - 1
    if device.platform != "gpu":
        return 1.0
    outside = _OWN_BYTES
    if cluster.num_devices > 1:
        outside += _NCCL_BYTES + neighbours * _NEIGHBOUR_BYTES
    if cluster.num_hosts > 1:
        outside += _NETWORK_BYTES
    # In whole percents, so that the text of the variable of XLA and the planner's figure are the same number.
    percents = 100 * (device.hbm_bytes - outside) // device.hbm_bytes
    return min(MOST_SHARE, max(_LEAST_SHARE, percents / 100))


def pool_bytes(cluster: Cluster) -> int:
    """Returns the device memory that a run gets: XLA's pool on a GPU, all of it elsewhere."""
    return int(cluster.device.hbm_bytes * pool_share(cluster))


def spare_share(cluster: Cluster) -> float:
    """Returns the share of what a run gets that plans leave free."""
    if cluster.spare is not None:
        return cluster.spare
    return _SPARE if cluster.device.platform == "gpu" else _OTHER_SPARE


def installed_spare(device: Device) -> float | None:
    """Returns the share that plans for a device leave free with the jax of this machine; None: as with the newest."""
    return OLD_SPARE if device.platform == "gpu" and compiler_takes_more() else None


def compiler_takes_more() -> bool:
    """Returns whether the jax of this machine is one whose XLA for GPUs takes up to 11% more than plans predict."""
    return () < jaxlib_version() < _FIRST_TIGHT


def usable_bytes(cluster: Cluster) -> int:
    """Returns the device memory that a plan may take."""
    return max(1, int(pool_bytes(cluster) * (1 - spare_share(cluster))))


def usable_host_bytes(cluster: Cluster) -> int:
    """Returns the host memory that a plan may take for a device; of GPUs no more than can be pinned, in whole GiB."""
    usable = int(cluster.device_host_bytes * (1 - _HOST_RESERVE))
    if cluster.device.platform == "gpu":
        usable = min(usable, most_pinned_bytes(cluster) // _GiB * _GiB)
    return max(1, usable)


def most_pinned_bytes(cluster: Cluster) -> int:
    """Returns the bytes that XLA's pool of pinned memory may take for a device."""
    return int(cluster.host_bytes * PINNED_SHARE) // cluster.devices_per_host
