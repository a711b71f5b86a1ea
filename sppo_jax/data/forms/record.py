"""A row of a file, and the errors that every form has in common."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sppo_jax.files.whole import parse_json

# Where a row stands, for messages, and its values by their names.
Row = tuple[str, dict[str, Any]]
Rows = Iterator[Row]


def json_object(content: bytes | str, what: str, where: str, change: str = "correct the line") -> dict[str, Any]:
    """Returns the JSON object that some bytes hold.

    Args:
        content: UTF-8.
        what: the rule, such as "a .jsonl file must hold one JSON object a line".
        where: the place, for messages.
        change: what to do.

    Raises:
        ValueError: the bytes hold no JSON object.
    """
    try:
        found = parse_json(content)
    except UnicodeDecodeError as error:
        raise not_utf8(f"the text of {what.split(' must ')[0]}", where, error, change) from error
    except ValueError as error:
        raise ValueError(f"{what}, got {where} ({error}); {change}") from error
    if not isinstance(found, dict):
        got = type(found).__name__
        raise ValueError(f"{what}, got {where} with a value of type {got}; {change}")
    return found


def not_utf8(what: str, where: object, error: UnicodeDecodeError, change: str) -> ValueError:
    """Returns the error of text that is not UTF-8."""
    return ValueError(
        f"{what} must be UTF-8, got {where} ({error.reason}: byte 0x{error.object[error.start]:02x}); {change}"
    )


def not_whole(suffix: str, where: object, problem: object, change: str = "write the file again") -> ValueError:
    """Returns the error of a file that is cut short or broken, in one line."""
    return ValueError(f"a {suffix} file must be whole, got {where} ({' '.join(str(problem).split())}); {change}")


def need_pyarrow(where: object) -> ValueError:
    """Returns the error of a file that only pyarrow can read."""
    return ValueError(f"{where} needs the pyarrow library, which is not installed; run pip install pyarrow")
