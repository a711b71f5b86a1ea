"""Files that are there whole or not at all, and reading their JSON."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def write_whole(path: Path, text: str) -> None:
    """Replaces a file by another text; who looks, or dies, in between finds the old one.

    Raises:
        OSError: it cannot be written; nothing is left of the attempt.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with draft.open("wb") as file:
            file.write(_encoded(text))
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _encoded(text: str) -> bytes:
    """Returns a text as UTF-8: names of files by their own bytes, and "?" for what no encoding has."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace")


def check_encoding(path: Path, what: str) -> None:
    """Checks that the library of checkpoints, which takes paths as UTF-8, and Python mean the same place by a path.

    Raises:
        ValueError: they do not.
    """
    text, encoding = str(path.absolute()), sys.getfilesystemencoding()
    try:
        alike = text.isascii() or text.encode("utf-8") == os.fsencode(text)
    except UnicodeEncodeError:
        alike = False
    if not alike:
        raise ValueError(
            f"the path of {what} must be UTF-8, got {text!a} and the encoding {encoding} of the locale; set "
            "PYTHONUTF8=1 in the environment, or choose a path of ASCII characters"
        )


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
