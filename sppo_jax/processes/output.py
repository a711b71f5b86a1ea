"""Standard output and standard error. A failed write ends only a command whose purpose is its output.

Text goes to the file descriptor in whole lines. No buffer is left, so nothing fails again while Python ends.
"""

from __future__ import annotations

import io
import os
import select
import sys
import threading
from typing import TextIO


class OutputLost(OSError):
    """Standard output cannot be written."""


class Output(io.TextIOBase):
    """A text stream over a file descriptor.

    Attributes:
        drops: whether text that cannot be written is dropped; otherwise `OutputLost` is raised.
        lost: a line that says why text was first dropped; None while all text was written.
    """

    def __init__(self, stream: TextIO | None, descriptor: int, *, drops: bool, name: str = "standard output") -> None:
        """Writes where a stream writes.

        Args:
            stream: the stream, which gives the encoding; None if the process was started with the descriptor closed.
            descriptor: the file descriptor to write to.
            drops: see above.
            name: the name of the stream, for the line `lost`.
        """
        super().__init__()
        self.drops = drops
        self.lost: str | None = None
        self._descriptor, self._encoding = descriptor, (stream and stream.encoding) or "utf-8"
        # A path may have characters that the encoding lacks; "strict" would end a run for them.
        self._errors = (stream and stream.errors) or "strict"
        self._errors = "backslashreplace" if self._errors == "strict" else self._errors
        self._name = name
        self._line, self._torn, self._lock = "", False, threading.RLock()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._encoding

    @property
    def errors(self) -> str:  # type: ignore[override]
        return self._errors

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        """Writes the lines of a text; text after the last line end waits for the next call, or for `flush`.

        Raises:
            OutputLost: the lines cannot be written, and text is not dropped.
        """
        with self._lock:
            lines, end, self._line = (self._line + text).rpartition("\n")
            self._put(lines + end)
        return len(text)

    def flush(self) -> None:
        """Writes a line that has no end yet.

        Raises:
            OutputLost: as `write`.
        """
        with self._lock:
            text, self._line = self._line, ""
            self._put(text)

    def _put(self, text: str) -> None:
        """Writes all of a text: a full disk may have free space again. A line that was torn gets its end first."""
        data = self._encoded(("\n" if self._torn else "") + text) if text else b""
        while data:
            try:
                written = os.write(self._descriptor, data)
            except BlockingIOError:  # another program has made the pipe non-blocking
                select.select([], [self._descriptor], [])
                continue
            except OSError as error:
                self._lose(error)
                return
            self._torn, data = data[written - 1 : written] != b"\n" and len(data) > written, data[written:]

    def _encoded(self, text: str) -> bytes:
        try:
            return text.encode(self._encoding, self._errors)
        except UnicodeEncodeError:  # in the C locale a stream takes bytes of file names and no other characters
            return text.encode(self._encoding, "backslashreplace")

    def _lose(self, error: OSError) -> None:
        first = self.lost is None
        self.lost = self.lost or f"{self._name} is lost ({error.strerror}): its lines are dropped, the run continues"
        if not self.drops:
            raise OutputLost(error.errno, error.strerror) from None
        if first and sys.stderr is not self:
            print(self.lost, file=sys.stderr, flush=True)


def take_streams() -> tuple[TextIO, TextIO]:
    """Replaces standard output by an `Output`, and standard error by an `Output` that drops text.

    Streams without a file descriptor, such as those of tests, stay.

    Returns:
        The two streams of before.
    """
    before = sys.stdout, sys.stderr
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            # Closed at the start: take the number, so that no later file gets it. Writing still fails.
            os.open(os.devnull, os.O_RDONLY)
    sys.stdout = _wrapped(before[0], 1, drops=False, name="standard output")
    sys.stderr = _wrapped(before[1], 2, drops=True, name="standard error")
    return before


def _wrapped(stream: TextIO | None, descriptor: int, *, drops: bool, name: str) -> TextIO:
    if stream is not None:
        try:
            descriptor = stream.fileno()
        except (OSError, AttributeError):
            return stream
        stream.flush()
    return Output(stream, descriptor, drops=drops, name=name)  # type: ignore[return-value]


def lost_lines() -> list[str]:
    """Returns a line for each of the two streams that dropped text."""
    return [each.lost for each in (sys.stdout, sys.stderr) if isinstance(each, Output) and each.lost]
