"""The files of a directory or a pattern: one rule for names, hidden files and links."""

from __future__ import annotations

import contextlib
import glob
import os
import stat
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from sppo_jax.data.storage.remote import Remote, changed
from sppo_jax.files.paths import file_error

# The pattern that a directory means: all its files, and those of its directories.
EVERYTHING: tuple[str, ...] = ("**", "*")
# A file of this machine, or one behind an address.
Place = Path | Remote
_BEGINNING_BYTES = 4096
# Device and number of a directory, which are the same under every name.
Identity = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class File:
    """A file of a source: its path, its name within the source, and its size and time when the run began.

    Args:
        path: where the file lies.
        name: the name within the source.
        num_bytes: its size.
        changed_ns: the time of its last change.
        version: what else tells one version of a remote file from another; "" for a file of this machine.
    """

    path: Place
    name: str
    num_bytes: int
    changed_ns: int
    version: str = ""

    @property
    def key(self) -> list[str | int]:
        return [self.name, self.num_bytes, self.changed_ns, *([self.version] if self.version else [])]


def look_at(path: Place, name: str) -> File:
    """Returns a file with its size and time.

    Raises:
        ValueError: there is no such file.
    """
    if not isinstance(path, Path):
        info = path.look()
        return File(path=path, name=name, num_bytes=info.size or 0, changed_ns=info.mtime_ns or 0, version=path.version)
    try:
        found = path.stat()
    except OSError as error:
        raise unreadable(path, error) from error
    return File(path=path, name=name, num_bytes=found.st_size, changed_ns=found.st_mtime_ns)


@contextlib.contextmanager
def unchanged(file: File) -> Iterator[None]:
    """Checks around the reading of a file that the file stays as it was when the run began.

    Raises:
        ValueError: the file has changed; of a remote file also what the service calls its version counts.
    """
    before = _state(file)
    if before[0] != file:
        raise changed(file.path)
    yield
    if _state(file) != before:
        raise changed(file.path)


def beginnings(files: Sequence[File]) -> list[int]:
    """Returns checksums of the beginnings of the first, the middle and the last file.

    Names, sizes and times may be the same in two places, as where an archive sets all times to one.

    Raises:
        ValueError: a file cannot be read.
    """
    found = []
    for file in dict.fromkeys([files[0], files[len(files) // 2], files[-1]]):
        try:
            with file.path.open("rb") as content:
                found.append(zlib.crc32(content.read(_BEGINNING_BYTES)))
        except OSError as error:
            raise unreadable(file.path, error) from error
    return found


def _state(file: File) -> tuple[File, str]:
    return look_at(file.path, file.name), "" if isinstance(file.path, Path) else file.path.etag()


def exists(path: Place) -> bool:
    """Returns whether a file or a folder is there."""
    return path.exists() if isinstance(path, Path) else path.look().type.name != "NotFound"


def unreadable(path: str | Place, error: OSError) -> ValueError:
    """Returns the error that says that a source cannot be read."""
    return file_error("data.source must be readable", path, error, "choose another source")


def is_pattern(path: Path) -> bool:
    """Returns whether a path is a pattern; a path that exists is none."""
    return glob.has_magic(str(path)) and not path.exists()


def files_in(path: Path) -> tuple[Path, list[Path]]:
    """Finds the files of a directory or of a pattern.

    `**` means any number of directories. Links are followed, but no directory is entered from within itself.
    Hidden files and directories are left out unless the pattern writes their dot. A link to nothing counts as a file.

    Args:
        path: a directory or a pattern.

    Returns:
        The directory, or the directories before the first `*`, `?` or `[`; and the files, each once.

    Raises:
        ValueError: a directory cannot be read.
    """
    root, pattern = path, EVERYTHING
    if not path.is_dir():
        first = next(at for at, part in enumerate(path.parts) if glob.has_magic(part))
        root, pattern = Path(*path.parts[:first]), path.parts[first:]
    return root, [Path(file) for file in dict.fromkeys(_enter(str(root), pattern, frozenset()))]


def _enter(directory: str, pattern: tuple[str, ...], above: frozenset[Identity]) -> Iterator[str]:
    """Yields the files below a directory whose names match; `above` are the directories that it was reached through."""
    try:
        found = os.stat(directory)
    except OSError:
        return
    identity = found.st_dev, found.st_ino
    if stat.S_ISDIR(found.st_mode) and identity not in above:
        yield from _expand(directory, pattern, above | {identity})


def _expand(directory: str, pattern: tuple[str, ...], above: frozenset[Identity]) -> Iterator[str]:
    """Yields the files of a directory that has been entered."""
    first, rest = pattern[0], pattern[1:]
    if first == "**":
        yield from _expand(directory, rest or ("*",), above)
    for name in _names(directory):
        path = os.path.join(directory, name)
        if first == "**":
            if not name.startswith("."):
                yield from _enter(path, pattern, above)
        elif fnmatchcase(name, first) and (not name.startswith(".") or first.startswith(".")):
            if rest:
                yield from _enter(path, rest, above)
            elif os.path.isfile(path) or not os.path.exists(path):
                yield path


def _names(directory: str) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except OSError as error:
        raise unreadable(directory, error) from error
