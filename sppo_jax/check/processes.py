"""Processes that check together: who is there, whose clock is off, and who holds the others up.

Each process posts the name of a row before the row and behind it. So a process that is late or hangs is named, also
where the others wait for it within a collective.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType

from sppo_jax.check.row import FAILS, SLOW, UNKNOWN, Figures, Row, Wanted, errors
from sppo_jax.processes import distributed

_FOLDER = "sppo/check"
# A second or two of the difference is that of when processes come out of the exchange.
_CLOCK_S = 5.0
_BOARD_S = 3.0
_GRACE_S = 5.0  # for processes that fail together to say so


def measure_clock() -> Figures:
    """Returns this process's clock, right after all processes have met."""
    distributed.exchange("")
    return {"clock_s": time.time()}


def judge(found: Sequence[Figures], wanted: Wanted) -> Row:
    """Returns the row of processes that meet."""
    if problem := errors(found):
        return Row(value=problem, verdict=FAILS)
    hosts: dict[str, int] = {}
    for one in found:
        hosts[one["host"]] = hosts.get(one["host"], 0) + 1
    text = f"{len(found)} processes on {len(hosts)} hosts" if len(found) > 1 else "one process"
    if len(set(hosts.values())) > 1:
        shown = ", ".join(f"{count} on {host}" for host, count in hosts.items())
        return Row(value=shown, expected="as many on each host", verdict=FAILS, change="start all hosts alike")
    off = [one["clock_s"] - found[0]["clock_s"] for one in found]
    furthest = max(range(len(off)), key=lambda process: abs(off[process]))
    if abs(off[furthest]) > _CLOCK_S:
        return Row(
            value=f"the clock of process {furthest} on {found[furthest]['host']} is off by {off[furthest]:.0f} s",
            expected=f"at most {_CLOCK_S:g} s",
            verdict=SLOW,
            change="set the clocks by NTP",
        )
    return Row(value=text)


def judge_devices(found: Sequence[Figures], wanted: Wanted) -> Row:
    """Returns the row of the devices that have started, and of what XLA may take of each.

    Figures: `kind` of the devices, and `pool_bytes` and `used_bytes` of each; None where the allocator has no limit.
    """
    if problem := errors(found):
        return Row(value=problem, verdict=FAILS, change="look at the driver and at CUDA_VISIBLE_DEVICES")
    models = {one["kind"]: process for process, one in reversed(list(enumerate(found)))}
    if len(models) > 1:
        shown = ", ".join(f"{model} in process {process}" for model, process in models.items())
        return Row(value=shown, expected="devices of one kind", verdict=FAILS, change="leave out the hosts that differ")
    pools = [limit for one in found for limit in one["pool_bytes"]]
    text = f"{len(pools)} x {found[0]['kind']}"
    if not all(pools):
        return Row(value=text) if not wanted.is_timed else Row(value=f"{text}, no limit of memory", verdict=UNKNOWN)
    least = min(pools)
    text = f"{text}, {least / 2**30:.2f} GiB each"
    if least < wanted.plan_bytes:
        expected, change = (
            f"{wanted.plan_bytes / 2**30:.2f} GiB of the plan",
            "end other programs, or plan for less memory",
        )
        return Row(value=text, expected=expected, verdict=FAILS, change=change)
    if least < 0.99 * wanted.pool_bytes:
        expected = f"{wanted.pool_bytes / 2**30:.2f} GiB, on which plans count"
        return Row(value=text, expected=expected, verdict=SLOW, change="set hardware.hbm_bytes, or end other programs")
    return Row(value=text)


class Board:
    """Context manager: posts of all processes on the rows that they have begun and ended, and a watch on the slowest.

    Where a row takes longer than its limit, or a process is silent for SPPO_HEARTBEAT_S, the line of that row names
    the processes that hold it up, and this process ends with exit code 1.
    """

    def __init__(self, *, give_up: Callable[[str], None] | None = None) -> None:
        """Prepares.

        Args:
            give_up: called with the line; by default the process prints the line and ends.
        """
        self._me, self._num = distributed.process_id(), distributed.num_processes()
        self._give_up, self._heartbeat_s = give_up or _end, distributed.heartbeat_s()
        self._period_s = min(1.0, self._heartbeat_s / 8)
        self._row, self._number, self._is_done = "", 0, True
        self._limit_s, self._since = 0.0, time.monotonic()
        self._count, self._left, self._turn, self._error = 0, threading.Event(), threading.Lock(), ""
        self._seen: dict[int, tuple[str, float]] = {}
        self._verdict = ""

    def begin(self, row: str, limit_s: float) -> None:
        """Posts that this process begins a row.

        Args:
            row: its name.
            limit_s: seconds after which the row is held up.
        """
        self._row, self._number, self._is_done = row, self._number + 1, False
        self._limit_s, self._since = limit_s, time.monotonic()
        self._post()

    def end(self, error: str = "") -> None:
        """Posts that this process has ended the row, and now waits for the others.

        Args:
            error: why it failed; the others may wait for this process within a collective.
        """
        self._is_done, self._error = True, error
        self._post()

    def judged(self) -> None:
        """Stops the clock of the row: all processes have ended it."""
        self._limit_s = 0.0

    def __enter__(self) -> Board:
        threading.Thread(target=self._watch, name="check-board", daemon=True).start()
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._left.set()

    def _post(self) -> None:
        if self._num == 1:
            return
        from sppo_jax import compat

        with self._turn:
            self._count += 1
            text = json.dumps([self._count, self._number, self._is_done, socket.gethostname(), self._error])
            # Process 0 keeps the board: where it is gone, the others find all silent.
            try:
                compat.distributed_client().key_value_set(f"{_FOLDER}/{self._me}", text, allow_overwrite=True)
            except Exception:
                return

    def _watch(self) -> None:
        while not self._left.wait(self._period_s):
            self._post()
            line = self._held_up(self._read()) or self._verdict
            if line and not self._left.is_set():
                self._proclaim(line)
                self._give_up(line)
                return

    def _proclaim(self, line: str) -> None:
        """Tells all processes why the check ends, unless another process has done so."""
        if self._num == 1 or self._verdict:
            return
        from sppo_jax import compat

        # Another process was first, or the board is gone.
        with contextlib.suppress(Exception):
            compat.distributed_client().key_value_set(f"{_FOLDER}/verdict", line, allow_overwrite=False)

    def _read(self) -> Mapping[int, str]:
        """Returns the posts of all processes; those that were there where the board cannot be read."""
        if self._num == 1:
            return {}
        from sppo_jax import compat

        try:
            found = compat.distributed_client().key_value_dir_get(_FOLDER)
            named = {key.rpartition("/")[2]: text for key, text in found}
            self._verdict = named.pop("verdict", "")
            posts = {int(process): text for process, text in named.items()}
        except Exception:
            posts = {process: text for process, (text, _) in self._seen.items()}
        now = time.monotonic()
        for process, text in posts.items():
            if self._seen.get(process, ("", 0.0))[0] != text:
                self._seen[process] = text, now
        return posts

    def _held_up(self, posts: Mapping[int, str]) -> str:
        """Returns the line that names who holds the row up; "" while nobody does."""
        now, row = time.monotonic(), self._row
        silent = [process for process, (_, since) in self._seen.items() if now - since > self._heartbeat_s]
        if silent := [process for process in silent if process != self._me]:
            named = ", ".join(f"process {process}" for process in sorted(silent)[:8])
            why = f"{named} stopped answering longer than SPPO_HEARTBEAT_S = {self._heartbeat_s:g} ago"
            return Row(value=why, verdict=FAILS, change="look at that process").line(row)
        places = {process: tuple(json.loads(text)[1:]) for process, text in posts.items()}
        if not self._is_done and now - self._since > _GRACE_S:
            for process, (number, _, host, error) in places.items():
                if number == self._number and error:
                    return Row(value=f"process {process} on {host}: {error}", verdict=FAILS).line(row)
        if not self._limit_s or now - self._since < self._limit_s:
            return ""
        late = late_ones(places, self._number) or [f"process {self._me} on {socket.gethostname()}"]
        return Row(
            value=f"no answer within {self._limit_s:g} s from {', '.join(late)}",
            verdict=FAILS,
            change="look at that process and its devices and network",
        ).line(row)


def late_ones(places: Mapping[int, Sequence], number: int) -> list[str]:
    """Returns the processes that hold up a row: those that have not begun it, else those that have not ended it.

    Args:
        places: of each process the number of its row, whether it has ended the row, its host, and what failed.
        number: of the row that is held up.
    """
    absent = [process for process, (at, *_) in places.items() if at < number]
    hanging = [process for process, (at, is_done, *_) in places.items() if at == number and not is_done]
    what = "has not begun" if absent else "hangs"
    return [f"process {process} on {places[process][2]} ({what})" for process in sorted(absent or hanging)[:8]]


def _end(line: str) -> None:
    print(line, flush=True)
    sys.stderr.flush()
    if distributed.is_main():
        time.sleep(_BOARD_S)  # keeps the board for the others
    os._exit(1)
