"""The files of a directory or a pattern: one rule for names, hidden files and links."""

from __future__ import annotations

import glob
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from sppo_jax.paths import file_error

# The pattern that a directory means: all its files, and those of its directories.
_EVERYTHING: tuple[str, ...] = ("**", "*")
# Device and number of a directory, which are the same under every name.
Identity = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class File:
    """A file of a source: its path, its name within the source, and its size and time when the run began."""

    path: Path
    name: str
    num_bytes: int
    changed_ns: int

    @property
    def key(self) -> list[str | int]:
        return [self.name, self.num_bytes, self.changed_ns]


def look_at(path: Path, name: str) -> File:
    """Returns a file with its size and time.

    Raises:
        ValueError: there is no such file.
    """
    try:
        found = path.stat()
    except OSError as error:
        raise unreadable(path, error) from error
    return File(path=path, name=name, num_bytes=found.st_size, changed_ns=found.st_mtime_ns)


def unreadable(path: str | Path, error: OSError) -> ValueError:
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
    root, pattern = path, _EVERYTHING
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
