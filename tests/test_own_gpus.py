"""Which GPUs a task of Slurm takes, as Slurm shows them in its usual ways of binding."""

import pytest

from sppo_jax.processes.distributed import find_place
from sppo_jax.processes.own_gpus import own_gpus, share_of

ALL = "0,1,2,3,4,5,6,7"


@pytest.fixture(autouse=True)
def no_driver(monkeypatch):
    """The machine of the test may have GPUs."""
    monkeypatch.setattr("sppo_jax.processes.own_gpus.num_gpus", lambda environ: None)


def task(number, *, tasks="8(x2)", node=1, visible=ALL, of_node="8", **more):
    found = {
        "SLURM_LOCALID": str(number),
        "SLURM_STEP_TASKS_PER_NODE": tasks,
        "SLURM_NODEID": str(node),
        "CUDA_VISIBLE_DEVICES": visible,
        "SLURM_GPUS_ON_NODE": of_node,
    }
    return {name: value for name, value in (found | more).items() if value is not None}


@pytest.mark.parametrize(
    "environ, gpus",
    [
        ({}, None),
        ({"CUDA_VISIBLE_DEVICES": ALL}, None),
        (task(5), (5,)),
        (task(0, tasks="1(x2)"), None),
        (task(1, tasks="2(x2)"), (4, 5, 6, 7)),
        (task(3, tasks="8,4", node=1), (6, 7)),
        (task(5, visible="0"), None),
        (task(5, visible="5"), None),
        (task(1, tasks="2", node=0, visible="0,1,2,3"), None),
        (task(5, visible="0", of_node=None), None),
        (task(5, of_node=None), (5,)),
        (task(5, visible=None), (5,)),
        (task(1, visible=None, of_node=None, tasks=None), (1,)),
        (task(5, JAX_LOCAL_DEVICE_IDS="2"), None),
        (task(9, tasks="16", node=0, JAX_PLATFORMS="cpu"), (9,)),
    ],
    ids=[
        "no Slurm",
        "another launcher",
        "a task a GPU, all visible",
        "alone on the node",
        "two tasks share eight",
        "nodes with unequal tasks",
        "bound, renumbered by a cgroup",
        "bound, by the variable alone",
        "two tasks bound to four each",
        "bound, and Slurm counts no GPUs",
        "Slurm counts no GPUs",
        "nothing limits what is visible",
        "Slurm says nothing",
        "the user chose",
        "simulated devices",
    ],
)
def test_a_task_takes_what_is_its_own(environ, gpus):
    assert own_gpus(environ) == gpus


def test_all_tasks_of_a_node_take_all_gpus_once():
    for num_tasks in (2, 4, 8):
        taken = [gpu for number in range(num_tasks) for gpu in own_gpus(task(number, tasks=f"{num_tasks}(x2)"))]
        assert taken == list(range(8))


def test_more_tasks_than_gpus_are_refused():
    with pytest.raises(
        ValueError, match="a GPU for each of its tasks, got 16 tasks and 8 GPUs; lower --ntasks-per-node"
    ):
        own_gpus(task(3, tasks="16(x2)"))


def test_a_place_that_is_given_takes_the_gpus_of_its_task():
    given = {"SPPO_COORDINATOR": "node0:8476", "SPPO_NUM_PROCESSES": "16", "SPPO_PROCESS_ID": "13"}
    assert find_place(given | task(5)).local_device_ids == (5,)
    assert find_place(given | task(5, visible="0")).local_device_ids is None
    assert find_place(given).local_device_ids is None


@pytest.mark.parametrize("visible", [1, 4, 8])
def test_a_cgroup_limits_a_task_without_a_variable(monkeypatch, visible):
    monkeypatch.setattr("sppo_jax.processes.own_gpus.num_gpus", lambda environ: visible)
    assert own_gpus(task(5, visible=None)) == ((5,) if visible == 8 else None)


@pytest.mark.parametrize(
    "local_id, local_count, num_devices, ids",
    [
        (1, 8, 8, (1,)),
        (1, 2, 8, (4, 5, 6, 7)),  # two processes share eight devices
        (1, 3, 8, (2, 3)),
        (1, 2, 1, None),  # a launcher that binds each process to one device
        (0, 2, 1, None),
        (1, 2, None, (1,)),  # unknown: one each, as jax does
        (5, 0, 8, (5,)),
        (1, 0, 1, None),
        (0, 2, 0, None),
    ],
)
def test_processes_of_a_host_share_its_devices(local_id, local_count, num_devices, ids):
    assert share_of(local_id, local_count, num_devices) == ids
