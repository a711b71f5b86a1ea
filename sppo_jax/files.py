"""Files that are there whole or not at all, and reading their JSON."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def write_whole(path: Path, text: str) -> None:
    """Replaces a file by another text; who looks, or dies, in between finds the old one.

    Raises:
        OSError: it cannot be written; nothing is left of the attempt.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with draft.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def parse_json(text: str | bytes) -> Any:
    """Returns the value that JSON text holds.

    Raises:
        json.JSONDecodeError: the text is not JSON, or its values lie too deep in each other to be read.
    """
    try:
        return json.loads(text)
    except RecursionError:
        shown = text if isinstance(text, str) else text.decode(errors="replace")
        raise json.JSONDecodeError("values lie too deep in each other", shown, 0) from None
