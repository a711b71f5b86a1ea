"""Locks of files, on file systems that may have none."""

from __future__ import annotations

import errno
import fcntl
from typing import IO, Any

# What flock answers where another process holds the lock. A file system, or its server, without locks answers
# ENOSYS, ENOLCK, EOPNOTSUPP or another error.
_HELD = (errno.EAGAIN, errno.EWOULDBLOCK, errno.EACCES)


def try_lock(file: IO[Any], *, shared: bool = False) -> bool | None:
    """Tries to lock an open file; does not wait. The system releases the lock when the file is closed.

    Args:
        file: open.
        shared: whether others may hold it, shared, at the same time.

    Returns:
        Whether the file is locked now: True, False where another process holds it, None where it cannot be locked.
    """
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in _HELD else None
    return True
