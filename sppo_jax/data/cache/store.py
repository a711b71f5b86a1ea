"""A cache of the tokens of a source, and of the places where its documents end.

An entry is a directory whose name is a hash of everything that the entry depends on. A process fills the directory
under another name and then renames it, so an entry is there whole or not at all. A process that is killed before the
renaming leaves a directory, which the next process removes.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import platform
import shutil
import tempfile
import time
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sppo_jax.data.tokens.token_map import TokenMap
from sppo_jax.files.locks import try_lock
from sppo_jax.files.paths import file_error
from sppo_jax.files.whole import cache_directory, parse_json, temporary_directory
from sppo_jax.processes import distributed

ANOTHER_DISK = "free space, or set data.cache (of a bucket: XDG_CACHE_HOME) to another disk"
_VERSION = 2
_WARN_AFTER_S = 5.0
_LEFT_AFTER_S = 7 * 24 * 3600.0


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What the cache holds of a source.

    Args:
        starts: first token of each document, int64 [num_documents].
        ends: one past the last token of each document, int64 [num_documents].
        facts: other facts that were written about the source.
        tokens: integers [num_tokens], in the file; None where the source itself holds tokens.
    """

    starts: np.ndarray
    ends: np.ndarray
    facts: dict[str, Any]
    tokens: TokenMap | None


class Writer:
    """Takes tokens and ends of documents as they come; nothing is kept in memory."""

    def __init__(self, directory: Path, dtype: np.dtype | None) -> None:
        """Opens the files of an entry.

        Args:
            directory: the directory of the entry.
            dtype: the dtype of the tokens; None: the entry keeps no tokens.
        """
        self._dtype, self.facts = dtype, dict[str, Any]()
        self._num_tokens = self._before = 0
        self._crc = 0
        self._ends = open(directory / "bounds.bin", "wb")
        self._ends.write(np.zeros(1, np.int64).tobytes())
        self._tokens = open(directory / "tokens.bin", "wb") if dtype is not None else None

    def add_tokens(self, tokens: np.ndarray) -> None:
        """Appends tokens."""
        assert self._tokens is not None and self._dtype is not None
        written = tokens.astype(self._dtype).tobytes()
        self._crc = zlib.crc32(written, self._crc)
        self._tokens.write(written)
        self._num_tokens += len(tokens)

    def add_ends(self, ends: np.ndarray) -> None:
        """Appends ends of documents, int64, counted from the beginning of the part."""
        self._ends.write((ends + self._before).astype(np.int64).tobytes())

    @property
    def crc(self) -> int:
        """The checksum of all tokens so far."""
        return self._crc

    def begin_part(self) -> None:
        """Begins a part: ends that follow are counted from here."""
        self._before = self._num_tokens

    def close(self) -> None:
        """Writes all that is left to the disk, and closes the files."""
        for file in (self._ends, self._tokens):
            if file:
                file.flush()
                os.fsync(file.fileno())
                file.close()


def name_of(key: dict[str, Any], dtype: np.dtype | None) -> str:
    """Returns the name of an entry.

    Args:
        key: everything that the entry depends on, as values that JSON can hold.
        dtype: the dtype of the tokens; None: the entry has no tokens.
    """
    text = json.dumps([_VERSION, key, np.dtype(dtype).str if dtype is not None else None], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def entry_of(
    directory: Path | None, key: dict[str, Any], fill: Callable[[Writer], None], *, dtype: np.dtype | None
) -> Entry:
    """Returns an entry of the cache, which this process or another process has made.

    Args:
        directory: the directory of the cache; None: the user's cache directory.
        key: everything that the entry depends on, as values that JSON can hold.
        fill: writes the tokens and ends, and puts other facts into `facts`.
        dtype: the dtype of the tokens; None: the entry has no tokens.

    Raises:
        ValueError: the cache cannot be written, or whatever `fill` raises.
    """
    return named_entry(directory, name_of(key, dtype), fill, dtype=dtype)


def named_entry(directory: Path | None, name: str, fill: Callable[[Writer], None], *, dtype: np.dtype | None) -> Entry:
    """Returns an entry by its name, see `entry_of`."""
    found = read_entry((directory or user_directory()) / name, dtype)
    if found:
        return found
    root = _writable(directory)
    try:
        with _lock(root / f"{name}.lock") as alone:
            if alone:
                _remove_left(root, name)
            return read_entry(root / name, dtype) or _make(root, name, fill, dtype)
    except OSError as error:
        rule = "data.cache must be a directory in which tokens can be kept"
        raise file_error(rule, root, error, "set data.cache to another directory") from error


def read_entry(path: Path, dtype: np.dtype | None) -> Entry | None:
    """Returns a finished entry; None if there is no entry, or if its files are not as they were written."""
    try:
        facts = parse_json((path / "facts.json").read_text(encoding="utf-8"))
        for name, num_bytes in facts["files"].items():
            if (path / name).stat().st_size != num_bytes:
                return None
        tokens = _map(path / "tokens.bin", dtype) if dtype is not None else None
        # Mapped: bounds that are not looked at take no memory.
        bounds = np.memmap(path / "bounds.bin", np.int64, "r").view(np.ndarray)
        return Entry(starts=bounds[:-1], ends=bounds[1:], facts=facts, tokens=tokens)
    except (OSError, ValueError, KeyError):
        return None


def user_directory() -> Path:
    """Returns the user's directory for caches of tokens; a temporary directory if the user has no home."""
    return cache_directory("tokens")


def _make(root: Path, name: str, fill: Callable[[Writer], None], dtype: np.dtype | None) -> Entry:
    new = Path(tempfile.mkdtemp(prefix=f"{name}.new-{platform.node()}-", dir=root))
    try:
        writer = Writer(new, dtype)
        try:
            fill(writer)
        finally:
            writer.close()
        writer.facts["files"] = {path.name: path.stat().st_size for path in new.iterdir()}
        (new / "facts.json").write_text(json.dumps(writer.facts), encoding="utf-8")
        new.chmod(0o755)
        _move(new, root / name, dtype)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        written = sum(path.stat().st_size for path in new.iterdir())
        raise ValueError(
            f"the cache must have room for the tokens, got a disk that was full after {written:,} bytes in {root}; "
            f"{ANOTHER_DISK}"
        ) from error
    finally:
        shutil.rmtree(new, ignore_errors=True)
    found = read_entry(root / name, dtype)
    if not found:
        raise OSError(f"{root / name} cannot be read back")
    return found


def _remove_left(root: Path, name: str) -> None:
    """Removes what killed processes of this machine left, and old directories of others, which a lock may not reach."""
    for left in root.glob(f"{name}.new-*"):
        with contextlib.suppress(FileNotFoundError):
            own = left.name.startswith(f"{name}.new-{platform.node()}-")
            if own or time.time() - left.stat().st_mtime > _LEFT_AFTER_S:
                shutil.rmtree(left, ignore_errors=True)


def _move(new: Path, path: Path, dtype: np.dtype | None) -> None:
    """Renames a new entry to its place, unless another process without a lock was faster; replaces a broken entry."""
    try:
        new.rename(path)
    except OSError:
        if not read_entry(path, dtype):
            shutil.rmtree(path, ignore_errors=True)
            new.rename(path)


def _map(path: Path, dtype: np.dtype) -> TokenMap:
    found = path.stat()
    length = found.st_size // dtype.itemsize
    return TokenMap(path=path, dtype=dtype, offset_bytes=0, length=length, changed_ns=found.st_mtime_ns)


def _writable(directory: Path | None) -> Path:
    """Returns a directory that can be written: the given directory, else the user's, else a temporary one."""
    problem = _cannot_write(directory or user_directory())
    if not problem:
        return directory or user_directory()
    if directory:
        raise ValueError(
            f"data.cache must be a directory that can be written, got {directory} ({problem}); choose another directory"
        )
    other = temporary_directory("tokens")
    if _cannot_write(other):
        raise ValueError(
            f"the directory of tokens must be writable, got {user_directory()} ({problem}) and {other}; "
            "set data.cache to another directory"
        )
    warnings.warn(
        f"tokens are kept in {other} because {user_directory()} cannot be written ({problem}); "
        "set data.cache to choose another directory",
        stacklevel=2,
    )
    return other


def _cannot_write(directory: Path) -> str:
    """Returns why a directory cannot be written, "" if it can be written; makes a missing directory."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            return ""
    except OSError as error:
        return error.strerror or str(error)


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[bool]:
    """Lets one process of this machine in at a time; yields whether the file system could lock."""
    start_s, warned, alone, listener = time.monotonic(), False, False, distributed.Listener()
    with open(path, "a", encoding="utf-8") as file:
        while not alone:
            locked = try_lock(file)
            if locked is None:
                break
            alone = locked
            if not alone:
                listener.check()
                time.sleep(0.05)
            if not alone and not warned and time.monotonic() - start_s > _WARN_AFTER_S:
                warned = True
                warnings.warn(
                    f"waiting for another process that writes the tokens in {path.with_suffix('')}", stacklevel=4
                )
        yield alone
