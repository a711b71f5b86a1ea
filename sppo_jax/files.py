"""Files that are there whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Replaces a file by another text; who looks, or dies, in between finds the old one.

    A link stays, and what it points to is replaced. What is no file, such as /dev/stdout, is written to.

    Raises:
        OSError: it cannot be written; nothing is left of the attempt.
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file() and not path.is_dir():
        path.write_text(text, encoding="utf-8")
        return
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with draft.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
