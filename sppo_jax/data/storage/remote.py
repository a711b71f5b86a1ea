"""Files behind addresses: read block by block, again and with growing waits where a service fails."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import re
import sys
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, TypeVar

from sppo_jax.processes import distributed

_T = TypeVar("_T")
# The first block is small: of many files only the beginning is looked at.
_FIRST_BYTES, _BLOCK_BYTES = 1 << 18, 1 << 23
_FIRST_WAIT_S, _LONGEST_WAIT_S, _PATIENCE_S = 1.0, 60.0, 600.0
# What will not pass by waiting, as services and their libraries say it, and what to do.
_LASTING = {
    r"NO_SUCH_BUCKET|NoSuchBucket|bucket does not exist": "name a bucket that exists",
    r"NO_SUCH_KEY|NoSuchKey|RESOURCE_NOT_FOUND|NOT_FOUND|not exist|HTTP 404|404 Client": "name what exists",
    r"ACCESS_DENIED|AccessDenied|Forbidden|PERMISSION_DENIED|HTTP 403|403 Client|anonymous": (
        "set credentials with read access in the environment"
    ),
    r"INVALID_ACCESS_KEY|INVALID_CLIENT_TOKEN|InvalidAccessKeyId|SIGNATURE_DOES_NOT_MATCH|UNAUTHENTICATED|"
    r"UNRECOGNIZED_CLIENT|HTTP 401|401 Client|EXPIRED_TOKEN|OAuth2 access token|[Cc]redential": (
        "set valid credentials in the environment"
    ),
    r"PermanentRedirect|HTTP 301|AuthorizationHeaderMalformed|region": "set AWS_REGION to the region of the bucket",
}
_SECRET = re.compile(r"KEY|SECRET|TOKEN|PASSWORD|SAS|CONNECTION_STRING")


@dataclass(frozen=True, kw_only=True)
class Remote:
    """A file or a folder behind an address.

    Args:
        files: the file system, of pyarrow.
        host: the beginning of the address, such as s3://bucket, without credentials.
        path: the path in the file system, bucket first.
        version: the commit that the path names; "" where the file system has none.
    """

    files: Any = field(compare=False, repr=False)
    host: str
    path: str
    version: str = ""

    def __str__(self) -> str:
        return "/".join([self.host, *self.path.split("/")[1:]])

    @property
    def name(self) -> str:
        return PurePosixPath(self.path).name

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.path).suffix

    @property
    def parent(self) -> Remote:
        return self.at(self.path.rpartition("/")[0])

    def __truediv__(self, name: str) -> Remote:
        return self.at(f"{self.path.rstrip('/')}/{name}")

    def with_suffix(self, suffix: str) -> Remote:
        """Returns the path with another suffix."""
        return self.at(str(PurePosixPath(self.path).with_suffix(suffix)))

    def at(self, path: str) -> Remote:
        """Returns another path of the same file system."""
        return dataclasses.replace(self, path=path)

    def open(self, mode: str = "rb") -> io.BufferedReader:
        """Opens the file to read its bytes."""
        assert mode == "rb"
        return io.BufferedReader(_RemoteFile(self), 1 << 16)

    def look(self) -> Any:
        """Returns what pyarrow knows of the path: its type, size and time.

        Raises:
            ValueError: the service does not answer, or does not let us.
        """
        return patiently(self, lambda: self.files.get_file_info(self.path))

    def etag(self) -> str:
        """Returns what the service calls this version of the file; "" where it has no word for it.

        Raises:
            ValueError: the service does not answer, or does not let us.
        """

        def read() -> str:
            with self.files.open_input_file(self.path) as file:
                return _etag_of(file)

        return patiently(self, read)


def patiently(place: Remote | str, action: Callable[[], _T], at_byte: Callable[[], int] | None = None) -> _T:
    """Does something remote again, after growing waits, until it succeeds; says once that it waits.

    Args:
        place: what is read or written, or its address.
        action: raises OSError where it fails.
        at_byte: tells where reading goes on.

    Raises:
        ValueError: the failure will not pass, or has not passed for minutes.
    """
    start_s, wait_s, told, listener = time.monotonic(), _FIRST_WAIT_S, False, distributed.Listener()
    while True:
        try:
            return action()
        except _faults() as error:
            if isinstance(error, ValueError):
                raise
            change = _lasting(error)
            if change or time.monotonic() - start_s + wait_s > _PATIENCE_S:
                raise remote_error(place, error, change or "try again when the service answers") from error
            if not told:
                where = f", from byte {at_byte():,}" if at_byte else ""
                warnings.warn(f"{place} could not be reached ({_said(error)}); it is tried again{where}", stacklevel=3)
                told = True
            listener.check()
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)


def _faults() -> tuple[type[Exception], ...]:
    """Returns the errors of services; some of Azure's, and those of the hub's library, are no errors of the system."""
    errors = (("httpx", "HTTPError"), ("httpx2", "HTTPError"), ("pyarrow", "ArrowException"))
    return (OSError, *(getattr(sys.modules[name], error) for name, error in errors if name in sys.modules))


def remote_error(place: object, error: Exception, change: str) -> ValueError:
    """Returns the error of an address that cannot be used, in one line without credentials."""
    return ValueError(f"an address must be readable, got {place} ({_said(error)}); {change}")


def _lasting(error: Exception) -> str:
    """Returns what to do about a failure that no waiting helps; "" where waiting may help."""
    if isinstance(error, (FileNotFoundError, NotADirectoryError, IsADirectoryError)):
        return "name what exists"
    if isinstance(error, PermissionError):
        return "set credentials with read access in the environment"
    return next((change for pattern, change in _LASTING.items() if re.search(pattern, str(error))), "")


def _said(error: Exception) -> str:
    """Returns what an error says, in a line, without values of secret variables of the environment."""
    text = " ".join(str(error).split())[:400]
    for name, value in os.environ.items():
        if len(value) >= 8 and _SECRET.search(name):
            text = text.replace(value, "***")
    return text


def _etag_of(file: Any) -> str:
    try:
        found = file.metadata() or {}
    except NotImplementedError:
        return ""
    words = {_word(key).lower(): _word(value) for key, value in found.items()}
    return words.get("etag") or words.get("generation") or ""


def _word(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


class _RemoteFile(io.RawIOBase):
    """A file that is read in large blocks, the next one while the last is used."""

    def __init__(self, place: Remote) -> None:
        """Opens the file.

        Raises:
            ValueError: it cannot be opened.
        """
        self._place = place
        self._file: Any = None
        self._etag: str | None = None
        self._at, self._block, self._block_at = 0, b"", 0
        self._begun = False
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="sppo-remote")
        self._next: tuple[int, Future[bytes]] | None = None
        self._size = patiently(place, self._connect)

    def _connect(self) -> int:
        """Opens the connection, again after a failure; returns the bytes of the file."""
        file = self._place.files.open_input_file(self._place.path)
        etag = _etag_of(file)
        if self._etag is not None and etag != self._etag:
            file.close()
            raise changed(self._place)
        self._file, self._etag = file, etag
        return int(file.size())

    def _fetch(self, start: int) -> bytes:
        """Reads a block, in the thread of the pool."""
        size = min(_BLOCK_BYTES if self._begun else min(_FIRST_BYTES, _BLOCK_BYTES), self._size - start)
        self._begun, done = True, bytearray()

        def go_on() -> bytes:
            try:
                if self._file is None:
                    self._connect()
                self._file.seek(start + len(done))
                while len(done) < size:
                    found = self._file.read(size - len(done))
                    if not found:
                        raise OSError(f"the answer ended after {start + len(done):,} of {self._size:,} bytes")
                    done.extend(found)
                return bytes(done)
            except _faults():
                self._disconnect()
                raise

        return patiently(self._place, go_on, lambda: start + len(done))

    def _disconnect(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
        self._file = None

    def readinto(self, buffer: Any) -> int:
        if self._at >= self._size:
            return 0
        if not self._block_at <= self._at < self._block_at + len(self._block):
            self._take()
        first = self._at - self._block_at
        found = memoryview(self._block)[first : first + len(buffer)]
        buffer[: len(found)] = found
        self._at += len(found)
        return len(found)

    def _take(self) -> None:
        """Takes the block that was read ahead, if it is the one, and reads the next one ahead."""
        ahead, self._next = self._next, None
        goes_on = self._at == self._block_at + len(self._block)
        self._block = ahead[1].result() if ahead and ahead[0] == self._at else b""
        if not self._block:
            self._block = self._pool.submit(self._fetch, self._at).result()
        self._block_at = self._at
        after = self._at + len(self._block)
        if goes_on and self._block_at > 0 and after < self._size:
            self._next = after, self._pool.submit(self._fetch, after)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        if not self.closed:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._disconnect()
        super().close()


def changed(place: object) -> ValueError:
    """Returns the error of a file that is not what it was."""
    return ValueError(
        f"data.source must not change while it is read, got a change of {place}; start again when the file is complete"
    )
