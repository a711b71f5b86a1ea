"""SIGINT, SIGTERM and SIGHUP, taken from the first instant of a command to its last.

Python runs a handler between two instructions of the main thread, which may be in the compiler for minutes, and an
exception that a handler raises may come up in a callback that swallows it. So the handlers only remember. The C part of
Python's handler writes the signal's number to a pipe at once, and a thread that reads the pipe acts.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

# The exit code of a process that was stopped before it had anything to save, whichever signal it was.
STOPPED = 130
# What the first signal does: it ends the process; or the other processes hear of it at the next exchange, and all end;
# or the loop finishes its step and saves.
ENDS, AGREES, SAVES = range(3)

_NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# GNU timeout signals its child and then the group of both: what comes so soon behind the first is the same signal.
_SAME_S = 0.2
# A reader that has stopped reading must not keep a process from ending.
_LAST_WORDS_S = 1.0


class Stopping:
    """What signals do to this process; a context manager that gives the handlers back."""

    def __init__(self) -> None:
        """Prepares; no signal is taken before `begin`."""
        self.reason: str | None = None
        self.mode = ENDS
        self._code: int | None = None
        self._first_s: float | None = None
        self._partial: list[Path] = []
        self._ending = threading.Lock()
        self._handlers: dict[int, Any] = {}
        self._pipe: tuple[int, int] | None = None
        self._pipe_before, self._thread = -1, threading.Thread(target=self._watch, name="signals", daemon=True)

    def begin(self) -> Stopping:
        """Takes the signals; does nothing in another thread than the main one, which alone may.

        SIGINT and SIGHUP stay ignored where they were ignored at the start: by nohup, or by a script's `command &`.
        """
        if threading.current_thread() is threading.main_thread():
            self._pipe = os.pipe()
            os.set_blocking(self._pipe[1], False)
            self._thread.start()
            self._pipe_before = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
            before = {number: signal.getsignal(number) for number in _NUMBERS}
            kept = [number for number in _NUMBERS if number != signal.SIGTERM and before[number] is signal.SIG_IGN]
            self._handlers = {number: before[number] for number in _NUMBERS if number not in kept}
            self.take()
        return self

    def take(self) -> None:
        """Takes the signals again, in the main thread, from a library that has put its own handlers there."""
        for number in self._handlers:
            signal.signal(number, self._remember)

    def end(self) -> None:
        """Gives the signals back."""
        if self._pipe is None:
            return
        for number, handler in self._handlers.items():
            signal.signal(number, handler or signal.SIG_DFL)
        signal.set_wakeup_fd(self._pipe_before)
        os.write(self._pipe[1], b"\0")
        self._thread.join()
        for file in self._pipe:
            os.close(file)
        self._pipe = None

    def __enter__(self) -> Stopping:
        return self.begin()

    def __exit__(self, *_: object) -> None:
        self.end()

    def decide(self, code: int) -> None:
        """Says that the exit code is known: from now on a signal ends the process with it, at once and silently."""
        with self._ending:  # held for good by the thread that ends the process
            self._code = code

    def exit(self) -> NoReturn:
        """Ends the process with the code that was decided; as the last callback of `atexit`, in place of finalization.

        While Python is being torn down its handlers are gone, and a signal would end the process with another code.
        """
        with self._ending, suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(1 if self._code is None else self._code)

    @contextmanager
    def removes(self, folder: Path) -> Iterator[None]:
        """Has a folder that is being filled removed where a signal ends the process meanwhile."""
        self._partial.append(folder)
        try:
            yield
        finally:
            self._partial.remove(folder)

    def _remember(self, number: int, _: FrameType | None) -> None:
        self.reason = self.reason or signal.Signals(number).name

    def _watch(self) -> None:
        assert self._pipe is not None
        while 0 not in (numbers := os.read(self._pipe[0], 64)):
            for number in numbers:
                if number in self._handlers:
                    self._act(number)

    def _act(self, number: int) -> None:
        now_s, name = time.monotonic(), signal.Signals(number).name
        if self._code is not None:
            self._end_at_once("", self._code)
        if self.mode == ENDS:
            self._end_at_once(f"stopped by {name}", STOPPED)
        self._remember(number, None)
        if self._first_s is None:
            self._first_s = now_s
        # A dropped connection sends SIGHUP several times: the kernel does, and the shell.
        elif number != signal.SIGHUP and now_s - self._first_s > _SAME_S:
            self._end_at_once(f"stopped at once by a second signal, {name}: what is not saved is lost", STOPPED)

    def _end_at_once(self, line: str, code: int) -> NoReturn:
        with self._ending:
            if line:
                write_last(line)
            if self._partial:
                _silence()
            for folder in self._partial:
                _remove(folder)
            os._exit(code)


def in_force() -> Stopping | None:
    """Returns what takes this process's signals, None where nothing of ours does."""
    holder = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
    return holder if isinstance(holder, Stopping) else None


@contextmanager
def removed_if_stopped(folder: Path) -> Iterator[None]:
    """Has a folder that is being filled removed where a signal ends the process meanwhile."""
    stopping = in_force()
    if stopping is None:
        yield
        return
    with stopping.removes(folder):
        yield


def write_last(line: str) -> None:
    """Writes a line to standard error, past all buffers and locks, if it can be written soon."""
    start = "\n" if os.isatty(2) else ""  # behind ^C, or a bar
    with suppress(OSError, ValueError):
        if select.select([], [2], [], _LAST_WORDS_S)[1]:
            os.write(2, f"{start}{line}\n".encode())


def _silence() -> None:
    """Keeps the main thread, which is about to find its folder gone, from telling of it."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for output in (1, 2):
        os.dup2(nowhere, output)


def _remove(folder: Path) -> None:
    """Removes a folder that the main thread is filling: under another name nothing new gets into it."""
    import shutil

    gone = folder.with_name(f"{folder.name}.gone")
    with suppress(OSError):
        folder.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)
