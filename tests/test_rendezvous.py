"""How processes meet: all there, one missing, one different, one place taken twice, a port that is not free."""

import socket
import threading
import time

import pytest
from distributed_cases import free_port

from sppo_jax.processes.rendezvous import Absent, ProcessPlace, join_address, meet, split_address


def meeting(facts_of, *, num_processes=3, ids=None, sizes=None, timeout_s=20.0, before=lambda address: None):
    """Runs `meet` in a thread for each process; returns the error of each, or None."""
    address, results = f"localhost:{free_port()}", {}
    before(address)

    def run(slot, process_id):
        size = (sizes or {}).get(process_id, num_processes)
        place = ProcessPlace(coordinator=address, num_processes=size, process_id=process_id)
        try:
            meet(place, facts_of(process_id), timeout_s)
            results[slot] = None
        except Exception as error:
            results[slot] = error

    ids = list(range(num_processes)) if ids is None else ids
    threads = [threading.Thread(target=run, args=item, daemon=True) for item in enumerate(ids)]
    for thread in reversed(threads):  # process 0 last
        thread.start()
        time.sleep(0.05)
    for thread in threads:
        thread.join(60)
    return [results[slot] for slot in range(len(ids))]


def test_all_that_agree_go_on():
    assert meeting(lambda k: {"train.steps": "3"}) == [None] * 3


def test_a_missing_process_is_named_to_those_who_came():
    start = time.monotonic()
    first, second = meeting(lambda k: {}, ids=[0, 2], num_processes=4, timeout_s=1.5)
    assert time.monotonic() - start < 8
    for error in (first, second):
        assert isinstance(error, Absent) and "\n" not in str(error)
        assert "all 4 processes must reach" in str(error) and "got 2, without process 1, 3;" in str(error)
        assert "SPPO_TIMEOUT_S" in str(error)


def test_a_missing_coordinator_is_named():
    (error,) = meeting(lambda k: {}, ids=[1], timeout_s=1.0)
    assert isinstance(error, Absent)
    assert "process 1 of 3 must reach the coordinator" in str(error) and "refused" in str(error)


def test_settings_that_differ_are_named_to_all():
    errors = meeting(lambda k: {"train.steps": "20" if k == 2 else "10", "version of jax": "1"})
    for error in errors:
        assert isinstance(error, ValueError)
        assert "the same train.steps, got 10 in process 0 and 20 in process 2 on " in str(error)


@pytest.mark.parametrize(
    "case, words",
    [
        ({"ids": [0, 1, 1]}, "own SPPO_PROCESS_ID from 0 to 2, got 1 on .* and on "),
        ({"sizes": {2: 4}}, "the same SPPO_NUM_PROCESSES, got 3 in process 0 and 4 in process 2"),
        ({"sizes": {0: 2}, "ids": [0, 2]}, "own SPPO_PROCESS_ID from 0 to 1, got 2 on"),
    ],
)
def test_places_that_clash_are_named(case, words):
    errors = meeting(lambda k: {}, **case)
    for error in errors:
        with pytest.raises(ValueError, match=words):
            raise error


def test_a_port_that_is_taken_is_wrong_input():
    with socket.create_server(("", 0)) as other:
        place = ProcessPlace(coordinator=f"localhost:{other.getsockname()[1]}", num_processes=2, process_id=0)
        with pytest.raises(ValueError, match="must be free on the host of process 0, got: .*another port"):
            meet(place, {}, 1.0)


def test_strangers_are_passed_over():
    def knock(address):
        def scan():
            for text in (b"GET / HTTP/1.0\r\n\r\n\n", b"", b"[]\n", b'{"process_id": 1}\n', b"[" * 50000 + b"\n"):
                for _ in range(100):
                    try:
                        with socket.create_connection(split_address(address), timeout=1) as connection:
                            connection.sendall(text)
                        break
                    except OSError:
                        time.sleep(0.02)

        threading.Thread(target=scan, daemon=True).start()

    assert meeting(lambda k: {}, before=knock) == [None] * 3


@pytest.mark.parametrize(
    "address", ["", "node0", "node0:", ":8476", "node0:0", "node0:70000", "node0:http", "::1", "[::1]"]
)
def test_an_address_is_host_and_port(address):
    with pytest.raises(ValueError, match="must be HOST:PORT .*, got .*; set SPPO_COORDINATOR"):
        split_address(address)
    for host in ("::1", "fe80::1%eth0", "2001:db8::7", "node0", "10.0.0.1"):
        assert split_address(join_address(host, 8476)) == split_address(f"{host}:8476") == (host, 8476)
