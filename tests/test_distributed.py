"""Places from the environment, and real processes over gloo: joined, agreeing, failing together."""

import json

import pytest
from distributed_cases import finish, start_processes

from sppo_jax import distributed
from sppo_jax.distributed import find_place, heartbeat_s, local_devices, timeout_s
from sppo_jax.rendezvous import Place

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
    assert find_place(GIVEN) == Place(coordinator="node0:8476", num_processes=4, process_id=3)
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

    assert place() == Place(
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


@pytest.mark.parametrize("text", ["soon", "0", "-3", "inf", "nan"])
def test_times_are_seconds(text):
    assert timeout_s({}) == 600 and heartbeat_s({"SPPO_HEARTBEAT_S": "30"}) == 30
    with pytest.raises(ValueError, match="SPPO_TIMEOUT_S must be a number of seconds, at least 1, got"):
        timeout_s({"SPPO_TIMEOUT_S": text})


def test_simulated_devices_are_shared_out(monkeypatch):
    for name, value in GIVEN.items():
        monkeypatch.setenv(name, value)
    assert local_devices(8) == 2
    with pytest.raises(ValueError, match="multiple of the number of processes = 4, got 6; use cpu:8"):
        local_devices(6)


def test_one_process_has_nothing_to_do(capsys):
    distributed.agree(None)
    distributed.say("hello")
    assert distributed.is_main() and distributed.num_processes() == 1
    assert distributed.share_text("text") == "text" and capsys.readouterr().out == "hello\n"
    distributed.leave(2)
    with pytest.raises(ValueError, match="^broken$"):
        distributed.agree("broken")


def test_two_processes_join_share_and_fail_together():
    code = """
        join()
        import jax
        me = distributed.process_id()
        devices = [len(jax.devices()), jax.local_device_count(), distributed.cluster(config()).name]
        shared = [distributed.share_text(f"text {turn} of {me}") for turn in range(3)]
        distributed.agree(None)
        distributed.say(f"said by {me}")
        print(json.dumps([me, distributed.num_processes(), distributed.is_main(), devices, shared]), flush=True)
        try:
            distributed.agree("no such file" if me else None)
        except ValueError as error:
            print(json.dumps(str(error)), flush=True)
            distributed.leave(2)
    """
    for me, (status, out, errors) in enumerate(finish(start_processes(code, 2))):
        assert status == 2 and errors == "", errors
        lines = out.splitlines()
        assert lines[:-2] == (["said by 0"] if me == 0 else [])
        shared = [f"text {turn} of 0" for turn in range(3)]
        assert json.loads(lines[-2]) == [me, 2, me == 0, [4, 2, "cpu:1x4"], shared]
        assert json.loads(lines[-1]) == ("no such file" if me else "process 1: no such file")


GPU = "NVIDIA H100 80GB HBM3"


def test_gpus_of_all_processes_are_counted_before_a_backend_starts():
    """So that the limits of memory are those of the plan; the processes of a host share its memory."""
    code = f"""
        join()
        import os
        from sppo_jax import environment
        from sppo_jax.hardware import machine
        me = distributed.process_id()
        del os.environ["JAX_PLATFORMS"]
        distributed.find_spec = lambda name: name  # jax has a plugin for GPUs
        machine.gpu_names = lambda: [{GPU!r}] * 4
        machine.host_bytes = lambda: (700 - 100 * me) * 2**30
        found = distributed.cluster(config())
        started = environment._running_platform() is not None
        print(json.dumps([found.name, found.host_bytes // 2**30, started, distributed.least_host_bytes() // 2**30]))
    """
    for status, out, errors in finish(start_processes(code, 2)):
        assert status == 0 and json.loads(out) == ["h100:1x8", 600, False, 600], errors


@pytest.mark.parametrize(
    ("processes", "name", "host_gib"),
    [
        ([("a", GPU, 8, 700), ("b", GPU, 8, 500)], "h100:2x8", 500),
        ([("a", GPU, 1, 700)] * 8, "h100:1x8", 700),
        ([("a", GPU, 1, 700), ("a", GPU, 1, 300), ("b", GPU, 2, 700)], "h100:2x2", 300),
    ],
    ids=["a process a host", "a process a device", "both"],
)
def test_hosts_are_counted_by_their_names(processes, name, host_gib):
    found = distributed._joined_cluster(processes)
    assert (found.name, found.host_bytes) == (name, host_gib)


@pytest.mark.parametrize(
    ("processes", "words"),
    [
        ([("a", GPU, 8, 1), ("b", GPU, 4, 1)], "the same number of devices, got 8 on a, 4 on b; leave out the hosts"),
        ([("a", GPU, 8, 1), ("b", "NVIDIA H200", 8, 1)], "devices of one kind, got h100, h200; leave out the hosts"),
    ],
)
def test_hosts_that_differ_are_refused(processes, words):
    with pytest.raises(ValueError, match=words):
        distributed._joined_cluster(processes)


def test_a_process_that_takes_some_gpus_of_its_host_counts_these(monkeypatch):
    monkeypatch.setattr(distributed, "gpus_may_start", lambda: True)
    monkeypatch.setattr(distributed, "find_spec", lambda name: name)
    monkeypatch.setattr(distributed.machine, "gpu_names", lambda: [GPU] * 8)
    place = Place(coordinator="a:1", num_processes=8, process_id=3, local_device_ids=(3,))
    monkeypatch.setattr(distributed, "find_place", lambda: place)
    assert distributed._counted_devices() == [GPU]
    monkeypatch.setattr(distributed, "gpus_may_start", lambda: False)
    assert distributed._counted_devices() == []


def test_a_process_that_never_comes_ends_the_others_with_a_line():
    processes = start_processes("join(6)", 3, SPPO_TIMEOUT_S=2)
    processes[1].kill()
    for me, (status, _, errors) in enumerate(finish(processes)):
        if me != 1:
            assert status == 1 and errors.count("\n") == 1, errors
            assert "got 2, without process 1;" in errors


def test_a_process_that_fails_alone_does_not_wait_for_the_others():
    code = """
        join()
        if distributed.process_id() == 1:
            distributed.leave(1)
        distributed.agree(None)
    """
    first, second = finish(start_processes(code, 2, SPPO_TIMEOUT_S=4))
    assert second[0] == 1
    assert first[0] == 1 and "got no answer from process 1" in first[2].splitlines()[-1], first[2]
