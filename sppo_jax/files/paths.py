"""Paths that a user gives: read in one way everywhere, and errors of files in one line."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
# What may be keys in an address: words behind a mark, and what stands before @, where Azure's container stands too.
_KEYS = re.compile(r"[?&;](?=[^/]*=)|://[^/]*:[^/]*@|^(?!abfss?://)[^/]*://[^/]*@", re.DOTALL | re.IGNORECASE)
_VARIABLE = re.compile(r"\$(?:(\w+)|\{([^}]*)\})", re.ASCII)
_TOO_MANY_OPEN = (errno.EMFILE, errno.ENFILE)


def has_keys(address: str) -> bool:
    """Returns whether an address may hold credentials, so that nothing of the address may reach a message."""
    return bool(_KEYS.search(address))


def check_local(path: str, name: str) -> None:
    """Checks that a path is no address, such as s3://bucket/run: files are read and written on this machine alone.

    Args:
        path: as the user gave it.
        name: what the path is, for errors.

    Raises:
        ValueError: it is an address.
    """
    if _SCHEME.match(path):
        address = f"the address {path}" if not has_keys(path) else "an address with keys in it"
        raise ValueError(
            f"{name} must be a path on this machine, got {address}; mount or copy what is there, and name its path"
        )


def local_path(path: str | Path, name: str) -> Path:
    """Returns a path that a user gave, with `~` and variables such as `$HOME` replaced.

    A path that exists as it is written needs no variables.

    Args:
        path: as the user gave it; may be a pattern.
        name: what the path is, for errors.

    Raises:
        ValueError: it is an address, or has a variable that is not set.
    """
    text = os.path.expanduser(path)
    check_local(text, name)
    if os.path.lexists(text):
        return Path(text)
    for found in _VARIABLE.finditer(text):
        variable = found[1] or found[2]
        if not os.environ.get(variable):
            raise ValueError(
                f"{name} must have variables that are set, got {path} without {variable} in the environment; set "
                f"{variable}, or write the path out"
            )
    return Path(os.path.expanduser(os.path.expandvars(text)))


def file_error(rule: str, got: object, error: OSError, change: str) -> ValueError:
    """Returns the error of a file that cannot be used, in one line.

    Args:
        rule: what the file must be.
        got: the file.
        error: of the system; where it is the limit of open files, the limit is what to change.
        change: what else to change.
    """
    if error.errno in _TOO_MANY_OPEN:
        change = "raise the limit of open files (ulimit -n), or give fewer files"
    return ValueError(f"{rule}, got {got} ({error.strerror or error}); {change}")
