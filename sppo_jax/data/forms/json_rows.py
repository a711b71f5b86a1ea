"""Rows in JSON: an object a line, or one array of objects, which is read object by object."""

from __future__ import annotations

import codecs
import io
import json
import re
from typing import Any, BinaryIO

from sppo_jax.data.forms.record import Rows, json_object, not_utf8
from sppo_jax.data.storage.compressed import COMPRESSED_SUFFIXES, reading
from sppo_jax.data.storage.folders import Place

LINES_SUFFIXES = tuple(f".jsonl{packed}" for packed in ("", *COMPRESSED_SUFFIXES))
JSON_SUFFIXES = (*LINES_SUFFIXES, *(f".json{packed}" for packed in ("", *COMPRESSED_SUFFIXES)))
_RULES = {
    ".jsonl": "a .jsonl file must hold one JSON object a line",
    ".json": "a .json file must hold one JSON object a line, or one array of objects",
}
_BLOCK_BYTES = 1 << 20
_BETWEEN = re.compile(r"[ \t\r\n]*")


def json_rows(path: Place) -> Rows:
    """Yields the objects of a file in order.

    Raises:
        ValueError: the file cannot be read, or holds something else.
    """
    line = 0
    with reading(path, lambda: line) as file:
        if not path.name.endswith(LINES_SUFFIXES):
            start, file = _first_byte(file)
            if start == b"[":
                yield from _array(file, path)
                return
        rule = _RULES[".jsonl" if path.name.endswith(LINES_SUFFIXES) else ".json"]
        for line, content in enumerate(file, 1):
            if content.strip():
                where = f"{path} line {line}"
                yield where, json_object(content, rule, where)


def _first_byte(file: BinaryIO) -> tuple[bytes, BinaryIO]:
    """Returns the first byte that is no space, and the file with this byte still to come."""
    buffered: Any = io.BufferedReader(file, _BLOCK_BYTES)
    while (block := buffered.peek(1)) and not block.strip():
        buffered.read(len(block))
    return block.strip()[:1], buffered


def _array(file: BinaryIO, path: Place) -> Rows:
    """Yields the objects of one array: the text is decoded block by block, and each object once it is there."""
    decoder, decode = json.JSONDecoder(), codecs.getincrementaldecoder("utf-8")().decode
    rule, number, text, at, opened, ended = _RULES[".json"], 0, "", 0, False, False

    def wrong(problem: object) -> ValueError:
        return ValueError(f"{rule}, got {path} behind item {number} ({problem}); write the file again")

    while not ended:
        # Twice as much as is left over, so that a large object is not tried too often.
        block = file.read(max(_BLOCK_BYTES, len(text) - at))
        try:
            text, at, ended = text[at:] + decode(block, not block), 0, not block
        except UnicodeDecodeError as error:
            raise not_utf8("the text of a .json file", f"{path} behind item {number}", error, "correct it") from error
        while True:
            at = _skip(text, at)
            if at == len(text):
                break
            mark = text[at]
            if not opened:
                opened, at = True, at + 1
                continue
            if mark == "]":
                if text[at + 1 :].strip() or file.read(1).strip():
                    raise wrong("something follows the array")
                return
            start = _skip(text, at + 1) if mark == "," and number else at
            if start == len(text):
                break
            if (mark == ",") != (number > 0):
                raise wrong(f"expected {',' if number else 'an object'}")
            try:
                found, at_end = decoder.raw_decode(text, start)
            except json.JSONDecodeError as error:
                if ended or not _may_go_on(text, error):
                    raise wrong(error) from error
                break
            except RecursionError:
                raise wrong("values are nested too deeply") from None
            except ValueError as error:  # such as a number of too many digits
                raise wrong(error) from error
            number, at = number + 1, at_end
            if not isinstance(found, dict):
                raise ValueError(f"{rule}, got {path} item {number} with a value of type {type(found).__name__}")
            yield f"{path} item {number}", found
    raise wrong("the array does not end")


def _skip(text: str, at: int) -> int:
    found = _BETWEEN.match(text, at)
    assert found
    return found.end()


def _may_go_on(text: str, error: json.JSONDecodeError) -> bool:
    """Returns whether an object is wrong only because its text ends too early."""
    return error.pos >= len(text) - 16 or error.msg.startswith(("Unterminated string", "Invalid \\"))
