"""Real processes over gloo: joined, agreeing, failing together."""

import json

import pytest
from distributed_cases import finish, start_processes

from sppo_jax.hardware import DEVICES
from sppo_jax.hardware.present import Gpu
from sppo_jax.processes import distributed
from sppo_jax.processes.distributed import heartbeat_s, local_devices, timeout_s
from sppo_jax.processes.rendezvous import ProcessPlace

GIVEN = {"SPPO_COORDINATOR": "node0:8476", "SPPO_NUM_PROCESSES": "4", "SPPO_PROCESS_ID": "3"}


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
        from sppo_jax.processes import environment
        from sppo_jax.hardware import machine
        from sppo_jax.hardware.present import Gpu
        me = distributed.process_id()
        del os.environ["JAX_PLATFORMS"]
        distributed.find_spec = lambda name: name  # jax has a plugin for GPUs
        distributed.visible_gpus = lambda: (Gpu(name={GPU!r}, uuid="", memory_bytes=(80 - 16 * me) * 2**30),) * 4
        machine.host_bytes = lambda: (700 - 100 * me) * 2**30
        found = distributed.cluster(config())
        started = environment._running_platform() is not None
        sizes = [size // 2**30 for size in (found.host_bytes, found.device.hbm_bytes, distributed.least_host_bytes())]
        print(json.dumps([found.name, *sizes, started]))
    """
    for status, out, errors in finish(start_processes(code, 2)):
        assert status == 0 and json.loads(out) == ["h100:1x8", 600, 64, 600, False], errors


@pytest.mark.parametrize(
    ("processes", "name", "host_gib"),
    [
        ([("a", "h100", 8, 700), ("b", "h100", 8, 500)], "h100:2x8", 500),
        ([("a", "h100", 1, 700)] * 8, "h100:1x8", 700),
        ([("a", "h100", 1, 700), ("a", "h100", 1, 300), ("b", "h100", 2, 700)], "h100:2x2", 300),
    ],
    ids=["a process a host", "a process a device", "both"],
)
def test_hosts_are_counted_by_their_names(processes, name, host_gib):
    found = distributed._joined_cluster([(*process, 2**36) for process in processes], DEVICES["h100"])
    assert (found.name, found.host_bytes) == (name, host_gib)


@pytest.mark.parametrize(
    ("processes", "words"),
    [
        (
            [("a", "h100", 8, 1), ("b", "h100", 4, 1)],
            "the same number of devices, got 8 on a, 4 on b; leave",
        ),
        (
            [("a", "h100", 8, 1), ("b", "h200", 8, 1)],
            "devices of one kind, got h100 on a, h200 on b; leave",
        ),
    ],
)
def test_hosts_that_differ_are_refused(processes, words):
    with pytest.raises(ValueError, match=words):
        distributed._joined_cluster([(*process, 2**36) for process in processes], DEVICES["h100"])


def test_a_process_that_takes_some_gpus_of_its_host_counts_these(monkeypatch):
    monkeypatch.setattr(distributed, "gpus_may_start", lambda: True)
    monkeypatch.setattr(distributed, "find_spec", lambda name: name)
    gpus = tuple(Gpu(name=GPU, uuid=f"GPU-{k}", memory_bytes=None) for k in range(8))
    monkeypatch.setattr(distributed, "visible_gpus", lambda: gpus)
    place = ProcessPlace(coordinator="a:1", num_processes=8, process_id=3, local_device_ids=(3,))
    monkeypatch.setattr(distributed, "find_place", lambda **_: place)
    assert distributed._counted_gpus() == gpus[:1]
    monkeypatch.setattr(distributed, "gpus_may_start", lambda: False)
    assert distributed._counted_gpus() == ()


def test_a_process_that_never_comes_ends_the_others_with_a_line():
    processes = start_processes("join(6)", 3, SPPO_TIMEOUT_S=2)
    processes[1].kill()
    for me, (status, _, errors) in enumerate(finish(processes)):
        if me != 1:
            assert status == 1 and errors.count("\n") == 1, errors
            assert "got 2, without process 1;" in errors


LONG = """
    join(6)
    os.environ["SPPO_TIMEOUT_S"] = "1"  # joining may take longer
    me = distributed.process_id()
    def work():
        time.sleep({1: 3.5, 2: 2.3}.get(me, 0.0))
        if me == 1 and sys.argv[1] == "dies":
            os._exit(9)
    distributed.together(work, is_long=True)
    distributed.agree(None)
    print("all are here", flush=True)
    distributed.leave(0)
"""


@pytest.mark.parametrize("fate", ["lives", "dies"])
def test_a_process_at_long_work_is_waited_for_and_no_longer(fate):
    """Processes wait for a second for each other, but for as long as another one tokenizes."""
    results = finish(start_processes(LONG, 3, fate))
    if fate == "lives":
        assert [(status, out) for status, out, _ in results] == [(0, "all are here\n")] * 3, results
        return
    status, out, errors = results[0]
    assert (status, out) == (1, "") and "got no answer from process 1" in errors.splitlines()[-1], errors


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
