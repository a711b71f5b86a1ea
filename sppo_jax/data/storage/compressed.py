"""Files of bytes, unpacked where their suffix says that they are compressed: .gz, .bz2, .lz4, .zst and .zstd."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, cast

from sppo_jax.data.storage.folders import Place, unreadable

COMPRESSED_SUFFIXES = (".gz", ".bz2", ".lz4", ".zst", ".zstd")


@contextlib.contextmanager
def reading(path: Place, line: Callable[[], int] = lambda: 0) -> Iterator[BinaryIO]:
    """Opens the content of a file, unpacked as a stream; errors of the file become one line.

    Args:
        path: a file; one of COMPRESSED_SUFFIXES says that it is compressed.
        line: tells the last line or row that was read, for messages.

    Raises:
        ValueError: the file cannot be read, or is compressed and not whole.
    """
    try:
        with open_bytes(path) as file:
            yield file
    except (OSError, EOFError, zlib.error) as error:
        if is_torn(path, error):
            raise torn(path, error, line()) from error
        if not isinstance(error, OSError):
            raise
        raise unreadable(path, error) from error


def open_bytes(path: Place) -> BinaryIO:
    """Opens the content of a file, unpacked as a stream.

    Args:
        path: a file; one of COMPRESSED_SUFFIXES says that it is compressed.

    Raises:
        EOFError: the file is compressed and has no byte.
        ValueError: the pyarrow library is missing.
        OSError: the file cannot be read.
    """
    file = path.open("rb")
    if not path.name.endswith(COMPRESSED_SUFFIXES):
        return file
    try:
        if not file.peek(1):
            raise EOFError("the file is empty")
        return cast(BinaryIO, io.BufferedReader(_Unpacked(path, file), 1 << 18))
    except BaseException:
        file.close()
        raise


def is_torn(path: Place, error: Exception) -> bool:
    """Returns whether an error of a file from `open_bytes` says that the compressed content is not whole."""
    if not path.name.endswith(COMPRESSED_SUFFIXES):
        return False
    # Errors of the system have a number; those of unpacking have none.
    return isinstance(error, (EOFError, zlib.error)) or (isinstance(error, OSError) and error.errno is None)


def torn(path: Place, error: Exception, number: int) -> ValueError:
    """Returns the error of a compressed file that cannot be unpacked behind line `number`, in one line."""
    got = f"{path} ({' '.join(str(error).split())}, after line {number})"
    if "too much memory" in str(error):
        return ValueError(f"a .zst file must have a window of at most 128 MB, got {got}; compress it without --long")
    form = "gzip" if path.suffix == ".gz" else path.suffix[1:]
    return ValueError(f"a {path.suffix} file must be whole {form}, got {got}; copy the file again")


class _Unpacked(io.RawIOBase):
    """The content of a compressed file."""

    def __init__(self, path: Place, file: io.BufferedReader) -> None:
        """Takes an open file, which is closed with this one."""
        self._file, self._stream = file, _unpacking(path, file)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        found = self._stream.read(len(buffer))
        buffer[: len(found)] = found
        return len(found)

    def close(self) -> None:
        if not self.closed:
            self._stream.close()
            self._file.close()
        super().close()


def _unpacking(path: Place, file: io.BufferedReader) -> Any:
    if path.suffix == ".gz":
        return gzip.GzipFile(fileobj=file, mode="rb")
    if path.suffix == ".bz2":
        return bz2.BZ2File(file, "rb")
    try:
        import pyarrow as pa
    except ImportError:
        raise ValueError(f"{path} needs the pyarrow library, which is not installed; run pip install pyarrow") from None
    return pa.CompressedInputStream(pa.PythonFile(file, "r"), "lz4" if path.suffix == ".lz4" else "zstd")
