"""Megatron's index of a .bin file: the dtype of the tokens, the lengths of sequences, and the documents of these."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

from sppo_jax.data.storage.folders import File, Place, exists, look_at, unreadable

_MAGIC, _VERSION = b"MMIDIDX\x00\x00", 1
_HEAD = struct.Struct("<9sQBQQ")
# The dtypes of tokens by their number, from 1.
_DTYPES = ("uint8", "int8", "int16", "int32", "int64", "float64", "float32", "uint16")


@dataclass(frozen=True, kw_only=True)
class Index:
    """What stands at the beginning of an index.

    Args:
        file: the .idx file.
        dtype: of the tokens in the .bin file.
        num_sequences: number of sequences.
        num_bounds: number of bounds between documents, the first and the last included.
    """

    file: File
    dtype: np.dtype
    num_sequences: int
    num_bounds: int


def index_beside(path: Place) -> Index | None:
    """Returns the index beside a .bin file; None if there is none.

    Raises:
        ValueError: the .idx file is no index of Megatron, or is one of tokens that are no integers.
    """
    place = path.with_suffix(".idx")
    if not exists(place):
        return None
    head = _read(place, 0, _HEAD.size)
    magic, version, code, num_sequences, num_bounds = _HEAD.unpack(head.ljust(_HEAD.size, b"\0"))
    if len(head) < _HEAD.size or magic != _MAGIC or version != _VERSION or not 0 < code <= len(_DTYPES):
        raise ValueError(
            f"an .idx file next to a .bin file must be an index of Megatron (version 1), got {place} with another "
            "beginning; write the index again, or move the file elsewhere"
        )
    dtype = np.dtype(_DTYPES[code - 1])
    if dtype.kind not in "iu":
        raise ValueError(f"an index of Megatron must be of integers, got {dtype} in {place}; write the tokens again")
    file = look_at(place, place.name)
    return Index(file=file, dtype=dtype, num_sequences=num_sequences, num_bounds=num_bounds)


def document_ends(index: Index, num_bytes: int) -> tuple[np.ndarray, int]:
    """Returns one past the last token of each document, int64 [num_documents], and the number of empty documents.

    Args:
        index: the index.
        num_bytes: size of the .bin file.

    Returns:
        The ends of the documents that have tokens; empty documents are counted apart.

    Raises:
        ValueError: the index does not fit the .bin file, or is not whole.
    """
    count, bounds = index.num_sequences, index.num_bounds
    sizes = 4 * count, 8 * count, 8 * bounds
    # A byte more a sequence says its kind of input, where there are several.
    if index.file.num_bytes not in (_HEAD.size + sum(sizes), _HEAD.size + sum(sizes) + count):
        raise _wrong(index, f"{index.file.num_bytes:,} bytes for {count:,} sequences and {bounds:,} bounds")
    at = _HEAD.size
    lengths, starts, documents = (
        np.frombuffer(_read(index.file.path, at + sum(sizes[:place]), size), dtype)
        for place, (size, dtype) in enumerate(zip(sizes, ("<i4", "<i8", "<i8"), strict=True))
    )
    ends = np.cumsum(lengths, dtype=np.int64)
    size = index.dtype.itemsize
    if count and (lengths.min() < 0 or not np.array_equal(starts, (ends - lengths) * size)):
        raise _wrong(index, "sequences that do not follow each other")
    num_tokens = int(ends[-1]) if count else 0
    if num_tokens * size != num_bytes:
        raise _wrong(index, f"lengths of {num_tokens * size:,} bytes for a .bin file of {num_bytes:,}")
    if not bounds or documents[0] != 0 or documents[-1] != count or (np.diff(documents) < 0).any():
        raise _wrong(index, "documents that do not follow each other")
    all_ends = np.concatenate([[0], ends])[documents[1:]]
    found = all_ends[np.diff(all_ends, prepend=0) > 0]
    return found, len(all_ends) - len(found)


def _wrong(index: Index, got: str) -> ValueError:
    return ValueError(
        f"an index of Megatron must match the .bin file next to it, got {got} in {index.file.path}; copy or "
        "write both again"
    )


def _read(path: Place, offset: int, num_bytes: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(num_bytes)
    except OSError as error:
        raise unreadable(path, error) from error
