"""SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2 and SIGXCPU, taken from the first instant of a command to its last.

Python runs a handler between two instructions of the main thread, which may be in the compiler for minutes. An
exception that a handler raises may reach a callback that ignores it. So the handlers only record the signal. The C part
of Python's handler writes the signal's number to a pipe at once, and a thread that reads the pipe acts.
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
# What the first signal does. It ends the process; or, at the next exchange, the other processes hear of the signal and
# all end; or the loop finishes its step and saves.
ENDS, AGREES, SAVES = range(3)

# Batch systems send one of these before the end of a job's time, some of them several times, and SIGTERM at its end.
_WARNINGS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
_NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, *_WARNINGS)
# GNU timeout signals its child and then the group of both: a second signal so soon counts as the first.
_SAME_S = 0.2
# So that a reader that has stopped reading does not keep a process from ending.
_LAST_WORDS_S = 1.0


class Stopping:
    """Decides what signals do to this process; a context manager that restores the handlers."""

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
        """Takes the signals; does nothing outside the main thread, which alone may set handlers.

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
        """Takes the signals again, in the main thread, from a library that has set its own handlers."""
        for number in self._handlers:
            signal.signal(number, self._remember)

    def end(self) -> None:
        """Restores the handlers of before."""
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
        """Sets the exit code: from now on a signal ends the process with this code, at once and silently."""
        with self._ending:  # never released by the thread that ends the process
            self._code = code

    def exit(self) -> NoReturn:
        """Ends the process with the decided code; the last callback of `atexit`, in place of Python's finalization.

        During finalization Python's handlers are gone, and a signal would end the process with another code.
        """
        with self._ending, suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(1 if self._code is None else self._code)

    @contextmanager
    def removes(self, folder: Path) -> Iterator[None]:
        """Within the context, a signal that ends the process also removes a folder that is being filled."""
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
        if number in _WARNINGS:
            return
        if self._first_s is None:
            self._first_s = now_s
        # A dropped connection sends SIGHUP several times: from the kernel and from the shell.
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
    """Returns the `Stopping` that takes this process's signals; None if there is none."""
    holder = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
    return holder if isinstance(holder, Stopping) else None


@contextmanager
def removed_if_stopped(folder: Path) -> Iterator[None]:
    """Within the context, a signal that ends the process also removes a folder that is being filled."""
    stopping = in_force()
    if stopping is None:
        yield
        return
    with stopping.removes(folder):
        yield


def write_last(line: str) -> None:
    """Writes a line to standard error without buffers and locks, if the line can be written soon."""
    start = "\n" if os.isatty(2) else ""  # after ^C, or after a progress bar
    with suppress(OSError, ValueError):
        if select.select([], [2], [], _LAST_WORDS_S)[1]:
            os.write(2, f"{start}{line}\n".encode())


def _silence() -> None:
    """Keeps the main thread from reporting that its folder is gone."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for output in (1, 2):
        os.dup2(nowhere, output)


def _remove(folder: Path) -> None:
    """Removes a folder that the main thread is filling, after renaming it so that nothing new is written into it."""
    import shutil

    gone = folder.with_name(f"{folder.name}.gone")
    with suppress(OSError):
        folder.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)
