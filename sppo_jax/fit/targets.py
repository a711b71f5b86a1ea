"""Devices to compile for that need not be there: datasheet values of GPUs, and the topologies that jax makes.

No accelerator is touched. A compiled program shows its memory and its schedule, not its speed.

Sources:
  A100: NVIDIA A100 Tensor Core GPU Architecture whitepaper (V1.0), table of GPU comparisons; A100 80GB datasheet.
  H100: NVIDIA H100 Tensor Core GPU Architecture whitepaper (V1.04), SXM5 columns; H100 datasheet.
  H200: NVIDIA H200 datasheet; the chip is the H100's, with other memory.
  B200: NVIDIA DGX B200 datasheet and Blackwell architecture technical brief; multiprocessors as in CUDA's listings.
  All others: NVIDIA's datasheets, and its whitepapers on GA102, Ada, Hopper and RTX Blackwell.
  The speed of memory is that of `hardware/datasheets.py`. Memory from H200 on: the total that nvidia-smi prints.
  Limits of a compute capability (threads, shared memory, registers): CUDA C++ Programming Guide, "Technical
  Specifications per Compute Capability".
"""

from dataclasses import dataclass, replace

from sppo_jax.hardware import DEVICES, Cluster

_KiB, _MiB, _GiB = 2**10, 2**20, 2**30
# Limits that hold for every compute capability listed here.
_COMMON = {
    "threads_per_warp": 32,
    "threads_per_block_limit": 1024,
    "shared_memory_per_block": 48 * _KiB,
    "registers_per_core_limit": 65536,
    "registers_per_block_limit": 65536,
    "block_dim_limit_x": 2**31 - 1,
    "block_dim_limit_y": 65535,
    "block_dim_limit_z": 65535,
    "thread_dim_limit_x": 1024,
    "thread_dim_limit_y": 1024,
    "thread_dim_limit_z": 64,
}
_VERSIONS = {
    "dnn_version": "9.10.0",
    "driver_version": "13.0.0",
    "runtime_version": "13.0.0",
    "compile_time_toolkit_version": "13.0.0",
}


@dataclass(frozen=True, kw_only=True)
class GpuTarget:
    """The values of a GPU that the compiler needs.

    Args:
        description: the name of the device.
        capability: compute capability, (major, minor).
        cores: streaming multiprocessors.
        fpus_per_core: float32 units of one multiprocessor.
        clock_ghz: boost clock.
        memory_bytes: device memory.
        l2_bytes: level-2 cache.
        shared_bytes: shared memory of a multiprocessor, of which a block may have all but 1 KiB.
        threads_per_core: threads that a multiprocessor holds.
    """

    description: str
    capability: tuple[int, int]
    cores: int
    fpus_per_core: int
    clock_ghz: float
    memory_bytes: int
    l2_bytes: int
    shared_bytes: int
    threads_per_core: int = 2048

    def text(self, bandwidth: float) -> str:
        """Writes the target as a text-format `stream_executor.GpuTargetConfigProto`.

        Args:
            bandwidth: bytes a second of device memory.
        """
        major, minor = self.capability
        feature = " feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
        numbers = {
            "core_count": self.cores,
            "fpus_per_core": self.fpus_per_core,
            "clock_rate_ghz": self.clock_ghz,
            "device_memory_size": self.memory_bytes,
            "memory_bandwidth": round(bandwidth),
            "l2_cache_size": self.l2_bytes,
            "shared_memory_per_block_optin": self.shared_bytes - _KiB,
            "shared_memory_per_core": self.shared_bytes,
            "threads_per_core_limit": self.threads_per_core,
            **_COMMON,
        }
        fields = [f"cuda_compute_capability {{ major: {major} minor: {minor}{feature} }}"]
        fields += [f"{name}: {value}" for name, value in numbers.items()]
        fields += [f'{name}: "{value}"' for name, value in _VERSIONS.items()]
        inner = "\n  ".join(fields)
        return (
            f'gpu_device_info {{\n  {inner}\n}}\nplatform_name: "CUDA"\ndevice_description_str: "{self.description}"\n'
        )


_A100 = GpuTarget(
    description="NVIDIA A100-SXM4-80GB",
    capability=(8, 0),
    cores=108,
    fpus_per_core=64,
    clock_ghz=1.41,
    memory_bytes=80 * _GiB,
    l2_bytes=40 * _MiB,
    shared_bytes=164 * _KiB,
)
_H100 = GpuTarget(
    description="NVIDIA H100 80GB HBM3",
    capability=(9, 0),
    cores=132,
    fpus_per_core=128,
    clock_ghz=1.98,
    memory_bytes=80 * _GiB,
    l2_bytes=50 * _MiB,
    shared_bytes=228 * _KiB,
)


def _like(like: GpuTarget, description: str, memory_mib: int, cores: int, ghz: float, l2_mib: int) -> GpuTarget:
    return replace(
        like,
        description=description,
        memory_bytes=memory_mib * _MiB,
        cores=cores,
        clock_ghz=ghz,
        l2_bytes=l2_mib * _MiB,
    )


# Cards for graphics as well: a smaller shared memory, and fewer threads at once.
_GA102 = replace(
    _A100, capability=(8, 6), fpus_per_core=128, shared_bytes=100 * _KiB, threads_per_core=1536, l2_bytes=6 * _MiB
)
_ADA, _RTX_BLACKWELL = replace(_GA102, capability=(8, 9)), replace(_GA102, capability=(12, 0))
GPUS = {
    "a100-40g": replace(_A100, description="NVIDIA A100-SXM4-40GB", memory_bytes=40 * _GiB),
    "a100-80g": _A100,
    "h100": _H100,
    "h100-pcie": replace(
        _H100,
        description="NVIDIA H100 PCIe",
        cores=114,
        clock_ghz=1.755,
    ),
    "gh200": replace(_H100, description="NVIDIA GH200 480GB", memory_bytes=97871 * _MiB),
    "h200": replace(_H100, description="NVIDIA H200", memory_bytes=143771 * _MiB),
    "b200": replace(
        _H100,
        description="NVIDIA B200",
        capability=(10, 0),
        cores=148,
        clock_ghz=1.965,
        memory_bytes=183359 * _MiB,
        l2_bytes=126 * _MiB,
    ),
    "gb200": replace(
        _H100,
        description="NVIDIA GB200",
        capability=(10, 0),
        cores=152,
        clock_ghz=2.062,
        memory_bytes=189471 * _MiB,
        l2_bytes=126 * _MiB,
    ),
    "b300": replace(
        _H100,
        description="NVIDIA B300",
        capability=(10, 3),
        cores=160,
        clock_ghz=1.92,
        memory_bytes=275040 * _MiB,
        l2_bytes=126 * _MiB,
    ),
    "a800-80g": replace(_A100, description="NVIDIA A800-SXM4-80GB"),
    "h800": replace(_H100, description="NVIDIA H800"),
    "h20": _like(_H100, "NVIDIA H20", 97871, 78, 1.98, 60),
    "a100-pcie": replace(_A100, description="NVIDIA A100 80GB PCIe"),
    "h100-nvl": _like(_H100, "NVIDIA H100 NVL", 95830, 132, 1.785, 50),
    "h200-nvl": _like(_H100, "NVIDIA H200 NVL", 143771, 132, 1.785, 50),
    "a30": _like(_A100, "NVIDIA A30", 24576, 56, 1.44, 24),
    "a40": _like(_GA102, "NVIDIA A40", 46068, 84, 1.74, 6),
    "a6000": _like(_GA102, "NVIDIA RTX A6000", 49140, 84, 1.8, 6),
    "a10": _like(_GA102, "NVIDIA A10", 23028, 72, 1.695, 6),
    "a10g": _like(_GA102, "NVIDIA A10G", 23028, 80, 1.71, 6),
    "rtx-3090": _like(_GA102, "NVIDIA GeForce RTX 3090", 24576, 82, 1.695, 6),
    "l4": _like(_ADA, "NVIDIA L4", 23034, 58, 2.04, 48),
    "l40": _like(_ADA, "NVIDIA L40", 46068, 142, 2.49, 96),
    "l40s": _like(_ADA, "NVIDIA L40S", 46068, 142, 2.52, 96),
    "rtx-6000-ada": _like(_ADA, "NVIDIA RTX 6000 Ada Generation", 49140, 142, 2.505, 96),
    "rtx-4090": _like(_ADA, "NVIDIA GeForce RTX 4090", 24564, 128, 2.52, 72),
    "rtx-5090": _like(_RTX_BLACKWELL, "NVIDIA GeForce RTX 5090", 32607, 170, 2.407, 96),
    "rtx-pro-6000": _like(_RTX_BLACKWELL, "NVIDIA RTX PRO 6000 Blackwell Server Edition", 97887, 188, 2.617, 128),
}

# What installs the compiler of a platform.
COMPILERS = {"gpu": "jax[cuda13]", "tpu": "jax[tpu]"}


def topology_of(cluster: Cluster) -> dict[str, str]:
    """Returns what jax makes the devices of a cluster from: the arguments of `get_topology_desc`."""
    if cluster.device.platform == "tpu":
        shape = "x".join(map(str, cluster.topology))
        return {"platform": "tpu", "topology_name": f"{cluster.device.name}:{shape}"}
    return {
        "platform": "cuda",
        "topology_name": "",
        "target_config": GPUS[cluster.device.name].text(DEVICES[cluster.device.name].hbm_bytes_s),
        "topology": f"1x{cluster.num_hosts}x{cluster.devices_per_host}",
    }


def compile_only_devices(cluster: Cluster) -> list:
    """Returns devices for which programs can be compiled, but not run.

    Args:
        cluster: a cluster of GPUs or TPUs.

    Raises:
        ValueError: there is no compiler for these devices, or the compiler is not installed.
    """
    platform = cluster.device.platform
    if platform not in COMPILERS:
        raise ValueError(f"the cluster of sppo fit must have GPUs or TPUs, got {cluster.name}; name another --cluster")
    from jax.experimental import topologies

    try:
        description = topologies.get_topology_desc(**topology_of(cluster))
    except Exception as error:  # whatever a plugin raises, the compiler is missing
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"the compiler for {cluster.name} must be installed, got {type(error).__name__}: {reason}; "
            f"install the compiler with: pip install '{COMPILERS[platform]}'"
        ) from error
    devices = list(description.devices)
    if len(devices) != cluster.num_devices:
        raise ValueError(
            f"the compiler must make the {cluster.num_devices} devices of {cluster.name}, got {len(devices)}"
        )
    return devices
