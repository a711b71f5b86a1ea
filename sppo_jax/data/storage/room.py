"""Whether a disk has room for what is copied, asked before the first byte."""

from __future__ import annotations

import shutil
from pathlib import Path

from sppo_jax.data.cache.store import ANOTHER_DISK, user_directory


def check_cache(directory: Path | None, num_bytes: int) -> None:
    """Checks that the cache of tokens has room.

    Args:
        directory: the directory of the cache; None: the user's.
        num_bytes: what is to be written.

    Raises:
        ValueError: there is less room.
    """
    check_room(directory or user_directory(), num_bytes, "the cache must have room for the tokens", ANOTHER_DISK)


def check_room(directory: Path, num_bytes: int, rule: str, change: str) -> None:
    """Checks that the disk of a directory, which need not exist yet, has room.

    Args:
        directory: where something is to be written.
        num_bytes: how much.
        rule: the rule, for the message.
        change: what to do.

    Raises:
        ValueError: there is less room.
    """
    while not directory.exists():
        directory = directory.parent
    free = shutil.disk_usage(directory).free
    if free < num_bytes:
        raise ValueError(f"{rule}, {num_bytes:,} bytes, got {free:,} free in {directory}; {change}")
