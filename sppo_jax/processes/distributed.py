"""Several processes of one run: joining, and agreeing. One process needs none of it.

Environment (launch/README.md has the table; sppo_jax/processes/launchers.py reads the place of this process):
  SPPO_TIMEOUT_S      seconds to wait for the other processes, at the start and when all must agree; 600
  SPPO_HEARTBEAT_S    seconds of silence after which a process counts as dead; 100
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, NoReturn, TypeVar

from sppo_jax.config import Config
from sppo_jax.hardware import (
    Cluster,
    Device,
    device_of,
    find_device,
    installed_spare,
    machine,
    visible_gpus,
)
from sppo_jax.hardware.present import Gpu
from sppo_jax.processes.environment import gpus_may_start, joined, set_limits
from sppo_jax.processes.launchers import find_place
from sppo_jax.processes.rendezvous import Absent, join_address, meet, split_address
from sppo_jax.processes.stopping import AGREES, STOPPED, in_force, write_last
from sppo_jax.version import __version__

Result = TypeVar("Result")
_BACKSTOP_S = 60  # jax's own limits end a process without our line, so they must be longer
_LEAVE_S = 2.0
_JOINED_S = 3.0  # how much later than another a process may join
_WORKING = "sppo/working"
_TOLD = "sppo/told"
_LISTEN_S = 1.0


class ToldToStop(Exception):
    """Long work before the first step is given up, because a process was told to stop; all end at the next exchange."""


def timeout_s(environ: Mapping[str, str] = os.environ) -> float:
    """Returns the seconds to wait for other processes.

    Raises:
        ValueError: SPPO_TIMEOUT_S is not a positive number.
    """
    return _seconds(environ, "SPPO_TIMEOUT_S", 600.0)


def heartbeat_s(environ: Mapping[str, str] = os.environ) -> float:
    """Returns the seconds of silence after which a process counts as dead.

    Raises:
        ValueError: SPPO_HEARTBEAT_S is not a positive number.
    """
    return _seconds(environ, "SPPO_HEARTBEAT_S", 100.0)


def _seconds(environ: Mapping[str, str], name: str, default: float) -> float:
    text = environ.get(name) or str(default)
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 1 <= seconds < 1e7:
        raise ValueError(f"{name} must be a number of seconds, at least 1, got {text!r}; correct or unset the variable")
    return seconds


def local_devices(num_devices: int) -> int:
    """Returns the number of simulated devices that this process makes.

    Args:
        num_devices: number of devices over all processes.

    Raises:
        ValueError: the number of processes does not divide the number of devices.
    """
    place = find_place(timeout_s=timeout_s())
    count = 1 if place is None else place.num_processes
    if num_devices % count:
        raise ValueError(
            f"the N of train.devices=cpu:N must be a multiple of the number of processes = {count}, got {num_devices}; "
            f"use cpu:{-(-num_devices // count) * count}, or another number of processes"
        )
    return num_devices // count


def start(config: Config) -> None:
    """Joins the other processes of the run; call before anything asks for devices.

    Ends the process with exit code 1 and one line if another process does not come.

    Args:
        config: the settings, which must be the same in all processes.

    Raises:
        ValueError: the environment is wrong, or the processes differ in settings or versions.
    """
    place = find_place(timeout_s=timeout_s())
    if place is None:
        return
    wait_s, silence_s = timeout_s(), heartbeat_s()
    try:
        meet(place, _facts(config), wait_s)
    except Absent as error:
        give_up(str(error))
    from sppo_jax import compat

    where = f"process {place.process_id} of {place.num_processes} at the coordinator {place.coordinator}"
    late = threading.Timer(
        wait_s,
        give_up,
        (f"jax must join {where} within {wait_s:g} s, got no answer; look at the other processes' logs",),
    )
    late.daemon = True
    late.start()
    try:
        host, port = split_address(place.coordinator)
        compat.start_distributed(
            host,
            join_address(host, port),
            num_processes=place.num_processes,
            process_id=place.process_id,
            local_device_ids=place.local_device_ids,
            timeout_s=int(wait_s) + _BACKSTOP_S,
            heartbeat_s=int(silence_s) + _BACKSTOP_S,
        )
    except Exception as error:
        trouble = " ".join(str(error).split())
        give_up(f"jax must join {where}, got: {trouble}; free the coordinator's port, and start all processes again")
    late.cancel()
    stopping = in_force()
    if stopping is not None and threading.current_thread() is threading.main_thread():
        # From now on the others wait for this process, so it may not end alone. jax has set a handler: replace it.
        stopping.mode = AGREES
        stopping.take()
    exchange("")


def _facts(config: Config) -> dict[str, str]:
    """Returns what must be equal in all processes: every setting by its dotted name, and the versions of the code."""
    facts = {"version of sppo_jax": __version__} | {f"version of {name}": version(name) for name in ("jax", "jaxlib")}

    def add(prefix: str, value: Any) -> None:
        if isinstance(value, Mapping):
            for key, item in value.items():
                add(f"{prefix}.{key}" if prefix else key, item)
        else:
            facts[prefix] = json.dumps(value)

    add("", dataclasses.asdict(config))
    return facts


def num_processes() -> int:
    """Returns the number of processes that have joined; 1 before `start`."""
    return joined()[1]


def process_id() -> int:
    """Returns this process's number; 0 before `start`."""
    return joined()[0]


def is_main() -> bool:
    """Returns whether this process is the one that prints and writes."""
    return process_id() == 0


def say(text: str) -> None:
    """Prints on process 0 only."""
    if is_main():
        print(text, flush=True)


def exchange(text: str) -> list[str]:
    """Returns the text of every process, in their order; all processes must call it, in the same order of calls.

    If a process was told to stop before the loop, all processes end here. Ends this process with exit code 1 and one
    line if another process does not come.
    """
    if num_processes() == 1:
        return [text]
    from sppo_jax import compat

    client, me, wait_s = compat.distributed_client(), process_id(), timeout_s()
    round_number = client.key_value_increment(f"sppo/round/{me}", 1)
    client.key_value_set(f"sppo/exchange/{round_number}/{me}", f"{_told_to_stop()}\n{text}")
    deadline = time.monotonic() + wait_s
    posts = []
    for process in range(num_processes()):
        post, deadline = _post_of(client, process, round_number, deadline)
        posts.append(post.partition("\n"))
    if round_number > 1:  # a process in this round has read the round before last
        client.key_value_delete(f"sppo/exchange/{round_number - 2}/{me}")
    _stop_together([reason for reason, _, _ in posts])
    return [text for _, _, text in posts]


def _post_of(client: Any, process: int, round_number: int, deadline: float) -> tuple[str, float]:
    """Returns the text of a process in a round, and until when to wait for the next; ends this process if none comes.

    A process at long work is waited for as long as it says that it works.
    """
    seen = ""
    while True:
        left_s = deadline - time.monotonic()
        # In the first round another process may have been stopped just before it joined: then it never comes.
        part_s = min(left_s, _JOINED_S) if round_number == 1 else left_s
        try:
            post = client.blocking_key_value_get(f"sppo/exchange/{round_number}/{process}", max(1, int(part_s * 1000)))
            return post, max(deadline, time.monotonic() + timeout_s()) if seen else deadline
        except Exception as error:
            if round_number == 1 and (reason := _told_to_stop()):
                write_last(f"stopped by {reason}")
                os._exit(STOPPED)
            if part_s == left_s and "DEADLINE_EXCEEDED" in str(error):
                before, seen = seen, _work_of(client, process)
                if seen != before:
                    deadline = time.monotonic() + timeout_s()
                    continue
            if part_s == left_s or "DEADLINE_EXCEEDED" not in str(error):
                give_up(
                    f"all processes must answer within {timeout_s():g} s, got no answer from process {process} "
                    f"({str(error).splitlines()[0][:80]}); look at its log, or raise SPPO_TIMEOUT_S"
                )


def _work_of(client: Any, process: int) -> str:
    """Returns what a process said last about its long work; "" if it is at none."""
    return dict(client.key_value_dir_get(_WORKING)).get(f"{_WORKING}/{process}", "")


@contextlib.contextmanager
def _at_work() -> Iterator[None]:
    """Says again and again that this process works, so that the others wait for it longer than SPPO_TIMEOUT_S."""
    if num_processes() == 1:
        yield
        return
    from sppo_jax import compat

    client, key, done, period_s = (
        compat.distributed_client(),
        f"{_WORKING}/{process_id()}",
        threading.Event(),
        timeout_s() / 4,
    )

    def run() -> None:
        # The store is gone where process 0 has ended: the exchange says so.
        with contextlib.suppress(Exception):
            for number in itertools.count(1):
                client.key_value_set(key, str(number), allow_overwrite=True)
                if done.wait(period_s):
                    client.key_value_delete(key)
                    return

    thread = threading.Thread(target=run, name="at-work", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(period_s)


class Listener:
    """Tells long work in this process that a process of the run was told to stop before the first step."""

    def __init__(self) -> None:
        """Prepares; asks nobody yet."""
        self._asked_s = time.monotonic()

    def check(self) -> None:
        """Looks at this process's own signals, and once a second at those of the others; call it between batches.

        A process by itself needs none of it: a signal ends it at once.

        Raises:
            ToldToStop: a process was told to stop.
        """
        if num_processes() == 1 or (stopping := in_force()) is None or stopping.mode != AGREES:
            return
        from sppo_jax import compat

        client, now_s = compat.distributed_client(), time.monotonic()
        if stopping.reason:
            client.key_value_set(f"{_TOLD}/{process_id()}", stopping.reason, allow_overwrite=True)
            raise ToldToStop
        if now_s - self._asked_s > _LISTEN_S:
            self._asked_s = now_s
            if client.key_value_dir_get(_TOLD):
                raise ToldToStop


def _told_to_stop() -> str:
    """Returns the signal that ends this process at the next exchange; "" if there is none."""
    stopping = in_force()
    return (stopping.reason or "") if stopping is not None and stopping.mode == AGREES else ""


def _stop_together(reasons: list[str]) -> None:
    """Ends this process if any process was told to stop; each of these prints a line, and so does process 0.

    Args:
        reasons: the signal that each process got, or "".
    """
    told = [process for process, reason in enumerate(reasons) if reason]
    if not told:
        return
    if process_id() in told:
        write_last(f"stopped by {reasons[process_id()]}")
    elif is_main():
        write_last(f"stopped by {reasons[told[0]]} in process {told[0]}")
    leave(STOPPED)


def share_text(text: str) -> str:
    """Returns process 0's text; all processes must call it."""
    return exchange(text if is_main() else "")[0]


def agree(error: str | None) -> None:
    """Raises in every process if any process has an error; all processes must call it.

    Raises:
        ValueError: this process's error, or the first error of another process with its number.
    """
    errors = exchange(error or "")
    if error:
        raise ValueError(error)
    for process, text in enumerate(errors):
        if text:
            raise ValueError(f"process {process}: {text}")


def together(work: Callable[[], Result], *, is_long: bool = False) -> Result:
    """Does work in every process; all processes must call it, and the work must not exchange texts.

    Args:
        work: what to do.
        is_long: whether the work may take longer in one process than in another by more than SPPO_TIMEOUT_S, as
            tokenizing does; the others then wait until it is done.

    Raises:
        ValueError: the work raised a ValueError, in this process or another.
    """
    error = None
    try:
        with _at_work() if is_long else contextlib.nullcontext():
            result = work()
    except ValueError as problem:
        error = str(problem)
    except ToldToStop:
        pass  # the exchange ends this process
    agree(error)
    return result


def cluster(config: Config) -> Cluster | None:
    """Returns the devices of all processes, for the planner; None if the planner finds them by itself.

    Args:
        config: a config, with or without a cluster or simulated devices.

    Raises:
        ValueError: hosts have different numbers of devices, or different devices.
    """
    if num_processes() == 1 or config.hardware.cluster or config.train.num_simulated_devices:
        return None
    import socket

    counted = together(_counted_gpus)
    if "0" in exchange(str(len(counted))):
        device, count = together(_start_devices)  # all of them: backends that start wait for each other
    else:
        device, count = together(lambda: device_of(counted)), len(counted)
    mine = socket.gethostname(), device.name, count, machine.host_bytes(), device.hbm_bytes
    return _joined_cluster([tuple(json.loads(text)) for text in exchange(json.dumps(mine))], device)


def least_host_bytes() -> int:
    """Returns the memory of the host with the least; all processes must call it."""
    return min(map(int, exchange(str(machine.host_bytes()))))


def _counted_gpus() -> Sequence[Gpu]:
    """Returns this process's GPUs without starting a backend, so that their limits can be set for a plan.

    None where jax has no plugin for GPUs or may not use them.
    """
    if not gpus_may_start() or find_spec("jax_plugins") is None:
        return ()
    gpus, place = visible_gpus() or (), find_place(timeout_s=timeout_s())
    ids = None if place is None else place.local_device_ids
    return gpus if ids is None else gpus[: len(ids)]


def _start_devices() -> tuple[Device, int]:
    """Returns what this process's devices are and how many; they start now."""
    import jax

    set_limits(None)
    devices = jax.local_devices()
    gpus = visible_gpus() if devices[0].platform == "gpu" else None
    return device_of(gpus) if gpus else find_device(devices[0].device_kind), len(devices)


def _joined_cluster(processes: Sequence[tuple[str, str, int, int, int]], device: Device) -> Cluster:
    """Returns the devices of all processes.

    Args:
        processes: of each its host, the name of its devices, their number, the bytes of host memory it may take, and
            those of one device.
        device: the device of this process.

    Raises:
        ValueError: hosts have different numbers of devices, or different devices.
    """
    per_host: dict[str, int] = {}
    for host, _, count, *_ in processes:
        per_host[host] = per_host.get(host, 0) + count
    if len(set(per_host.values())) > 1:
        shown = ", ".join(f"{count} on {host}" for host, count in per_host.items())
        raise ValueError(
            f"all hosts must have the same number of devices, got {shown}; leave out the hosts that differ"
        )
    models: dict[str, str] = {}
    for host, name, *_ in processes:
        models.setdefault(name, host)
    if len(models) > 1:
        shown = ", ".join(f"{name} on {host}" for name, host in models.items())
        raise ValueError(f"all processes must have devices of one kind, got {shown}; leave out the hosts that differ")
    return Cluster(
        device=replace(device, hbm_bytes=min(hbm_bytes for _, _, _, _, hbm_bytes in processes)),
        num_hosts=len(per_host),
        devices_per_host=next(iter(per_host.values())),
        # The processes of a host share its memory.
        host_bytes=min(host_bytes for _, _, _, host_bytes, _ in processes),
        spare=installed_spare(device),
    )


def give_up(text: str) -> NoReturn:
    """Ends this process at once with one line and exit code 1; a clean exit would wait for processes that are gone."""
    print(text, file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(1)


def leave(code: int) -> None:
    """Ends this process at once if it failed and other processes run; otherwise returns, and it may end as usual.

    jax's exit waits for the other processes, which may be waiting for this one. If all fail together (wrong input),
    they end together, process 0 last, so that each keeps its exit code.
    """
    if code == 0 or num_processes() == 1:
        return
    from sppo_jax import compat

    try:
        compat.distributed_client().wait_at_barrier("sppo/leave", int(_LEAVE_S * 1000))
        if is_main():
            time.sleep(1.0)
    except Exception:
        pass  # the others continue, or are gone
    sys.stderr.flush()
    sys.stdout.flush()
    os._exit(code)
