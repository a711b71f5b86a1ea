"""What a process sets before jax's backend starts: compiler flags, limits of memory and waiting, simulated devices.

Only this module and `compat` write the environment. Variables that the user has set stay. Importing this module imports
no jax, and nothing here starts a backend.
"""

from __future__ import annotations

import contextlib
import ctypes
import difflib
import functools
import math
import mmap
import os
import re
import shlex
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from sppo_jax.files.format_bytes import format_bytes
from sppo_jax.hardware import local_cluster, machine, visible_gpus
from sppo_jax.hardware.capacity import MOST_SHARE, OLD_SPARE, compiler_takes_more, pool_share
from sppo_jax.hardware.pinned_limit import fill_requests, limit_of, pinned_with
from sppo_jax.processes import gpu_start
from sppo_jax.version import jaxlib_version

if TYPE_CHECKING:
    from sppo_jax.plan.plan import Plan

YNN_FLAG = "--xla_cpu_experimental_ynn_fusion_type"
HOST_LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
FRACTION, OLD_FRACTION = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"

# The versions of jaxlib for which wrong sums were observed. XLA ends a process with a flag that XLA does not know, so a
# newer jaxlib is added here only after a check that it knows the flag.
_FIRST_WRONG, _LAST_WRONG = (0, 10, 2), (0, 12, 0)
# Flags that sppo sets itself, beside the quick ones; every version of XLA knows the first.
_COUNT_FLAG = "--xla_force_host_platform_device_count"
_OWN_FLAGS = (_COUNT_FLAG, YNN_FLAG, "--xla_cpu_collective_call_terminate_timeout_seconds")
_DEFAULT_HOST_GB = 64
_GPU = ("gpu", "cuda", "rocm")
_CUDA_PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin")
_GiB = 2**30


def prepare_to_compile() -> None:
    """Prepares this process to compile for devices that are not here; call it before jax is imported.

    jax looks for no accelerator then, and the compilers get the flags without which they ask for one.
    """
    use_cpu()
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    # Else a second process of this machine ends at libtpu's lock.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    warn_of_unknown_flags()
    from sppo_jax.compat import deviceless_flags  # imports jax, which reads JAX_PLATFORMS

    for name, value in deviceless_flags().items():
        add_xla_flag(name, value)


def simulate_devices(num_devices: int) -> None:
    """Makes jax see `num_devices` devices on the CPU; call it before jax looks for devices."""
    use_cpu()
    add_xla_flag(_COUNT_FLAG, num_devices, replace=True)
    # With fewer cores than devices a collective waits for devices that have not had their turn: allow more time.
    add_xla_flag("--xla_cpu_collective_call_terminate_timeout_seconds", 600)


def quick_flags() -> dict[str, str]:
    """Returns flags of XLA, without dashes, with which small programs for CPUs compile soon and run slowly."""
    # By default a program's code is split into 32 parts, for as many cores.
    flags = {"xla_backend_optimization_level": "0", "xla_cpu_parallel_codegen_split_count": "1"}
    # Small programs take three times as long to compile with these emitters. Later versions do not know the name.
    return flags | ({"xla_cpu_use_fusion_emitters": "false"} if jaxlib_version() < (0, 11) else {})


def compile_soon() -> None:
    """Has XLA spend little time on programs for CPUs; call it before jax looks for devices."""
    for name, value in quick_flags().items():
        add_xla_flag(f"--{name}", value)


def use_cpu() -> None:
    """Has jax take the CPU alone; call it before jax looks for devices."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    if "jax" in sys.modules:  # which has read the variable already
        sys.modules["jax"].config.update("jax_platforms", "cpu")


def add_xla_flag(name: str, value: object, *, replace: bool = False) -> None:
    """Adds a flag to XLA_FLAGS; a flag that is already there keeps its value.

    Args:
        name: the name of the flag, with its two dashes.
        value: the value after the equals sign.
        replace: whether a flag that is already there gets this value.
    """
    words = os.environ.get("XLA_FLAGS", "").split()
    others = [word for word in words if word.partition("=")[0] != name]
    if len(others) == len(words) or replace:
        os.environ["XLA_FLAGS"] = " ".join([*others, f"{name}={value}"])


def skip_cuda_without_driver() -> None:
    """Has jax take the CPU, and warns in a line, where jax for CUDA is installed and no NVIDIA driver is.

    Otherwise jax prints a long traceback before it takes the CPU. Call before jax's backend starts.
    """
    if os.environ.get("JAX_PLATFORMS") or not _has_cuda_plugin() or _driver_loads():
        return
    warnings.warn(
        "jax for CUDA needs NVIDIA's driver, got no libcuda.so.1 on this machine, so jax uses the CPU; install the "
        "driver (in a container: docker run --gpus all), or set JAX_PLATFORMS=cpu",
        stacklevel=2,
    )
    use_cpu()


def _has_cuda_plugin() -> bool:
    """Returns whether jax for CUDA is installed."""
    for name in _CUDA_PLUGINS:
        with contextlib.suppress(PackageNotFoundError):
            return bool(version(name))
    return False


def _driver_loads() -> bool:
    """Returns whether the library of NVIDIA's driver can be loaded."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def avoid_wrong_sums() -> None:
    """Turns off the fusions with which jaxlib 0.10.2 to 0.12.0 adds wrongly on CPUs; warns if it is too late.

    XLA:CPU gives products, with the sums after them, to the library YNNPACK. In all of these versions the sums of a
    batched product with a broadcast operand are wrong; up to 0.10.2 also those of many products of a matrix and a
    vector (jax-ml/jax#39103). Up to 0.11.0 some sums crash or hang (jax-ml/jax#39257, jax-ml/jax#40412).
    """
    if not _FIRST_WRONG <= jaxlib_version() <= _LAST_WRONG:
        return
    platform = _running_platform()
    if platform is None:
        add_xla_flag(YNN_FLAG, "")
    elif platform == "cpu" and YNN_FLAG not in os.environ.get("XLA_FLAGS", ""):
        warnings.warn(
            f"jaxlib 0.10.2 to 0.12.0 returns WRONG SUMS of some products on CPUs, got jaxlib {version('jaxlib')} with "
            "its CPU backend already running: import sppo_jax before jax's first computation, or set "
            f"XLA_FLAGS={YNN_FLAG}= (with no value)",
            stacklevel=3,  # the line that imports sppo_jax
        )


def set_limits(plan: Plan | None) -> bool:
    """Sets the limits of a plan, of memory and of waiting; call it before jax looks for devices.

    Sets nothing if a backend runs already, or if JAX_PLATFORMS leaves out GPUs. A limit that the user has set stays.
    A warning says so where the plan has no room in it, or where it makes XLA pin more.

    Args:
        plan: the plan; None if no plan can be made before the devices are known: then the whole host may be pinned.

    Returns:
        Whether GPUs that start now have empty pools with this limit, so that `processes.host_pool` may fill them.
    """
    warn_of_unknown_flags()
    if not gpus_may_start():
        return False
    _set_fraction(plan)
    set_waiting_limits(plan)
    limit_gb = machine_gb() if plan is None else host_limit_gb(plan)
    if os.environ.get(HOST_LIMIT):
        if plan is not None:
            _check_given_limit(plan)
    elif limit_gb != _DEFAULT_HOST_GB:
        os.environ[HOST_LIMIT] = str(limit_gb)
    return plan is not None


def _check_given_limit(plan: Plan) -> None:
    """Warns of the user's limit where it is too small, or so large that the pool pins more than the plan needs."""
    needed_gb, given_gb = host_limit_gb(plan), _given_host_gb()
    if not max(plan.predicted.host_bytes) or given_gb == needed_gb:
        return
    pinned_gb = math.ceil(pinned_with(plan, given_gb, needed_gb, machine.refused_bytes()) / _GiB)
    if not pinned_gb or pinned_gb > needed_gb:
        does = f"makes XLA pin {pinned_gb}" if pinned_gb else f"lets XLA pin {given_gb}, too little for the plan"
        _warn_late(
            f"the plan needs {needed_gb} GiB of pinned host memory per device, {HOST_LIMIT}={given_gb} {does}",
            f"{HOST_LIMIT}={needed_gb} or nothing",
        )


def set_waiting_limits(plan: Plan | None, stall_s: float | str = "auto") -> None:
    """Sets how long GPUs wait for each other, see `gpu_start`; call it before jax looks for devices.

    Args:
        plan: the plan; None if no plan can be made before the devices are known.
        stall_s: `train.stall_s`; the first call counts.

    Raises:
        ValueError: XLA_FLAGS has a flag with which collectives fail or hang.
    """
    if gpus_may_start():
        gpu_start.check_flags(plan, os.environ.get("XLA_FLAGS", "").split())
        for name, value in gpu_start.variables(plan).items():
            os.environ[name] = os.environ.get(name) or value
        for name, seconds in gpu_start.waiting_flags(plan, stall_s).items():
            add_xla_flag(name, seconds)


def set_memory_fraction() -> None:
    """Allows XLA the share of a GPU's memory that plans count on; call it before jax looks for devices."""
    warn_of_unknown_flags()
    if gpus_may_start():
        _set_fraction(None)


def device_share(plan: Plan | None) -> float:
    """Returns the share of a GPU's memory that XLA's pool is given in a run on GPUs like those of this machine.

    Args:
        plan: the plan of the run; None if no plan has been made: then all GPUs of the machine take part.
    """
    try:
        here = local_cluster()
    except ValueError:
        return MOST_SHARE  # a GPU that only the section `hardware` describes
    if here.device.platform != "gpu":
        return MOST_SHARE
    # The other processes of a host have its other GPUs, and NCCL has buffers for these too.
    of_host = visible_gpus({"PATH": os.environ.get("PATH", "")}) or ()
    local, num_hosts = max(here.devices_per_host, len(of_host)), 2 if joined()[1] > 1 else 1
    if plan is not None:
        local = min(local, plan.mesh.num_devices)
        num_hosts = math.ceil(plan.mesh.num_devices / local)
    return pool_share(replace(here, devices_per_host=local, num_hosts=num_hosts))


def _set_fraction(plan: Plan | None) -> None:
    # The share also limits a pool without preallocation. jax refuses both names together.
    if not (os.environ.get(FRACTION) or os.environ.get(OLD_FRACTION)):
        os.environ[FRACTION] = str(device_share(plan))


def warn_of_unknown_flags() -> None:
    """Warns of flags in XLA_FLAGS that XLA does not know: XLA ends the process when its backend meets such a flag."""
    text = os.environ.get("XLA_FLAGS", "")
    if not text.lstrip().startswith("-") or _running_platform() is not None:
        return  # any other text is the name of a file with flags
    found: dict[str, str] = {}
    # The warning is only a hint, so errors here are ignored: XLA itself reads the flags.
    with contextlib.suppress(Exception):
        found = _unknown_flags(text)
    for flag, nearest in found.items():
        known = f" (the nearest flag is {nearest})" if nearest else ""
        warnings.warn(
            f"XLA_FLAGS must hold flags that XLA knows, got {flag}, which jaxlib {version('jaxlib')} does not know"
            f"{known}; XLA will end the process: correct the flag, or remove the flag from XLA_FLAGS",
            stacklevel=3,
        )


def check_memory_limits(plan: Plan) -> None:
    """Warns if the running GPU backend may take less memory than a plan needs.

    Args:
        plan: the plan to be run.
    """
    if _running_platform() not in _GPU:
        return
    if not (os.environ.get(FRACTION) or os.environ.get(OLD_FRACTION)):
        warnings.warn(
            "a process must be prepared for its plan before jax starts on GPUs, got one whose limits of memory are not "
            "set; call sppo_jax.prepare_process(plan) first",
            stacklevel=3,  # the line that calls value_and_grad
        )
        return
    from sppo_jax import compat

    pool_bytes, needed_bytes = compat.device_pool_bytes(), max(plan.predicted.hbm_bytes)
    if pool_bytes is not None and pool_bytes < needed_bytes:
        _warn_late(
            f"the plan needs {format_bytes(needed_bytes)} of a GPU, XLA takes at most {format_bytes(pool_bytes)}",
            f"{FRACTION}={device_share(plan)}",
        )
    elif pool_bytes is not None and compiler_takes_more() and pool_bytes * (1 - OLD_SPARE) < needed_bytes:
        warnings.warn(
            f"with jaxlib {version('jaxlib')}, whose compiler takes up to 11% more than predicted, a plan must leave "
            f"{OLD_SPARE:.0%} of XLA's pool of {format_bytes(pool_bytes)} free, got a plan of "
            f"{format_bytes(needed_bytes)}; plan again with hardware.hbm_spare={OLD_SPARE}, or install jax >= 0.12",
            stacklevel=3,  # the line that calls value_and_grad
        )
    limit_gb, needed_gb = _given_host_gb(), host_limit_gb(plan)
    if limit_gb < needed_gb:
        _warn_late(
            f"the plan pins {needed_gb} GiB of host memory per device, XLA pins at most {limit_gb}",
            f"{HOST_LIMIT}={needed_gb}",
        )


def host_limit_gb(plan: Plan) -> int:
    """Returns the limit of XLA's pool of pinned host memory for a plan, in GiB.

    XLA has one pool a device, each with this limit, whatever the number of processes. A pool grows by whole regions,
    and every page of a region is pinned. A run fills the pool to its limit, so the limit is what is pinned: the
    smallest with which a replay of the pool has room for the state, the program's host temporaries and the copy of an
    asynchronous save (`hardware.pinned_limit`). One more pool in each process stages copies of less than 1 GiB. It
    has the same limit and grows as it is used, to about 2 GiB; the share of a host that no plan pins is there for it.

    A plan that keeps nothing on the host gets XLA's default of 64, or twice what a save copies where that is more.
    """
    if not max(plan.predicted.host_bytes):
        return max(_DEFAULT_HOST_GB, math.ceil(2 * sum(plan.host_arrays.save) / _GiB))
    refused = machine.refused_bytes()
    limit_gb = limit_of(plan, refused)
    # A plan that no pool holds is refused before it runs; see `predict.pinned`.
    return math.ceil(max(plan.predicted.host_bytes) / _GiB) + 1 if limit_gb is None else limit_gb


def pool_requests(plan: Plan) -> tuple[int, ...]:
    """Returns the requests, in bytes, with which a run fills the pool of each device; none where it pins nothing."""
    if not max(plan.predicted.host_bytes):
        return ()
    return fill_requests(host_limit_gb(plan), machine.refused_bytes())


def joined() -> tuple[int, int]:
    """Returns this process's number and the number of processes that have joined; (0, 1) if none has."""
    if "jax" not in sys.modules:  # nothing has joined, and importing jax takes seconds
        return 0, 1
    from sppo_jax import compat

    return compat.distributed_place()


def machine_gb() -> int:
    """Returns the GiB of memory that this process may take."""
    return machine.host_bytes() // _GiB


@functools.cache
def _unknown_flags(text: str) -> dict[str, str]:
    """Returns the user's flags that no library of XLA has, each with the nearest flag of a library, or ""."""
    given = [word.partition("=")[0] for word in shlex.split(text) if word.startswith("--")]
    own = {*_OWN_FLAGS, *(f"--{name}" for name in quick_flags())}
    unknown = [flag for flag in given if flag not in own]
    libraries = list(_libraries()) if unknown else []
    for library in libraries:
        with _content(library) as content:
            unknown = [flag for flag in unknown if not _holds(content, flag[2:].encode())]
        if not unknown:
            return {}
    known: set[str] = set()
    for library in libraries[:1]:
        with _content(library) as content:
            known |= {f"--{name.decode()}" for name in re.findall(rb"(xla_[a-z0-9_]+)\0", content)}
    if _COUNT_FLAG not in known:
        return {}  # this version keeps the names in another place
    return {flag: next(iter(difflib.get_close_matches(flag, known, n=1, cutoff=0.85)), "") for flag in unknown}


@contextlib.contextmanager
def _content(library: Path) -> Iterator[mmap.mmap]:
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        yield content


def _libraries() -> Iterator[Path]:
    """Yields jaxlib's shared libraries, largest first, and those of plugins; each contains the names of its flags."""
    for package, pattern in (("jaxlib", "*.so*"), ("jax_plugins", "*/*.so*"), ("libtpu", "*.so*")):
        spec = find_spec(package)
        for folder in (spec and spec.submodule_search_locations) or ():
            yield from sorted(Path(folder).glob(pattern), key=lambda path: -path.stat().st_size)


def _holds(content: mmap.mmap, name: bytes) -> bool:
    """Returns whether a library contains a name with an end: names of fields, which are no flags, have none."""
    place = content.find(name)
    while place >= 0:
        after = content[place + len(name) : place + len(name) + 1]
        if after == b"\0":
            return True
        place = content.find(name, place + 1)
    return False


def _given_host_gb() -> int:
    text = os.environ.get(HOST_LIMIT) or str(_DEFAULT_HOST_GB)
    if not text.strip().isdecimal():
        raise ValueError(f"{HOST_LIMIT} must be a whole number of GB, got {text!r}; change or unset the variable")
    return int(text)


def gpus_may_start() -> bool:
    """Returns whether no backend runs yet and JAX_PLATFORMS does not leave out GPUs."""
    names = os.environ.get("JAX_PLATFORMS", "").lower().split(",")
    return _running_platform() is None and (names == [""] or any(name.strip() in _GPU for name in names))


def _running_platform() -> str | None:
    """Returns the platform of jax's default backend; None if no backend has started."""
    if "jax" not in sys.modules:
        return None
    from sppo_jax import compat

    return compat.running_platform()


def _warn_late(problem: str, setting: str) -> None:
    warnings.warn(
        f"{problem}; set {setting} in the environment before jax starts",
        stacklevel=4,  # the line that calls value_and_grad
    )
