"""The processes of a run meet before jax joins them, so that one that is missing or different is named in a line.

Process 0 listens at the coordinator's address; every other process connects, says who it is and what it will run, and
waits for the verdict. Afterwards the port is jax's. (jax alone aborts with a stack trace that names nobody.)
"""

from __future__ import annotations

import ipaddress
import json
import selectors
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from sppo_jax.files.whole import parse_json

_BIND_S = 5.0  # a run that has just ended may hold the port for a moment
_RETRY_S = 0.2
_GRACE_S = 10.0  # for the verdict to arrive after the time is up
_MAX_HELLO_BYTES = 2**20


class Absent(RuntimeError):
    """A process did not come, or could not be reached, in time."""


@dataclass(frozen=True, kw_only=True)
class ProcessPlace:
    """A process's place in a run of several.

    Args:
        coordinator: HOST:PORT at which process 0 listens.
        num_processes: number of processes of the run.
        process_id: number of this process, from 0.
        local_device_ids: devices of this machine that the process takes; None: all.
        names: the variables that said the number of processes and the number of this one, for errors.
    """

    coordinator: str
    num_processes: int
    process_id: int
    local_device_ids: tuple[int, ...] | None = None
    names: tuple[str, str] = field(default=("SPPO_NUM_PROCESSES", "SPPO_PROCESS_ID"), compare=False)


def meet(place: ProcessPlace, facts: Mapping[str, str], timeout_s: float) -> None:
    """Returns when all processes have come and agree.

    Args:
        place: the place of this process, and the address of process 0.
        facts: values that must be the same in all processes, by name.
        timeout_s: seconds to wait for the other processes.

    Raises:
        ValueError: the address cannot be used, two processes have one place, or facts differ.
        Absent: a process did not come.
    """
    host, port = split_address(place.coordinator)
    if place.process_id == 0:
        with _listen(place.coordinator, port, min(timeout_s, _BIND_S)) as server:
            _receive(server, place, facts, timeout_s)
    else:
        _call(host, port, place, facts, timeout_s)


def split_address(address: str) -> tuple[str, int]:
    """Returns host and port of HOST:PORT.

    Raises:
        ValueError: the address does not have this form.
    """
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not _is_host(host) or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(
            f"the coordinator must be HOST:PORT of process 0, got {address!r}; set SPPO_COORDINATOR, e.g. to "
            "node0:8476 or [fe80::1]:8476"
        )
    return host, int(port)


def _is_host(host: str) -> bool:
    """Returns whether a text can be a host: a name, an IPv4 address or a whole IPv6 address without brackets."""
    if ":" not in host:
        return bool(host)
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        return False
    return True


def join_address(host: str, port: int) -> str:
    """Returns HOST:PORT, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _listen(address: str, port: int, patience_s: float) -> socket.socket:
    deadline = time.monotonic() + patience_s
    while True:
        try:
            if socket.has_dualstack_ipv6():
                return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
            return socket.create_server(("", port), backlog=1024)
        except OSError as error:
            if time.monotonic() >= deadline:
                raise ValueError(
                    f"port {port} of the coordinator {address} must be free on the host of process 0, got: "
                    f"{error.strerror or error}; end the program that holds the port, or choose another port"
                ) from error
        time.sleep(_RETRY_S)


def _receive(server: socket.socket, place: ProcessPlace, facts: Mapping[str, str], timeout_s: float) -> None:
    """Waits for all processes, compares them, and tells all of them the result.

    After the first problem it waits only a little longer, so that more processes hear of the problem.
    """
    arrived: dict[int, tuple[socket.socket, Mapping[str, Any]]] = {}
    waiting: dict[socket.socket, bytes] = {}
    problem: Exception | None = None
    deadline = time.monotonic() + timeout_s
    with selectors.DefaultSelector() as selector:
        selector.register(server, selectors.EVENT_READ)
        while len(arrived) < place.num_processes - 1 and time.monotonic() < deadline:
            for key, _ in selector.select(timeout=_RETRY_S):
                if key.fileobj is server:
                    connection, _ = server.accept()
                    connection.setblocking(False)
                    waiting[connection] = b""
                    selector.register(connection, selectors.EVENT_READ)
                    continue
                connection = cast(socket.socket, key.fileobj)
                hello = _read_hello(connection, waiting)
                if hello is None:
                    continue
                selector.unregister(connection)
                del waiting[connection]
                if problem is None:
                    problem = _register(place, facts, arrived, connection, hello)
                    deadline = deadline if problem is None else min(deadline, time.monotonic() + _GRACE_S)
                else:
                    arrived.setdefault(hello.get("process_id", -1), (connection, hello))
    if problem is None and len(arrived) < place.num_processes - 1:
        problem = Absent(_missing(place, set(arrived), timeout_s))
    for connection, _ in arrived.values():
        _answer(connection, problem)
    for connection in waiting:
        connection.close()
    if problem is not None:
        raise problem


def _read_hello(connection: socket.socket, waiting: dict[socket.socket, bytes]) -> Mapping[str, Any] | None:
    """Returns what a caller sent, once it is complete; {} if the caller is not a process of the run."""
    try:
        part = connection.recv(65536)
    except BlockingIOError:
        return None
    except OSError:
        part = b""
    waiting[connection] += part
    text = waiting[connection]
    if part and not text.endswith(b"\n") and len(text) < _MAX_HELLO_BYTES:
        return None
    try:
        hello = parse_json(text)
    except ValueError:
        hello = {}
    whole = isinstance(hello, dict) and {"process_id", "num_processes", "host", "facts"} <= set(hello)
    return hello if whole else {}


def _register(
    place: ProcessPlace,
    facts: Mapping[str, str],
    arrived: dict[int, tuple[socket.socket, Mapping[str, Any]]],
    connection: socket.socket,
    hello: Mapping[str, Any],
) -> Exception | None:
    """Notes a process that came, and returns what is wrong with the process, if anything."""
    if not hello:  # a port scanner, or a process that died while it was sending
        connection.close()
        return None
    process, host = hello["process_id"], hello["host"]
    before = arrived.get(process)
    if before is not None and not _is_open(before[0]):
        before = None  # the process called, died, and was started again
    arrived[process if before is None else -1] = (connection, hello)
    if before is not None or not 0 < process < place.num_processes:
        first = f"on {before[1]['host']} and on {host}" if before else f"on {host}"
        return ValueError(
            f"every process must have its own {place.names[1]} from 0 to {place.num_processes - 1}, "
            f"got {process} {first}; number the processes again"
        )
    theirs = {place.names[0]: str(hello["num_processes"]), **hello["facts"]}
    ours = {place.names[0]: str(place.num_processes), **facts}
    for name in sorted({*ours, *theirs}):
        if ours.get(name) != theirs.get(name):
            return ValueError(
                f"all processes must have the same {name}, got {ours.get(name)} in process 0 and {theirs.get(name)} "
                f"in process {process} on {host}; start all processes with the same command and code"
            )
    return None


def _is_open(connection: socket.socket) -> bool:
    try:
        return connection.recv(1, socket.MSG_PEEK) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


def _missing(place: ProcessPlace, arrived: set[int], timeout_s: float) -> str:
    absent = [process for process in range(1, place.num_processes) if process not in arrived]
    shown = ", ".join(map(str, absent[:8])) + (f" and {len(absent) - 8} more" if len(absent) > 8 else "")
    return (
        f"all {place.num_processes} processes must reach {place.coordinator} within {timeout_s:g} s, got "
        f"{place.num_processes - len(absent)}, without process {shown}; look at the logs of these processes, check "
        "that they reach this address, or raise SPPO_TIMEOUT_S (SPPO_NUM_PROCESSES=1 runs alone)"
    )


def _answer(connection: socket.socket, problem: Exception | None) -> None:
    """Sends the result; the caller closes first, so that the port is free at once."""
    verdict = {"go": problem is None, "wrong_input": isinstance(problem, ValueError), "text": str(problem or "")}
    try:
        connection.settimeout(_GRACE_S)
        connection.sendall(json.dumps(verdict).encode() + b"\n")
        connection.recv(1)
    except OSError:
        pass  # the caller is gone; jax will report this
    connection.close()


def _call(host: str, port: int, place: ProcessPlace, facts: Mapping[str, str], timeout_s: float) -> None:
    hello = {
        "process_id": place.process_id,
        "num_processes": place.num_processes,
        "host": socket.gethostname(),
        "facts": dict(facts),
    }
    deadline, trouble = time.monotonic() + timeout_s, ""
    while True:
        try:
            verdict = _ask(host, port, hello, deadline + _GRACE_S)
            break
        except (OSError, ValueError) as error:
            trouble = str(error)
        if time.monotonic() > deadline:
            raise Absent(
                f"process {place.process_id} of {place.num_processes} must reach the coordinator {place.coordinator} "
                f"(process 0) within {timeout_s:g} s, got: {trouble}; look at process 0's log, open the port between "
                "the hosts, correct SPPO_COORDINATOR, or raise SPPO_TIMEOUT_S"
            )
        time.sleep(_RETRY_S)
    if not verdict["go"]:
        raise (ValueError if verdict["wrong_input"] else Absent)(verdict["text"])


def _ask(host: str, port: int, hello: Mapping[str, Any], deadline: float) -> Mapping[str, Any]:
    """Sends the place and facts of this process, and returns the result."""
    with socket.create_connection((host, port), timeout=5.0) as connection:
        connection.sendall(json.dumps(hello).encode() + b"\n")
        connection.settimeout(max(1.0, deadline - time.monotonic()))
        with connection.makefile("rb") as answer:
            verdict = parse_json(answer.readline() or b"null")
    if not isinstance(verdict, dict) or "go" not in verdict:
        raise ValueError("no answer: process 0 has ended, or another program holds its port")
    return verdict
