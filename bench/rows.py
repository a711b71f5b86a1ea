"""Rows of results that are compiled one by one, each saved as it ends."""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from bench.stale import named


def compile_rows(
    names: Iterable[str], words: Sequence[str], compiled: Callable[[str], dict[str, Any]], path: Path
) -> dict[str, dict[str, Any]]:
    """Return the stored rows by name, after those whose name has one of the words, or all, were compiled and saved.

    Args:
        names: of all rows.
        words: parts of the names of the rows to compile; none: all rows.
        compiled: compiles a row.
        path: the file that has the rows.
    """
    rows = load_rows(path)
    for name in names:
        if named(name, words):
            rows[name] = compiled(name)
            path.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return rows


def load_rows(path: Path) -> dict[str, dict[str, Any]]:
    """Return the stored rows by name."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
