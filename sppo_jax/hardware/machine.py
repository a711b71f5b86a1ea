"""The machine at hand, from what its system says of it: memory and the GPUs' driver; no accelerator is touched."""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath

from sppo_jax.hardware.pinned_pool import FIRST_REFUSING_DRIVER, REFUSED_BYTES

_ROOT = Path("/")


def host_bytes(root: Path = _ROOT) -> int:
    """Returns the memory that this process may take: the machine's, or the least that a control group allows.

    Args:
        root: of the file system, for tests.
    """
    return min([_total_bytes(root), *_group_limits(root)])


def _total_bytes(root: Path) -> int:
    try:
        text = (root / "proc/meminfo").read_text(encoding="utf-8")
        return int(re.search(r"^MemTotal:\s+(\d+) kB", text, re.MULTILINE)[1]) * 1024  # type: ignore[index]
    except (OSError, TypeError, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _group_limits(root: Path) -> list[int]:
    """Returns the limits of this process's control group and of all groups above it, of either version."""
    places = {("sys/fs/cgroup", "memory.max", "/"), ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "/")}
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, names, group = line.split(":", 2) if line.count(":") >= 2 else ("", "", "")
        if not names and group:
            places.add(("sys/fs/cgroup", "memory.max", group))
        elif "memory" in names.split(","):
            places.add(("sys/fs/cgroup/memory", "memory.limit_in_bytes", group))
    limits = []
    for base, name, group in places:
        path = PurePosixPath(group)
        for above in (path, *path.parents):
            try:
                limits.append(int((root / base / str(above).lstrip("/") / name).read_text(encoding="utf-8")))
            except (OSError, ValueError):
                continue  # no such group here, or "max"
    return limits


def driver_text(root: Path = _ROOT) -> str:
    """Returns the line in which the NVIDIA driver tells its version; "" if no driver is loaded.

    Args:
        root: of the file system, for tests.
    """
    try:
        return (root / "proc/driver/nvidia/version").read_text(encoding="utf-8").partition("\n")[0]
    except OSError:
        return ""


def driver_version(root: Path = _ROOT) -> int | None:
    """Returns the first number of the NVIDIA driver's version, e.g. 580; None if no driver is loaded.

    Args:
        root: of the file system, for tests.
    """
    found = re.search(r"Kernel Module\D*?(?:x86_64|aarch64)?\s+(\d+)\.\d", driver_text(root))
    return int(found[1]) if found else None


def refused_bytes(root: Path = _ROOT) -> int | None:
    """Returns the bytes from which on the driver refuses to register host memory in one call; None where it does not.

    Without a driver: those of the drivers that CUDA 13 needs.

    Args:
        root: of the file system, for tests.
    """
    version = driver_version(root)
    return None if version is not None and version < FIRST_REFUSING_DRIVER else REFUSED_BYTES


def lockable_bytes() -> int | None:
    """Returns the bytes that this process may lock in memory (ulimit -l); None for no limit."""
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft
