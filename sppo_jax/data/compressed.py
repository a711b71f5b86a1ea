"""Files of bytes, unpacked where their suffix says that they are compressed: .gz, .bz2, .lz4 and .zst."""

from __future__ import annotations

import bz2
import gzip
import io
import zlib
from pathlib import Path
from typing import Any, BinaryIO, cast

COMPRESSED_SUFFIXES = (".gz", ".bz2", ".lz4", ".zst")


def open_bytes(path: Path) -> BinaryIO:
    """Opens the content of a file, unpacked as a stream.

    Args:
        path: a file; one of COMPRESSED_SUFFIXES says that it is compressed.

    Raises:
        EOFError: the file is compressed and has no byte.
        ValueError: the pyarrow library is missing.
        OSError: the file cannot be read.
    """
    if path.name.endswith(COMPRESSED_SUFFIXES) and not path.stat().st_size:
        raise EOFError("the file is empty")
    if path.name.endswith(".gz"):
        return cast(BinaryIO, gzip.open(path, "rb"))
    if path.name.endswith(".bz2"):
        return cast(BinaryIO, bz2.open(path, "rb"))
    if path.name.endswith((".zst", ".lz4")):
        return io.BufferedReader(_Unpacked(path), 1 << 16)
    return open(path, "rb")


def is_torn(path: Path, error: Exception) -> bool:
    """Returns whether an error of a file from `open_bytes` says that the compressed content is not whole."""
    if not path.name.endswith(COMPRESSED_SUFFIXES):
        return False
    # Errors of the system have a number; those of unpacking have none.
    return isinstance(error, (EOFError, zlib.error)) or (isinstance(error, OSError) and error.errno is None)


def torn(path: Path, error: Exception, number: int) -> ValueError:
    """Returns the error of a compressed file that cannot be unpacked behind line `number`, in one line."""
    got = f"{path} ({' '.join(str(error).split())}, after line {number})"
    if "too much memory" in str(error):
        return ValueError(f"a .zst file must have a window of at most 128 MB, got {got}; compress it without --long")
    kind = "gzip" if path.suffix == ".gz" else path.suffix[1:]
    return ValueError(f"a {path.suffix} file must be whole {kind}, got {got}; copy the file again")


class _Unpacked(io.RawIOBase):
    """The content of a .zst or .lz4 file."""

    def __init__(self, path: Path) -> None:
        """Opens the file."""
        try:
            import pyarrow as pa
        except ImportError:
            raise ValueError(
                f"{path} needs the pyarrow library, which is not installed; run pip install pyarrow"
            ) from None
        self._file = pa.OSFile(str(path), "rb")
        self._stream = pa.CompressedInputStream(self._file, "zstd" if path.suffix == ".zst" else "lz4")

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
