"""Which GPUs a process takes where several tasks of a Slurm step share a node; imports no jax."""

from __future__ import annotations

import re
from collections.abc import Mapping


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
    num_gpus = of_node if visible is None else visible
    if not num_gpus or not num_tasks or environ.get("JAX_PLATFORMS") == "cpu":
        return (number,)
    if num_gpus < num_tasks:
        raise ValueError(
            f"a node must have a GPU for each of its tasks, got {num_tasks} tasks and {num_gpus} GPUs; lower "
            "--ntasks-per-node, or raise --gpus-per-node"
        )
    share = num_gpus // num_tasks
    return tuple(range(number * share, (number + 1) * share))


def _tasks_of_node(environ: Mapping[str, str]) -> int:
    """Returns how many tasks share this process's node; 0 if Slurm does not say."""
    text = environ.get("SLURM_STEP_TASKS_PER_NODE", environ.get("SLURM_TASKS_PER_NODE", ""))  # as 8(x3),4
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(times or 1)
    node = _count(environ, "SLURM_NODEID")
    return counts[node] if node < len(counts) else 0


def _visible(environ: Mapping[str, str]) -> int | None:
    """Returns how many GPUs CUDA shows to this process; None if that is not limited."""
    text = environ.get("CUDA_VISIBLE_DEVICES")
    return None if not text else len(text.split(","))


def _count(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    return int(text) if text.isdecimal() else 0
