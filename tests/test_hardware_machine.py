"""What the system says of the machine at hand, on made-up file systems."""

import os

import pytest

from sppo_jax.hardware import machine
from sppo_jax.hardware.pinned_pool import REFUSED_BYTES

GIB = 2**30


def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMORY = {"proc/meminfo": "MemTotal:       1048576 kB\nMemFree: 1 kB\n"}  # 1 GiB
UNLIMITED = "9223372036854771712\n"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, GIB),
        ({"sys/fs/cgroup/memory.max": "536870912\n"}, GIB // 2),
        ({"sys/fs/cgroup/memory.max": "max\n"}, GIB),
        ({"sys/fs/cgroup/memory.max": str(2 * GIB)}, GIB),
        ({"sys/fs/cgroup/memory/memory.limit_in_bytes": UNLIMITED}, GIB),
        ({"sys/fs/cgroup/memory/memory.limit_in_bytes": "268435456\n"}, GIB // 4),
        # A task of Slurm: its own group has no limit, the job's has.
        (
            {
                "proc/self/cgroup": "0::/slurm/job_1/step_0\n",
                "sys/fs/cgroup/slurm/job_1/step_0/memory.max": "max",
                "sys/fs/cgroup/slurm/job_1/memory.max": "268435456",
            },
            GIB // 4,
        ),
        (
            {
                "proc/self/cgroup": "5:cpu,cpuacct:/a\n4:hugetlb,memory:/slurm/job_1\n",
                "sys/fs/cgroup/memory/slurm/job_1/memory.limit_in_bytes": "134217728",
                "sys/fs/cgroup/memory/a/memory.limit_in_bytes": "1",
            },
            GIB // 8,
        ),
        ({"proc/self/cgroup": "nonsense\n", "sys/fs/cgroup/memory.max": "many\n"}, GIB),
    ],
    ids=["no group", "v2", "v2 max", "v2 above", "v1 unlimited", "v1", "v2 of a job", "v1 of a job", "nonsense"],
)
def test_the_memory_is_the_least_of_the_machine_and_its_control_groups(tmp_path, files, expected):
    assert machine.host_bytes(write(tmp_path, MEMORY | files)) == expected


def test_without_meminfo_the_system_is_asked(tmp_path):
    assert machine.host_bytes(tmp_path) == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < machine.host_bytes() <= machine.host_bytes(tmp_path)


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan 2 2025\nGCC version: 12.2.0", 570),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.126.20  Release Build", 580),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  590.1.2  Release Build", 590),
        ("something else", None),
    ],
)
def test_drivers_from_r580_on_refuse_512_gib(tmp_path, text, version):
    write(tmp_path, {"proc/driver/nvidia/version": text})
    assert machine.driver_version(tmp_path) == version
    assert machine.refused_bytes(tmp_path) == (None if version == 570 else REFUSED_BYTES)


def test_without_a_driver_the_newer_ones_count(tmp_path):
    assert machine.driver_version(tmp_path) is None and machine.refused_bytes(tmp_path) == REFUSED_BYTES
