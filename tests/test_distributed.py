"""Real processes over gloo: joined, agreeing, failing together."""

import json

import pytest
from distributed_cases import finish, start_processes

from sppo_jax import distributed
from sppo_jax.distributed import heartbeat_s, local_devices, timeout_s
from sppo_jax.hardware import DEVICES

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


def test_the_devices_of_a_run_have_the_memory_of_the_smallest():
    h100 = DEVICES["h100"]
    processes = [("a", 4, "h100", h100.hbm_bytes), ("a", 4, "h100", h100.hbm_bytes), ("b", 8, "h100", 64 * 2**30)]
    found = distributed._cluster_of(processes, h100)
    assert (found.name, found.device.hbm_bytes) == ("h100:2x8", 64 * 2**30)
    with pytest.raises(ValueError, match="the same devices, got h100 on a, h200 on b; leave out"):
        distributed._cluster_of([*processes[:2], ("b", 8, "h200", 0)], h100)
    with pytest.raises(ValueError, match="the same number of devices, got 8 on a, 4 on b; leave out"):
        distributed._cluster_of([*processes[:2], ("b", 4, "h100", 0)], h100)


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
