"""Which GPUs a process takes where several processes share a host, of Slurm or another launcher; imports no jax."""

from __future__ import annotations

import re
from collections.abc import Mapping

from sppo_jax.hardware import num_gpus


def own_gpus(environ: Mapping[str, str]) -> tuple[int, ...] | None:
    """Returns the numbers of the GPUs that this process takes, among those that the process sees; None: all of them.

    A task that is alone on its node takes all. Tasks that see all GPUs of their node take equal parts, in the order of
    the tasks. A task to which Slurm has bound some of the GPUs (--gpus-per-task, --gpu-bind) sees no others, and takes
    all that it sees, whatever its number on the node is.

    Args:
        environ: the environment of the process.

    Raises:
        ValueError: a node has fewer GPUs than tasks.
    """
    local_id = environ.get("SLURM_LOCALID", "")
    if not local_id.isdecimal() or environ.get("JAX_LOCAL_DEVICE_IDS"):
        return None  # not a task of Slurm, or jax reads the variable itself
    num_tasks, number = _tasks_of_node(environ), int(local_id)
    if num_tasks == 1:
        return None
    visible, of_node = _visible(environ), _count(environ, "SLURM_GPUS_ON_NODE")
    if visible is not None and (visible < of_node or (visible == 1 and not of_node)):
        return None
    count = of_node if visible is None else visible
    if not count or environ.get("JAX_PLATFORMS") == "cpu":
        return (number,)
    if count < num_tasks:
        raise ValueError(
            f"a node must have a GPU for each of its tasks, got {num_tasks} tasks and {count} GPUs; lower "
            "--ntasks-per-node, or raise --gpus-per-node"
        )
    return share_of(number, num_tasks, count)


def share_of(local_id: int, local_count: int, num_devices: int | None) -> tuple[int, ...] | None:
    """Returns the devices that one of the processes of a host takes, in equal parts; None: all.

    Args:
        local_id: number of the process on its host, from 0.
        local_count: number of processes on the host; 0: unknown, and each takes one.
        num_devices: devices that the process can see; None: unknown.
    """
    if num_devices is None:
        return (local_id,)
    if num_devices <= local_id or num_devices < local_count:
        return None  # the launcher has given each process devices of its own
    part = num_devices // local_count if local_count else 1
    return tuple(range(local_id * part, (local_id + 1) * part))


def _tasks_of_node(environ: Mapping[str, str]) -> int:
    """Returns how many tasks share this process's node; 0 if Slurm does not say."""
    text = environ.get("SLURM_STEP_TASKS_PER_NODE", environ.get("SLURM_TASKS_PER_NODE", ""))  # as 8(x3),4
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(times or 1)
    node = _count(environ, "SLURM_NODEID")
    return counts[node] if node < len(counts) else 0


def _visible(environ: Mapping[str, str]) -> int | None:
    """Returns how many GPUs this process sees, also where a cgroup hides the others; None if nothing says so."""
    text = environ.get("CUDA_VISIBLE_DEVICES")
    found = num_gpus(environ)
    return found if found is not None else len(text.split(",")) if text else None


def _count(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    return int(text) if text.isdecimal() else 0
