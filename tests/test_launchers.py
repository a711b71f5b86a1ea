"""Places of processes, from the variables of every launcher; and real processes that join by them."""

import json
import socket
from dataclasses import replace

import pytest
from distributed_cases import finish, free_port, start_in
from gpu_machines import machine

from sppo_jax.processes.launchers import AFTER_JAX, BEFORE_JAX, find_place
from sppo_jax.processes.rendezvous import ProcessPlace

GIVEN = {"SPPO_COORDINATOR": "node0:8476", "SPPO_NUM_PROCESSES": "4", "SPPO_PROCESS_ID": "3"}
SLURM = {
    "SLURM_JOB_ID": "4097",
    "SLURM_STEP_NODELIST": "node[07-08]",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
}


def test_a_place_is_read_from_the_environment():
    assert find_place({}) is None
    assert find_place({"SPPO_NUM_PROCESSES": "1"}) is None
    assert find_place({"SPPO_NUM_PROCESSES": "1", "SPPO_PROCESS_ID": "0", **SLURM}) is None
    assert find_place(GIVEN) == ProcessPlace(coordinator="node0:8476", num_processes=4, process_id=3)
    assert find_place({**SLURM, **GIVEN}).coordinator == "node0:8476"


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"SPPO_COORDINATOR": ""}, "must be set together, got .* without SPPO_COORDINATOR; set all three"),
        ({"SPPO_PROCESS_ID": ""}, "without SPPO_PROCESS_ID"),
        ({"SPPO_NUM_PROCESSES": ""}, "without SPPO_NUM_PROCESSES"),
        ({"SPPO_PROCESS_ID": "4"}, "from 0 to SPPO_NUM_PROCESSES - 1 = 3, got 4; number"),
        ({"SPPO_PROCESS_ID": "-1"}, "SPPO_PROCESS_ID must be a whole number, got '-1'"),
        ({"SPPO_NUM_PROCESSES": "two"}, "SPPO_NUM_PROCESSES must be a whole number, got 'two'"),
        ({"SPPO_NUM_PROCESSES": "0"}, "SPPO_NUM_PROCESSES must be at least 1, got 0; set"),
        ({"SPPO_COORDINATOR": "node0"}, "must be HOST:PORT of process 0, got 'node0'"),
    ],
)
def test_a_place_that_contradicts_itself_is_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        find_place(GIVEN | changes)


def test_slurm_is_recognized(monkeypatch):
    def place(**changes):
        for name, value in (SLURM | changes).items():
            monkeypatch.setenv(name, value)
        return find_place()

    assert place() == ProcessPlace(
        coordinator=f"node07:{4097 % 4096 + 65536 - 4096}",
        num_processes=2,
        process_id=1,
        local_device_ids=(0,),  # several tasks a node: each has the device of its number
    )
    assert place(SLURM_STEP_TASKS_PER_NODE="8(x2)").local_device_ids == (0,)
    assert place(SLURM_STEP_TASKS_PER_NODE="1(x2)").local_device_ids is None
    assert place(SLURM_NTASKS="1", SLURM_PROCID="0") is None


def test_kubernetes_pods_are_told_apart(monkeypatch):
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    assert find_place() is None, "a lone pod, a notebook say"
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "1")
    with (
        pytest.warns(UserWarning, match="kubernetes"),
        pytest.raises(ValueError, match="indexed Kubernetes job .* set them as launch/jobset.yaml does"),
    ):
        find_place()


# What each launcher sets in process 1 of 2 on one host, and the place that comes of it.
TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "0",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
KUBEFLOW = {
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    "JOB_COMPLETION_INDEX": "1",
    "JAX_NUM_PROCESSES": "2",
    "JAX_PROCESS_ID": "1",
    "JAX_COORDINATOR_ADDRESS": "job-node-0-0.job:6666",
    "JAX_COORDINATOR_PORT": "6666",
    "JAX_DISTRIBUTED_BACKEND": "gloo",
}
OPEN_MPI_5 = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_RANK": "1",
    "PMIX_NAMESPACE": "prterun-node0-500@1",
    "PMIX_SERVER_URI4": "prterun-node0-500@0.0;tcp4://127.0.0.1:43210",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_FD": "6", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
LAUNCHED = {
    "torchrun": (TORCHRUN, "node0:29501", (1,)),
    "torchrun over IPv6": (TORCHRUN | {"MASTER_ADDR": "fd00::1"}, "[fd00::1]:29501", (1,)),
    "torchrun in a task of Slurm": (SLURM | {"SLURM_PROCID": "0"} | TORCHRUN, "node0:29501", (1,)),
    "torchrun with a node a process": (TORCHRUN | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}, "node0:29501", None),
    "a PyTorchJob without torchrun": (
        {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"},
        "job-master-0:23457",
        None,
    ),
    "torchrun on one host, without an address": (TORCHRUN | {"MASTER_ADDR": ""}, "127.0.0.1:8476", (1,)),
    "Kubeflow Trainer, torch runtime": (
        {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "job-node-0-0.job", "PET_MASTER_PORT": "29500"},
        "job-node-0-0.job:29500",
        None,
    ),
    "Kubeflow Trainer": (KUBEFLOW, "job-node-0-0.job:6666", None),
    "Kubeflow Trainer without the port in the address": (
        KUBEFLOW | {"JAX_COORDINATOR_ADDRESS": "job-node-0-0.job"},
        "job-node-0-0.job:6666",
        None,
    ),
    "a script with jax's names": (
        {"JAX_COORDINATOR_ADDRESS": "node0:1234", "JAX_PROCESS_COUNT": "2", "JAX_PROCESS_INDEX": "1"},
        "node0:1234",
        None,
    ),
    "Kubeflow's JAXJob": (
        {"NUM_PROCESSES": "2", "PROCESS_ID": "1", "COORDINATOR_ADDRESS": "job-worker-0", "COORDINATOR_PORT": "6666"},
        "job-worker-0:6666",
        None,
    ),
    "Open MPI 5": (OPEN_MPI_5, "127.0.0.1:8476", (1,)),
    "Open MPI 5 on hosts, with an address": (
        OPEN_MPI_5 | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "SPPO_COORDINATOR": "node0:9999"},
        "node0:9999",
        None,
    ),
    "Open MPI 5 on hosts, with torch's address": (
        OPEN_MPI_5 | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "MASTER_ADDR": "node0", "MASTER_PORT": "9998"},
        "node0:9998",
        None,
    ),
    "Open MPI 5 in a job of Slurm": (SLURM | {"SLURM_PROCID": "0"} | OPEN_MPI_5, "127.0.0.1:8476", (1,)),
    "MPICH": (MPICH, "127.0.0.1:8476", (1,)),
    "MPICH in a shell of Slurm": (SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"} | MPICH, "127.0.0.1:8476", (1,)),
    "Cray PALS": (
        {"PALS_RANKID": "1", "PMI_SIZE": "2", "PALS_LOCAL_RANKID": "0", "SPPO_COORDINATOR": "node0:8476"},
        "node0:8476",
        (0,),
    ),
    "MVAPICH2": (
        {f"MV2_COMM_WORLD_{name}": value for name, value in (("RANK", "1"), ("SIZE", "2"), ("LOCAL_SIZE", "2"))},
        "127.0.0.1:8476",
        None,
    ),
    "Flux": (
        {"FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "2", "FLUX_TASK_LOCAL_ID": "1", "SPPO_COORDINATOR": "node0:8476"},
        "node0:8476",
        (1,),
    ),
    "Slurm, with the address by hand": (SLURM | {"SPPO_COORDINATOR": "node9:1"}, "node9:1", (0,)),
}


@pytest.fixture
def placed(monkeypatch):
    """Gives a process's place in an environment; jax's detection reads the process's own."""

    def place(environ):
        for name, value in ({"PATH": ""} | environ).items():
            monkeypatch.setenv(name, value)
        return find_place(environ)

    return place


@pytest.mark.parametrize("name", LAUNCHED)
def test_every_launcher_gives_a_place(placed, name):
    environ, coordinator, ids = LAUNCHED[name]
    assert placed(environ) == ProcessPlace(coordinator=coordinator, num_processes=2, process_id=1, local_device_ids=ids)


def test_every_row_of_the_tables_is_tried():
    names = {name for environ, _, _ in LAUNCHED.values() for name in environ} | {"PMIX_RANK"}
    for row in (*BEFORE_JAX, *AFTER_JAX):
        for variables in (row.process_id, row.num_processes, row.host, row.local_count):
            assert not variables or set(variables) & names, row.name


TOO_LITTLE = {
    "PMIX_RANK alone": ({"PMIX_RANK": "1"}, "PMIX_RANK must be set together, got PMIX_RANK without OMPI_COMM"),
    "MPICH on hosts": (
        MPICH | {"MPI_LOCALNRANKS": "1"},
        "MPICH on several hosts .* got PMI_RANK=1 and PMI_SIZE=2 alone",
    ),
    "Open MPI 5 on hosts": (
        OPEN_MPI_5 | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"},
        "got OMPI_COMM_WORLD_RANK=1 and OMPI_COMM_WORLD_SIZE=2 alone; set SPPO_COORDINATOR=HOST:PORT",
    ),
    "Open MPI 5 on hosts of Slurm": (
        SLURM | OPEN_MPI_5 | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"},
        "got OMPI_COMM_WORLD_RANK=1",
    ),
    "torchrun without an address": (
        TORCHRUN | {"MASTER_ADDR": "", "LOCAL_WORLD_SIZE": "1"},
        "got WORLD_SIZE, RANK without MASTER_ADDR; set all three, or SPPO_COORD",
    ),
    "Kubeflow without a number": (KUBEFLOW | {"JAX_PROCESS_ID": ""}, "without JAX_PROCESS_ID"),
    "Kubeflow without a count": (KUBEFLOW | {"JAX_NUM_PROCESSES": ""}, "without JAX_NUM_PROCESSES"),
    "Kubeflow without an address": (KUBEFLOW | {"JAX_COORDINATOR_ADDRESS": ""}, "without JAX_COORDINATOR_ADDRESS"),
    "jax's address alone": ({"JAX_COORDINATOR_ADDRESS": "node0:1"}, "without JAX_NUM_PROCESSES, JAX_PROCESS_ID"),
    "a number that is none": (MPICH | {"PMI_RANK": "first"}, "PMI_RANK must be a whole number, got 'first'"),
    "a number too high": (OPEN_MPI_5 | {"OMPI_COMM_WORLD_RANK": "2"}, "from 0 to OMPI_COMM_WORLD_SIZE - 1 = 1, got 2"),
    "no processes": (MPICH | {"PMI_SIZE": "0"}, "PMI_SIZE must be at least 1, got 0"),
    "a port that is none": (TORCHRUN | {"MASTER_PORT": "any"}, "MASTER_PORT must be a whole number, got 'any'"),
}


@pytest.mark.filterwarnings("ignore:.*kubernetes")
@pytest.mark.parametrize("name", TOO_LITTLE)
def test_a_launcher_that_says_too_little_is_named_in_one_line(placed, name):
    environ, words = TOO_LITTLE[name]
    with pytest.raises(ValueError, match=words) as error:
        placed(environ)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "environ",
    [
        {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"},
        OPEN_MPI_5 | {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "PMIX_RANK": "0"},
        {"PMI_RANK": "0", "PMI_SIZE": "1"},
        {"JAX_COORDINATOR_ADDRESS": "127.0.0.1:1", "JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"},
        TORCHRUN | {"SPPO_NUM_PROCESSES": "1"},
        # Names that anybody uses, and that do not belong together.
        {"WORLD_SIZE": "16"},
        {"RANK": "3"},
        {"MASTER_ADDR": "node0", "MASTER_PORT": "29500"},
        {"PROCESS_ID": "4711", "NUM_PROCESSES": "4"},
        {"JAX_COORDINATOR_PORT": "1234"},
        # A task of Slurm whose site starts everything with PMIx.
        SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0", "PMIX_RANK": "0"},
    ],
    ids=lambda environ: " ".join(f"{name}={value}" for name, value in list(environ.items())[:2]),
)
def test_a_process_may_be_alone(placed, environ):
    assert placed(environ) is None


def test_a_place_remembers_the_variables_it_comes_from(placed):
    assert placed(TORCHRUN).names == ("WORLD_SIZE", "RANK")
    assert replace(placed(TORCHRUN), names=("", "")) == placed(TORCHRUN)


def test_only_visible_gpus_are_shared(tmp_path, placed):
    gpus = machine(tmp_path, *[("NVIDIA H100 80GB HBM3", 81559)] * 8)
    assert placed(TORCHRUN | gpus).local_device_ids == (4, 5, 6, 7)
    assert placed(TORCHRUN | gpus | {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}).local_device_ids == (2, 3)
    assert placed(TORCHRUN | gpus | {"CUDA_VISIBLE_DEVICES": "5"}).local_device_ids is None
    assert placed(TORCHRUN | gpus | {"JAX_LOCAL_DEVICE_IDS": "1"}).local_device_ids is None


JOIN = """
    join()
    import jax
    print(json.dumps([distributed.process_id(), distributed.num_processes(), len(jax.devices())]), flush=True)
    distributed.agree(None)
"""


def check_joined(environs):
    for me, (status, out, errors) in enumerate(finish(start_in(environs, JOIN))):
        assert status == 0 and json.loads(out.splitlines()[-1]) == [me, 2, 4], errors


# Nothing listens at this proxy.
PROXIES = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9", "no_proxy": "example.org"}


def test_processes_of_torchrun_train_together_behind_a_proxy():
    port = free_port(num_ports=2)
    with socket.create_server(("127.0.0.1", port)):  # torchrun itself listens at MASTER_PORT; the run takes the next
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)} | PROXIES
        check_joined([TORCHRUN | address | {"RANK": str(k), "LOCAL_RANK": str(k)} for k in range(2)])


def test_processes_of_kubeflow_train_together():
    address = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}"}
    places = [{"JAX_PROCESS_ID": str(k), "JOB_COMPLETION_INDEX": str(k)} for k in range(2)]
    check_joined([KUBEFLOW | address | place for place in places])


@pytest.mark.slow
def test_processes_of_mpi_on_one_host_train_together():
    ids = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "PMIX_RANK")
    port = {"SPPO_PORT": str(free_port())}
    check_joined([OPEN_MPI_5 | port | dict.fromkeys(ids, str(k)) for k in range(2)])
