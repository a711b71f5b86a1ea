"""The features of a tf.train.Example, read from its bytes."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

# Types of fields in a message of protocol buffers.
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
# How an example begins: with its features, which are its only field.
_START = b"\x0a"


def example_features(record: bytes) -> dict[str, Any] | None:
    """Returns the values of an example by their names: text, integers [n] or floats [n]; None if it is no example.

    Args:
        record: the bytes; bytes of a feature that are no UTF-8 stay bytes.
    """
    if not record.startswith(_START):
        return None
    try:
        (features,) = (_bytes(value) for field, value in _fields(record) if field == 1)
        found = {}
        for field, entry in _fields(features):
            if field != 1:
                return None
            pair = dict(_fields(_bytes(entry)))
            found[_bytes(pair[1]).decode()] = _value(_bytes(pair.get(2, b"")))
        return found
    except (ValueError, KeyError, IndexError, struct.error):
        return None


def _bytes(value: bytes | int) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("a message is no number")
    return value


def _fields(message: bytes) -> list[tuple[int, bytes | int]]:
    """Returns the numbers and the values of a message's fields."""
    found: list[tuple[int, bytes | int]] = []
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        size = {_FIXED64: 8, _FIXED32: 4}.get(key & 7, 0)
        if key & 7 == _VARINT:
            number, at = _varint(message, at)
            found.append((key >> 3, number))
            continue
        if key & 7 == _BYTES:
            size, at = _varint(message, at)
        elif not size:
            raise ValueError("unknown type")
        if at + size > len(message):
            raise ValueError("too short")
        found.append((key >> 3, message[at : at + size]))
        at += size
    return found


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
        if shift > 63:
            raise ValueError("too long")


def _value(feature: bytes) -> Any:
    """Returns the values of a feature: one text if it is one, else a list or an array."""
    fields = _fields(feature)
    if not fields:
        return None
    ((wire_type, values),) = fields
    if wire_type == 1:
        texts = [_text(_bytes(value)) for _, value in _fields(_bytes(values))]
        return texts[0] if len(texts) == 1 else texts
    if wire_type == 2:
        return np.frombuffer(b"".join(_bytes(value) for _, value in _fields(_bytes(values))), "<f4")
    if wire_type != 3:
        raise ValueError("unknown list")
    numbers: list[int] = []
    for _, value in _fields(_bytes(values)):
        at = 0
        if isinstance(value, int):
            numbers.append(value)
            continue
        while at < len(value):
            number, at = _varint(value, at)
            numbers.append(number)
    return np.array(numbers, np.uint64).astype(np.int64)


def _text(value: bytes) -> str | bytes:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value
