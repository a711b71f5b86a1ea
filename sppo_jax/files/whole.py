"""Files that are there whole or not at all, their JSON, and where files go that can be made again."""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
from pathlib import Path
from typing import Any


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


def file_system_of(path: Path, mounts: Path = Path("/proc/mounts")) -> str:
    """Returns the type of the file system on which a path is, such as nfs4 or fuse.s3fs; "unknown" without a list.

    Args:
        path: need not be there.
        mounts: the system's list of what is mounted: of each the device, the place and the type.
    """
    try:
        lines = [line.split() for line in mounts.read_text(encoding="utf-8", errors="replace").splitlines()]
    except OSError:
        return "unknown"
    real = os.path.realpath(path)
    # A later mount hides an earlier one at the same place. A space in the list is written as an octal number.
    types = {words[1].replace("\\040", " "): words[2] for words in lines if len(words) > 2}
    places = [place for place in types if os.path.commonpath((place, real)) == place]
    return types[max(places, key=len)] if places else "unknown"


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
        json.JSONDecodeError: the text is not JSON, or its values are nested too deeply to be read.
    """
    try:
        return json.loads(text)
    except RecursionError:
        shown = text if isinstance(text, str) else text.decode(errors="replace")
        raise json.JSONDecodeError("values are nested too deeply", shown, 0) from None


def finite(value: Any) -> Any:
    """Returns a value for JSON with None in place of every number that is not finite: JSON has no such numbers."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, list | tuple) else value


def json_text(value: Any, *, indent: int | None = None, separators: tuple[str, str] | None = None) -> str:
    """Returns a value as JSON that every parser reads; what is not finite becomes null.

    Args:
        value: of objects, lists, texts, numbers and None.
        indent: as for `json.dumps`.
        separators: as for `json.dumps`.
    """
    return json.dumps(finite(value), indent=indent, separators=separators, allow_nan=False)


def cache_directory(name: str) -> Path:
    """Returns one of the user's directories for what can be made again; a temporary one if the user has no home.

    Args:
        name: of the directory.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "sppo_jax" / name
    except RuntimeError:
        return temporary_directory(name)


def temporary_directory(name: str) -> Path:
    """Returns a directory of this user's among the temporary ones; nothing is made."""
    return Path(tempfile.gettempdir()) / f"sppo_jax-{os.getuid()}" / name
