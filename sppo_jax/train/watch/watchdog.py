"""Finds out that a run of one or many processes is stuck, names the process that holds it up, and ends the run.

Every process posts its progress on a board that all processes read (the key-value store of `jax.distributed`). The
first process that finds the run stuck posts a verdict, which ends all processes with the same line and exit code 1.
"""

from __future__ import annotations

import faulthandler
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

import jax

from sppo_jax import compat
from sppo_jax.processes import distributed

_FOLDER = "sppo/beat"
_STUCK = "no progress"
_SILENT_PERIODS = 4  # posts missed before a process counts as silent
_GRACE_S = 5.0  # for processes that fail together to end by themselves


@dataclass(frozen=True)
class Beat:
    """The progress of a process: beats so far, the step, the phase, and whether it is done."""

    count: int = 0
    step: int = 0
    phase: str = "start"
    done: bool = False

    def __str__(self) -> str:
        return f"step {self.step} ({self.phase})"


class Watchdog:
    """Context manager around a loop that calls `beat`; ends the process if the beats stop.

    Only time in which this process runs counts: a process that was paused and continues is not stuck.
    """

    def __init__(self, stall_s: float, *, on_stall: Callable[[str], None] | None = None) -> None:
        """Prepares the watchdog, which starts with the `with` block.

        Args:
            stall_s: seconds without a beat after which the run is stuck; 0: never.
            on_stall: called with the line that names the process; by default it prints the line and ends this process.
        """
        self._stall_s, self._on_stall = stall_s, on_stall or self._end
        self._me, self._num = distributed.process_id(), distributed.num_processes()
        self._heartbeat_s = distributed.heartbeat_s()
        shortest = min(stall_s or self._heartbeat_s, self._heartbeat_s)
        self._period_s = min(shortest / 10, max(2.0, min(10.0, self._num / 32)))
        self._beat, self._left = Beat(), threading.Event()
        self._board = Board(self._me, self._period_s) if self._num > 1 else None
        self._silent_s: dict[int, float] = {}
        self._read: dict[int, str] = {}
        self._idle_s, self._idle_since = 0.0, self._beat
        self._broken = False

    def beat(self, step: int, phase: str) -> None:
        """Records that the run makes progress; the cost is negligible.

        Args:
            step: the current step.
            phase: its current part: data, step, save or evaluate.
        """
        self._beat = Beat(self._beat.count + 1, step, phase)

    def beat_again(self) -> None:
        """Records that the run makes progress within its step and phase; any thread may call it."""
        self.beat(self._beat.step, self._beat.phase)

    def __enter__(self) -> Watchdog:
        if self._board:
            self._board.start(lambda: self._beat)
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._board is None or error is None:
            self._left.set()
            if self._board:
                self._board.stop(Beat(self._beat.count, self._beat.step, "end", done=True))
            return
        if isinstance(error, jax.errors.JaxRuntimeError):
            # A collective usually fails because another process died: give the watchdog time to name that process.
            self._broken = True
            time.sleep(self._period_s * (_SILENT_PERIODS + 2) + _GRACE_S)
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        self._left.set()
        self._board.proclaim(f"{self._name(self._me)} failed at {self._beat}: {reason}")
        self._board.stop(Beat(self._beat.count, self._beat.step, "end", done=True))
        if self._me == 0:  # jax ends the other processes without a message when this process ends
            self._board.wait_for_others(self._num, _GRACE_S + 3 * self._period_s)

    def _watch(self) -> None:
        last = time.monotonic()
        while not self._left.wait(self._period_s):
            now = time.monotonic()
            passed_s, last = min(now - last, 2 * self._period_s), now
            self._count(passed_s)
            line = self._judge()
            if line is None and self._board and self._board.verdict:
                line = self._board.verdict
                if self._left.wait(_GRACE_S):
                    return
            if line:
                if self._board:
                    self._board.proclaim(line)
                self._on_stall(line)
                return

    def _count(self, passed_s: float) -> None:
        """Adds to the time for which each process has been silent and this process has been idle."""
        if self._beat is not self._idle_since:
            self._idle_s, self._idle_since = 0.0, self._beat
        else:
            self._idle_s += passed_s
        if self._board is None:
            return
        posts = self._board.posts
        if posts is self._read:  # process 0 keeps the board, which has nothing new
            self._silent_s[0] = self._silent_s.get(0, 0.0) + passed_s
            return
        for process, post in posts.items():
            silent = process != self._me and post == self._read.get(process)
            self._silent_s[process] = self._silent_s.get(process, 0.0) + passed_s if silent else 0.0
        self._read = posts

    def _judge(self) -> str | None:
        """Returns a line that names the process that holds the run up; None while the run makes progress."""
        beats = {process: Board.parse(post) for process, post in self._read.items()}
        silent_s = {
            process: seconds
            for process, seconds in self._silent_s.items()
            if process != self._me and not beats.get(process, Beat()).done
        }
        again = "rerun the same command with the --run-dir of this run,"
        patience_s = _SILENT_PERIODS * self._period_s if self._broken else self._heartbeat_s
        dead = [process for process, seconds in silent_s.items() if seconds >= patience_s]
        if dead:
            why = "and an exchange broke off" if self._broken else f"longer than SPPO_HEARTBEAT_S = {patience_s:g}"
            return f"{self._gone(dead, beats)}, {why}; look at that process, then {again}"
        if not self._stall_s or self._idle_s < self._stall_s:
            return None
        head = f"{_STUCK} for train.stall_s = {self._stall_s:g} s"
        if self._board is None:
            return f"{head}, got stuck at {self._beat}; see the stacks, then {again} or raise train.stall_s"
        silent = [process for process, s in silent_s.items() if s >= _SILENT_PERIODS * self._period_s]
        if silent:
            waiting = f"the others wait at {self._beat}"
            return f"{head}: {self._gone(silent, beats)}, {waiting}; look at that process, then {again}"
        beats[self._me] = self._beat
        reached = {process: (beat.step, beat.count) for process, beat in beats.items() if not beat.done}
        behind = [process for process, place in reached.items() if place == min(reached.values())]
        if len(behind) == len(reached):
            return f"{head}: all processes answer and are at {self._beat}; see the stacks, then {again}"
        named = ", ".join(f"{self._name(process)} at {beats[process]}" for process in sorted(behind)[:8])
        return f"{head}: {named} answers but is behind the others; see the stacks of that process, then {again}"

    def _gone(self, processes: list[int], beats: dict[int, Beat]) -> str:
        return ", ".join(
            f"{self._name(process)} stopped answering {self._silent_s[process]:.0f} s ago at "
            f"{beats.get(process, Beat())}"
            for process in sorted(processes)[:8]
        )

    def _name(self, process: int) -> str:
        post = self._read.get(process)
        host = socket.gethostname() if process == self._me else json.loads(post)["host"] if post else "an unknown host"
        return f"process {process} on {host}"

    def _end(self, line: str) -> None:
        """Prints the line and, if the run is stuck, the stacks of all threads; then ends the process."""
        print(line, file=sys.stderr, flush=True)
        if line.startswith(_STUCK):
            faulthandler.dump_traceback(sys.stderr)
        if self._board and self._me == 0:  # keeps the board: the others read it before
            time.sleep(_GRACE_S + 2 * self._period_s)
        sys.stdout.flush()
        os._exit(1)


class Board:
    """Posts this process's beat and reads all beats; has its own thread, because the store hangs if process 0 hangs."""

    def __init__(self, me: int, period_s: float) -> None:
        self.posts: dict[int, str] = {}
        self.verdict: str | None = None
        self._me, self._period_s, self._client = me, period_s, compat.distributed_client()
        self._host, self._number, self._stopped = socket.gethostname(), 0, threading.Event()
        self._turn = threading.Lock()

    def start(self, beat: Callable[[], Beat]) -> None:
        """Starts a thread that posts and reads once a period."""

        def run() -> None:
            self._trade(beat())
            while not self._stopped.wait(self._period_s):
                self._trade(beat())

        threading.Thread(target=run, name="watchdog-board", daemon=True).start()

    def stop(self, last: Beat) -> None:
        """Posts the last beat."""
        self._stopped.set()
        self._trade(last)

    def proclaim(self, verdict: str) -> None:
        """Tells all processes why the run ends, unless another process has done so."""

        def run() -> None:
            try:
                self._client.key_value_set(f"{_FOLDER}/verdict", verdict, allow_overwrite=False)
            except Exception:
                pass  # another process was first, or process 0, which keeps the board, has ended

        thread = threading.Thread(target=run, name="watchdog-verdict", daemon=True)
        thread.start()
        thread.join(self._period_s)  # the call never returns if process 0 hangs

    def wait_for_others(self, num_processes: int, seconds: float) -> None:
        """Waits until all other processes have left, or until the seconds have passed."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if sum(self.parse(post).done for post in self.posts.values()) == num_processes:
                return
            time.sleep(min(0.2, self._period_s))
            self._trade(None)

    @staticmethod
    def parse(post: str) -> Beat:
        """Returns the beat of a post."""
        return Beat(*json.loads(post)["beat"])

    def _trade(self, beat: Beat | None) -> None:
        with self._turn:
            if beat is None or beat.done or not self._stopped.is_set():  # nothing follows the last post
                self._try_trade(beat)

    def _try_trade(self, beat: Beat | None) -> None:
        try:
            if beat is not None:
                self._number += 1
                mine = [beat.count, beat.step, beat.phase, beat.done]
                post = json.dumps({"number": self._number, "host": self._host, "beat": mine})
                self._client.key_value_set(f"{_FOLDER}/{self._me}", post, allow_overwrite=True)
            found = {key.rpartition("/")[2]: value for key, value in self._client.key_value_dir_get(_FOLDER)}
        except Exception:
            return  # the posts stay as they are, so process 0 counts as silent
        self.verdict = found.pop("verdict", self.verdict)
        self.posts = {int(process): post for process, post in found.items()}
