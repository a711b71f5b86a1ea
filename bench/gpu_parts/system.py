"""Part `system`: what the programs run on: libraries as they are loaded, limits, and memory."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import jax

from bench.gpu_parts.case import Case, Emit
from bench.gpu_parts.machine import host_bytes
from bench.gpu_parts.program import Program, Target, target_here
from sppo_jax.compat import cudnn_version
from sppo_jax.processes import environment


def cases(*, tiny: bool) -> list[Case]:
    """List the case."""
    return [Case(part="system", name="what is here", settings={}, expected_s=10 if tiny else 12, limit_s=120)]


def programs(settings: dict, target: Target) -> Iterator[Program]:
    """List no program: nothing is compiled."""
    yield from ()


def run(settings: dict, device: str, emit: Emit) -> None:
    """Read everything; a row each, and the reason in place of what cannot be read."""
    environment.set_memory_fraction()  # as a run does
    target = target_here(device)
    for what, read in (
        ("jax", lambda: jax.__version__),
        ("device", lambda: target.devices[0].device_kind),
        ("cuDNN, loaded", lambda: ".".join(map(str, cudnn_version() or ("none",)))),
        ("cuDNN, built for", lambda: _loaded("cudnn_build_version")),
        ("CUDA driver", lambda: _loaded("cuda_driver_get_version")),
        ("CUDA runtime", lambda: _loaded("cuda_runtime_get_version")),
        ("device memory that jax may take, GiB", lambda: _gib(target.devices[0].memory_stats()["bytes_limit"])),
        ("MemTotal, GiB", lambda: _meminfo_gib("MemTotal")),
        ("MemAvailable, GiB", lambda: _meminfo_gib("MemAvailable")),
        ("memory that this process may take, GiB", lambda: _gib(host_bytes())),
        ("ulimit -l", _locked_limit),
        ("processors", lambda: len(os.sched_getaffinity(0))),
        ("kernel", lambda: os.uname().release),
        ("huge pages", lambda: _text("/sys/kernel/mm/transparent_hugepage/enabled")),
    ):
        emit({"what": what, "value": _or_reason(read)})


def _or_reason(read: Callable[[], object]) -> str:
    """Return what was read as text; no failure here may hide the other rows."""
    try:
        return str(read())
    except Exception as error:
        return f"unknown: {type(error).__name__}: {error}"[:200]


def _loaded(name: str) -> int:
    from jax._src.lib import cuda_versions

    return getattr(cuda_versions, name)()


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f}"


def _meminfo_gib(name: str) -> str:
    lines = _text("/proc/meminfo").splitlines()
    return _gib(next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")))


def _text(path: str) -> str:
    return Path(path).read_text(encoding="utf-8").strip()


def _locked_limit() -> str:
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    shown = ["unlimited" if one == resource.RLIM_INFINITY else f"{_gib(one)} GiB" for one in (soft, hard)]
    return f"{shown[0]} (at most {shown[1]})"
