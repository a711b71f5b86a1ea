"""The machine that is measured, as its own tools describe it: no jax, so that the parent never holds the GPU."""

from __future__ import annotations

import platform
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from sppo_jax.hardware import DEVICES, find_device, parse_cluster
from sppo_jax.hardware.machine import host_bytes

_GIB = 2**30
_QUERY = "index,name,memory.total,memory.used,driver_version"
# A GPU with more than this in use has another process on it, whose work would spoil every time.
_IDLE_BYTES = 2 * _GIB
# Less than this and not even the smallest case on a GPU runs.
_LEAST_HBM_BYTES, _LEAST_HOST_BYTES = 16 * _GIB, 24 * _GIB


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One device and its host.

    Args:
        device: name in `sppo_jax.hardware.DEVICES`.
        description: the device's own name.
        driver: version of its driver; empty on a CPU.
        hbm_bytes: memory of the device.
        host_bytes: memory of the host that this process may take.
        index: which GPU of the machine it is; empty on a CPU.
        others: which other GPUs of the machine are idle and of the same kind; the other TPUs.
        topology: of TPUs that programs are compiled for without being run.
    """

    device: str
    description: str
    driver: str
    hbm_bytes: int
    host_bytes: int
    index: str = ""
    others: tuple[str, ...] = ()
    topology: str = ""

    def indices(self, count: int) -> str:
        """Return the first GPUs of the machine, separated by commas."""
        return ",".join((self.index, *self.others)[:count])

    @property
    def platform(self) -> str:
        """The compiler's name of the device: "cpu", "gpu" or "tpu"."""
        return DEVICES[self.device].platform


def cpu_machine() -> Machine:
    """Return this machine without its accelerators, for `--tiny`."""
    return Machine(device="cpu", description=cpu_name(), driver="", hbm_bytes=host_bytes(), host_bytes=host_bytes())


def absent_machine(device: str) -> Machine:
    """Return a GPU that programs are compiled for without being run.

    Args:
        device: name of a GPU in `sppo_jax.hardware.DEVICES`.

    Raises:
        ValueError: it is no such name.
    """
    gpus = [name for name, known in DEVICES.items() if known.platform == "gpu"]
    if device not in gpus:
        raise ValueError(f"--compile takes one of {', '.join(gpus)}, got {device!r}; correct the name")
    known = DEVICES[device]
    return Machine(
        device=device,
        description=f"{device}, compiled for and not run",
        driver="",
        hbm_bytes=known.hbm_bytes,
        host_bytes=known.host_bytes,
    )


def absent_tpus(topology: str) -> Machine:
    """Return TPUs that programs are compiled for without being run.

    Args:
        topology: a slice by its chips, e.g. "v5p:2x2x1".

    Raises:
        ValueError: it is none.
    """
    try:
        cluster = parse_cluster(topology)
    except ValueError:
        cluster = None
    if cluster is None or cluster.device.platform != "tpu":
        raise ValueError(f"--compile takes a slice of TPUs such as v5p:2x2x1, got {topology!r}; correct the name")
    return Machine(
        device=cluster.device.name,
        description=f"{topology}, compiled for and not run",
        driver="",
        hbm_bytes=cluster.device.hbm_bytes,
        host_bytes=cluster.device.host_bytes,
        others=tuple(map(str, range(1, cluster.num_devices))),
        topology=topology,
    )


def tpu_machine(given_host_bytes: int | None = None) -> Machine:
    """Look for TPUs that the planner knows, in a process that gives them back.

    Args:
        given_host_bytes: memory of the host; None: what its system shows.

    Raises:
        ValueError: there are none; one line that says what to do.
    """
    code = (
        "import jax; found = jax.local_devices(); print(found[0].platform, found[0].device_kind, len(found), sep=',')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300)
    return choose_tpus(done.stdout.strip().rpartition("\n")[2], given_host_bytes or host_bytes())


def choose_tpus(listed: str, host_bytes: int) -> Machine:
    """Return the TPUs of what jax lists.

    Args:
        listed: platform, kind and count of its devices, separated by commas.
        host_bytes: memory of the host.

    Raises:
        ValueError: they are no TPUs, or the planner does not know them.
    """
    platform, _, rest = listed.partition(",")
    kind, _, count = rest.rpartition(",")
    if platform != "tpu":
        got = f"{count} {platform} devices" if platform else "none"
        raise ValueError(
            f"the benchmark needs TPUs that no process uses, got {got}; end other processes, install jax[tpu], or "
            "give --tiny"
        )
    device = find_device(kind)
    others = tuple(map(str, range(1, int(count))))
    return Machine(
        device=device.name,
        description=kind,
        driver="",
        hbm_bytes=device.hbm_bytes,
        host_bytes=host_bytes,
        index="0",
        others=others,
    )


def gpu_machine(visible: str | None = None, given_host_bytes: int | None = None) -> Machine:
    """Look for one idle GPU that the planner knows.

    Args:
        visible: CUDA_VISIBLE_DEVICES as the user set it; None: every GPU of the machine.
        given_host_bytes: memory of the host; None: what its system shows.

    Raises:
        ValueError: there is none, it is busy, or the machine is too small; one line that says what to do.
    """
    try:
        text = subprocess.run(
            ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise ValueError(_none_found(f"nvidia-smi gave {type(error).__name__}")) from None
    return choose_gpu(text, visible, given_host_bytes or host_bytes())


def _none_found(why: str) -> str:
    return f"the benchmark needs one idle GPU, got none ({why}); run it on a machine with a GPU, or give --tiny"


def choose_gpu(listed: str, visible: str | None, host_bytes: int) -> Machine:
    """Choose the first idle GPU of what nvidia-smi lists.

    Args:
        listed: lines of index, name, total MiB, used MiB, driver.
        visible: the indices that may be used, separated by commas; None: all.
        host_bytes: memory of the host.

    Raises:
        ValueError: no GPU is listed, all are busy, the planner does not know the device, or the machine is too small.
    """
    rows = [[cell.strip() for cell in line.split(",")] for line in listed.splitlines() if line.count(",") == 4]
    allowed = None if visible is None else visible.split(",")
    rows = [row for row in rows if allowed is None or row[0] in allowed]
    if not rows:
        raise ValueError(_none_found("nvidia-smi lists no GPU that CUDA_VISIBLE_DEVICES allows"))
    index, name, total_mib, used_mib, driver = min(rows, key=lambda row: not _is_idle(row))
    used_bytes = float(used_mib) * 2**20
    if used_bytes > _IDLE_BYTES:
        raise ValueError(
            f"the benchmark needs one idle GPU, got {name} with {used_bytes / _GIB:.1f} GiB in use; "
            "end the other process, or name an idle GPU in CUDA_VISIBLE_DEVICES"
        )
    hbm_bytes = int(float(total_mib)) * 2**20
    for what, got, least in (
        ("device memory", hbm_bytes, _LEAST_HBM_BYTES),
        ("host memory", host_bytes, _LEAST_HOST_BYTES),
    ):
        if got < least:
            raise ValueError(
                f"the benchmark needs {least / _GIB:.0f} GiB of {what}, got {got / _GIB:.1f} GiB; take a larger machine"
            )
    return Machine(
        device=find_device(name).name,
        description=name,
        driver=driver,
        hbm_bytes=hbm_bytes,
        host_bytes=host_bytes,
        index=index,
        others=tuple(row[0] for row in rows if row[0] != index and row[1] == name and _is_idle(row)),
    )


def _is_idle(row: list[str]) -> bool:
    """Return whether a line of nvidia-smi, cut into cells, is of an idle GPU."""
    return float(row[3]) * 2**20 <= _IDLE_BYTES


def cpu_name() -> str:
    """Return the processor's own name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
