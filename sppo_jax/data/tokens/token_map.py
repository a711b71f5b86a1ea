"""Tokens in a file, mapped while they are read: any number of files, few of them open at a time."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sppo_jax.files.paths import file_error

# Files that are open at a time, in a process whose limit is often 1,024.
_MOST_OPEN = 128


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenMap:
    """The integers of a file, as a one-dimensional array that is read by slices.

    Args:
        path: the file.
        dtype: of the integers.
        offset_bytes: where the first integer begins.
        length: number of integers.
        changed_ns: time of the last change of the file, as when the run began.
    """

    path: Path
    dtype: np.dtype
    offset_bytes: int
    length: int
    changed_ns: int

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, part: slice) -> np.ndarray:
        """Returns some of the integers, mapped.

        Raises:
            ValueError: the file cannot be read, or has changed since the run began.
        """
        return _open(self)[part] if self.length else np.zeros(0, self.dtype)


@functools.lru_cache(maxsize=_MOST_OPEN)
def _open(tokens: TokenMap) -> np.ndarray:
    path = tokens.path
    try:
        changed_ns = path.stat().st_mtime_ns
        mapped = np.memmap(path, tokens.dtype, "r", offset=tokens.offset_bytes, shape=(tokens.length,))
        found = mapped.view(np.ndarray)  # whose slices cost less
    except (OSError, ValueError) as error:
        if isinstance(error, OSError):
            raise file_error("data.source must be readable", path, error, "choose another source") from error
        changed_ns = -1  # shorter than it was
    if changed_ns != tokens.changed_ns:
        raise ValueError(
            f"tokens must not change while they are read, got a change of {path}; start again when the file is complete"
        )
    return found
