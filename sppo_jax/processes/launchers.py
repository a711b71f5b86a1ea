"""The place of this process among several, from what launchers set in the environment.

  SPPO_COORDINATOR    HOST:PORT of process 0: with the next two, or with the variables of a launcher that names no host
  SPPO_NUM_PROCESSES  processes of the run
  SPPO_PROCESS_ID     number of this process, from 0
  SPPO_PORT           port of process 0 where a launcher names none; 8476

torch.distributed.run, Kubeflow Trainer (pkg/runtime/framework/plugins), Open MPI 5, MPICH's hydra (also Intel MPI's),
Cray PALS, MVAPICH2 and Flux set their variables in each process that they start. jax recognizes the others.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from sppo_jax.hardware import num_gpus
from sppo_jax.processes.own_gpus import own_gpus, share_of
from sppo_jax.processes.rendezvous import ProcessPlace, join_address, split_address

_PORT = 8476
_BY_HAND = "SPPO_COORDINATOR, SPPO_NUM_PROCESSES and SPPO_PROCESS_ID"


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """The variables that a launcher sets in each process; of several names of one thing, the first that is set counts.

    Args:
        name: the launcher, for messages.
        process_id: of the number of this process, from 0.
        num_processes: of the number of processes.
        host: of the host of process 0, or of its HOST:PORT; (): the launcher does not say.
        port: of its port.
        next_port: whether the launcher itself may listen at this port, so that process 0 takes the next one.
        local_id: of the number of this process on its host; (): a process has all devices of its host.
        local_count: of the number of processes on this host.
        needs: how many of the variables of host, count and number must be there to be a sign of several processes: 1
            where nobody else uses the names.
        unless: variables beside which these say nothing.
    """

    name: str
    process_id: tuple[str, ...]
    num_processes: tuple[str, ...]
    host: tuple[str, ...] = ()
    port: tuple[str, ...] = ()
    next_port: bool = False
    local_id: tuple[str, ...] = ()
    local_count: tuple[str, ...] = ()
    needs: int = 1
    unless: tuple[str, ...] = ()


BY_HAND = Launcher(
    name="hand",
    process_id=("SPPO_PROCESS_ID",),
    num_processes=("SPPO_NUM_PROCESSES",),
    host=("SPPO_COORDINATOR",),
)
# Who started the process last comes first: torchrun runs in tasks of Slurm, and so do the daemons of mpirun.
BEFORE_JAX = (
    Launcher(
        name="Kubeflow Trainer",
        process_id=("JAX_PROCESS_ID", "JAX_PROCESS_INDEX"),
        num_processes=("JAX_NUM_PROCESSES", "JAX_PROCESS_COUNT"),
        host=("JAX_COORDINATOR_ADDRESS",),
        port=("JAX_COORDINATOR_PORT",),
    ),
    Launcher(
        name="Kubeflow's JAXJob",
        process_id=("PROCESS_ID",),
        num_processes=("NUM_PROCESSES",),
        host=("COORDINATOR_ADDRESS",),
        port=("COORDINATOR_PORT",),
        needs=3,
    ),
    Launcher(
        name="torchrun",
        process_id=("RANK",),
        num_processes=("WORLD_SIZE",),
        host=("MASTER_ADDR",),
        port=("MASTER_PORT",),
        next_port=True,
        local_id=("LOCAL_RANK",),
        local_count=("LOCAL_WORLD_SIZE",),
        needs=2,
    ),
    Launcher(
        name="Kubeflow Trainer's torch runtime",
        process_id=("PET_NODE_RANK",),
        num_processes=("PET_NNODES",),
        host=("PET_MASTER_ADDR",),
        port=("PET_MASTER_PORT",),
    ),
    Launcher(
        name="Open MPI",
        process_id=("OMPI_COMM_WORLD_RANK",),
        num_processes=("OMPI_COMM_WORLD_SIZE",),
        local_id=("OMPI_COMM_WORLD_LOCAL_RANK",),
        local_count=("OMPI_COMM_WORLD_LOCAL_SIZE",),
        unless=("OMPI_MCA_orte_hnp_uri",),  # Open MPI up to 4, in which jax finds the address of the first host
    ),
)
AFTER_JAX = (
    Launcher(
        name="MVAPICH2",
        process_id=("MV2_COMM_WORLD_RANK",),
        num_processes=("MV2_COMM_WORLD_SIZE",),
        local_id=("MV2_COMM_WORLD_LOCAL_RANK",),
        local_count=("MV2_COMM_WORLD_LOCAL_SIZE",),
    ),
    Launcher(
        name="MPICH",
        process_id=("PMI_RANK", "PALS_RANKID"),
        num_processes=("PMI_SIZE",),
        local_id=("MPI_LOCALRANKID", "PMI_LOCAL_RANK", "PALS_LOCAL_RANKID"),
        local_count=("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE", "PALS_LOCAL_SIZE"),
    ),
    Launcher(
        name="Flux",
        process_id=("FLUX_TASK_RANK",),
        num_processes=("FLUX_JOB_SIZE",),
        local_id=("FLUX_TASK_LOCAL_ID",),
    ),
    Launcher(
        name="PMIx",
        process_id=("PMIX_RANK",),
        num_processes=("OMPI_COMM_WORLD_SIZE",),
        unless=("SLURM_PROCID", "OMPI_MCA_orte_hnp_uri"),
    ),
)
_JAX_HINTS = ("SLURM_STEP_NODELIST", "OMPI_MCA_orte_hnp_uri", "TPU_WORKER_HOSTNAMES", "TPU_PROCESS_ADDRESSES")


def find_place(environ: Mapping[str, str] = os.environ, *, timeout_s: float = 600) -> ProcessPlace | None:
    """Returns this process's place among several; None if the process is alone.

    Args:
        environ: the environment.
        timeout_s: seconds to wait until the coordinator's name is known.

    Raises:
        ValueError: the environment contradicts itself, or tells of several processes and not enough to join them.
    """
    if environ.get("SPPO_NUM_PROCESSES") or environ.get("SPPO_PROCESS_ID"):
        return _read(BY_HAND, environ)
    troubles: list[ValueError] = []
    for found in _found(environ, timeout_s):
        if isinstance(found, ProcessPlace):
            return found
        troubles.append(found)
    if environ.get("SPPO_COORDINATOR"):
        troubles.append(_apart(BY_HAND, environ))
    if troubles:
        raise troubles[0]
    return None


def _found(environ: Mapping[str, str], timeout_s: float) -> Iterator[ProcessPlace | ValueError]:
    """Yields the places that launchers give, and the errors of those that say too little."""
    yield from _of_rows(BEFORE_JAX, environ)
    try:
        detected = _detected_place(environ, timeout_s)
    except ValueError as trouble:
        detected = None
        yield trouble
    if detected is not None:
        yield replace(detected, coordinator=environ.get("SPPO_COORDINATOR") or detected.coordinator)
    yield from _of_rows(AFTER_JAX, environ)


def _of_rows(rows: tuple[Launcher, ...], environ: Mapping[str, str]) -> Iterator[ProcessPlace | ValueError]:
    """Yields places and errors of rows; raises the error of a row that nobody else can mean, with both its numbers."""
    for row in rows:
        count, number, host = (
            bool(environ.get(_name(environ, names))) for names in (row.num_processes, row.process_id, row.host)
        )
        # torch's names are generic, and the host alone is what batch scripts export.
        signs = count + number + (host if row.needs != 2 else 0)
        if signs < row.needs or any(name in environ for name in row.unless):
            continue
        try:
            place = _read(row, environ)
        except ValueError as trouble:
            if row.needs == 1 and count and number:
                raise
            yield trouble
            continue
        if place is not None:
            yield place


def _read(row: Launcher, environ: Mapping[str, str]) -> ProcessPlace | None:
    """Returns the place that one launcher gives; None if it says that the process is alone.

    Raises:
        ValueError: variables are missing, or contradict each other.
    """
    count_name, id_name = _name(environ, row.num_processes), _name(environ, row.process_id)
    count = _whole(row, count_name, environ)
    if count == 1 and environ.get(id_name, "0").strip() in ("", "0"):
        return None
    if row.host and not _address(row, environ):
        raise _apart(row, environ)
    process_id = _whole(row, id_name, environ)
    if count < 1:
        raise ValueError(f"{count_name} must be at least 1, got {count}; set the number of processes")
    if process_id >= count:
        raise ValueError(
            f"{id_name} must be from 0 to {count_name} - 1 = {count - 1}, got {process_id}; number the processes from 0"
        )
    address = _address(row, environ)
    if address is None:
        raise ValueError(
            f"processes of {row.name} on several hosts must know where process 0 is, got {id_name}={process_id} and "
            f"{count_name}={count} alone; set SPPO_COORDINATOR=HOST:PORT of process 0 in all of them "
            "(SPPO_NUM_PROCESSES=1 runs alone)"
        )
    split_address(address)
    here = [environ.get(_name(environ, names), "") for names in (row.local_id, row.local_count)]
    return ProcessPlace(
        coordinator=address,
        num_processes=count,
        process_id=process_id,
        local_device_ids=own_gpus(environ) if row is BY_HAND else _local_ids(here[0], here[1], environ),
        names=(count_name, id_name),
    )


def _name(environ: Mapping[str, str], names: tuple[str, ...]) -> str:
    """Returns the first of several names of one thing that is set; the first of all if none is, and "" of no names."""
    return next((name for name in names if environ.get(name)), next(iter(names), ""))


def _whole(row: Launcher, name: str, environ: Mapping[str, str]) -> int:
    if not environ.get(name):
        raise _apart(row, environ)
    if not environ[name].strip().isdecimal():
        raise ValueError(f"{name} must be a whole number, got {environ[name]!r}; correct the variable")
    return int(environ[name])


def _apart(row: Launcher, environ: Mapping[str, str]) -> ValueError:
    """Returns the error of variables that belong together and are not all there."""
    names = [_name(environ, names) for names in (row.host, row.num_processes, row.process_id) if names]
    given = [name for name in names if environ.get(name)]
    missing = [name for name in names if name not in given]
    several = "both" if len(names) == 2 else "all three"
    change = f"set {several}, or none for one process"
    if row is not BY_HAND:
        change = f"set {several}, or {_BY_HAND} (SPPO_NUM_PROCESSES=1 runs alone)"
    return ValueError(
        f"{', '.join(names)} must be set together, got {', '.join(given)} without {', '.join(missing)}; {change}"
    )


def _address(row: Launcher, environ: Mapping[str, str]) -> str | None:
    """Returns HOST:PORT of process 0: as given by hand, by the launcher, for torch, or on the only host; None if open.

    Raises:
        ValueError: a port is no number.
    """
    torch = Launcher(name="", process_id=(), num_processes=(), host=("MASTER_ADDR",), port=("MASTER_PORT",))
    usual = _whole(row, "SPPO_PORT", environ) if environ.get("SPPO_PORT") else _PORT
    for source in (BY_HAND, row) if row.host else (BY_HAND, torch):
        host = environ.get(_name(environ, source.host), "").strip()
        if not host:
            continue
        if not source.port or _has_port(host):
            return host
        name = _name(environ, source.port)
        port = _whole(row, name, environ) + source.next_port if environ.get(name) else usual
        return join_address(host.removeprefix("[").removesuffix("]"), port)
    count, here = (environ.get(_name(environ, names)) for names in (row.num_processes, row.local_count))
    return f"127.0.0.1:{usual}" if here and here == count else None


def _has_port(address: str) -> bool:
    host, _, port = address.rpartition(":")
    return bool(host) and port.isdecimal() and (":" not in host or host.endswith("]"))


def _local_ids(number: str, count: str, environ: Mapping[str, str]) -> tuple[int, ...] | None:
    """Returns the GPUs of a process that shares its host with others; None: all that the process can see.

    Args:
        number: of the process on its host, from 0; "" if its launcher does not say.
        count: of the processes on its host; "" likewise.
        environ: the environment.
    """
    if not number.isdecimal() or count == "1" or environ.get("JAX_LOCAL_DEVICE_IDS"):
        return None  # jax reads the variable itself
    return share_of(int(number), int(count) if count.isdecimal() else 0, num_gpus(environ))


def _detected_place(environ: Mapping[str, str], timeout_s: float) -> ProcessPlace | None:
    """Asks jax's own detection, except in a lone Kubernetes pod, for whose job jax would ask in vain."""
    in_pod, in_job = "KUBERNETES_SERVICE_HOST" in environ, "JOB_COMPLETION_INDEX" in environ
    if in_pod and not in_job and "TPU_WORKER_HOSTNAMES" not in environ:
        return None
    if not in_job and not _may_be_cluster(environ):
        return None
    from sppo_jax import compat

    coordinator, count, process_id, local_ids = compat.detect_cluster(int(timeout_s))
    if count == 1:
        return None
    if coordinator is None or count is None or process_id is None:
        if in_job:
            raise ValueError(
                "a process of an indexed Kubernetes job must know the other processes, got none of SPPO_COORDINATOR, "
                "SPPO_NUM_PROCESSES and SPPO_PROCESS_ID; set them as launch/jobset.yaml does (SPPO_NUM_PROCESSES=1 "
                "runs alone)"
            )
        return None
    # jax gives a Slurm task the GPU of the task's number, also where the task sees no such GPU.
    in_slurm = "SLURM_LOCALID" in environ
    ids = own_gpus(environ) if in_slurm else None if local_ids is None else tuple(local_ids)
    return ProcessPlace(coordinator=coordinator, num_processes=count, process_id=process_id, local_device_ids=ids)


def _may_be_cluster(environ: Mapping[str, str]) -> bool:
    """Returns whether there may be a cluster, so that jax must be imported to look."""
    return any(name in environ for name in _JAX_HINTS) or os.path.exists("/dev/accel0") or os.path.exists("/dev/vfio/0")
