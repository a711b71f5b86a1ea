"""Rows of MDS shards, as mosaicml-streaming writes them.

A shard has the number of its samples, where each begins (uint32 each), a JSON object that names the columns, and the
samples: the sizes of the values whose size is not fixed, uint32, and then the values.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO

import numpy as np

from sppo_jax.data.forms.record import Rows, json_object, not_utf8, not_whole
from sppo_jax.data.storage.compressed import COMPRESSED_SUFFIXES, reading
from sppo_jax.data.storage.folders import Place
from sppo_jax.files.whole import parse_json

MDS_SUFFIXES = (".mds", *(f".mds{packed}" for packed in COMPRESSED_SUFFIXES))
_MOST_CONFIG_BYTES = 1 << 24
_NUMBERS = {f"{encoding}{bits}" for encoding, bits in [("int", 8), ("int", 16), ("int", 32), ("int", 64), ("uint", 8),
            ("uint", 16), ("uint", 32), ("uint", 64), ("float", 16), ("float", 32), ("float", 64)]}  # fmt: skip
_ARRAY_DTYPES = {8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16", 32: "uint32", 33: "int32",
                 34: "float32", 64: "uint64", 65: "int64", 66: "float64"}  # fmt: skip


def mds_rows(path: Place, columns: Sequence[str] | None = None) -> Rows:
    """Yields the samples of a shard in order.

    Args:
        path: a shard.
        columns: the columns to decode, those that the shard has; None: all that hold text, numbers, JSON or arrays.

    Raises:
        ValueError: the file cannot be read, is not whole, or a column has an encoding of no text, number or array.
    """
    number = 0
    with reading(path, lambda: number) as file:
        offsets, config = _head(file, path)
        decoders = _decoders(config, columns, path)
        sizes = config["column_sizes"]
        for number in range(1, len(offsets)):
            where = f"{path} sample {number}"
            sample = _read(file, int(offsets[number] - offsets[number - 1]), where)
            try:
                row = _values(sample, sizes, decoders)
            except UnicodeDecodeError as error:
                raise not_utf8("the text of an .mds file", where, error, "write the file again") from error
            except (ValueError, struct.error, LookupError, TypeError) as error:
                raise not_whole(".mds", where, error) from error
            yield where, row
        if file.read(1):
            raise not_whole(".mds", f"{path} sample {number}", "bytes follow the last sample")


def mds_columns(path: Place) -> list[str]:
    """Returns the names of a shard's columns.

    Raises:
        ValueError: the file cannot be read or is not whole.
    """
    with reading(path) as file:
        return list(_head(file, path)[1]["column_names"])


def _head(file: BinaryIO, path: Place) -> tuple[np.ndarray, dict[str, Any]]:
    """Returns where the samples begin, int64 [num_samples + 1], and what the columns are."""
    (count,) = struct.unpack("<I", _read(file, 4, path))
    offsets = np.frombuffer(_read(file, 4 * (count + 1), path), "<u4").astype(np.int64)
    at = 4 + 4 * (count + 1)
    if not at <= offsets[0] <= at + _MOST_CONFIG_BYTES or (np.diff(offsets) < 0).any():
        raise not_whole(".mds", path, "samples do not follow each other")
    rule = "an .mds file must name its columns"
    config = json_object(_read(file, int(offsets[0]) - at, path), rule, str(path), "write the file again")
    names, encodings, sizes = (config.get(f"column_{what}") for what in ("names", "encodings", "sizes"))
    if not (isinstance(names, list) and isinstance(encodings, list) and isinstance(sizes, list)) or not (
        len(names) == len(encodings) == len(sizes)
    ):
        raise ValueError(f"{rule}, their encodings and their sizes, got {path} without; write the file again")
    return offsets, config


def _read(file: BinaryIO, num_bytes: int, where: object) -> bytes:
    # In blocks, so that a number that is wrong takes no memory.
    blocks, left = [], num_bytes
    while left:
        block = file.read(min(left, 1 << 20))
        if not block:
            raise not_whole(".mds", where, f"{left:,} of {num_bytes:,} bytes are missing", "copy the file again")
        blocks.append(block)
        left -= len(block)
    return b"".join(blocks)


def _values(
    sample: bytes, sizes: Sequence[int | None], decoders: Sequence[tuple[str, Callable[[bytes], Any]] | None]
) -> dict[str, Any]:
    """Decodes the wanted values of a sample."""
    num_free = sum(size is None for size in sizes)
    free = iter(struct.unpack_from(f"<{num_free}I", sample))
    at, row = 4 * num_free, {}
    for size, decoder in zip(sizes, decoders, strict=True):
        size = next(free) if size is None else size
        if decoder:
            row[decoder[0]] = decoder[1](sample[at : at + size])
        at += size
    if at != len(sample):
        raise ValueError(f"its values have {at:,} bytes, and it has {len(sample):,}")
    return row


def _decoders(
    config: dict[str, Any], columns: Sequence[str] | None, path: Place
) -> list[tuple[str, Callable[[bytes], Any]] | None]:
    decoders: list[tuple[str, Callable[[bytes], Any]] | None] = []
    for name, encoding in zip(config["column_names"], config["column_encodings"], strict=True):
        decode = _decoder(str(encoding))
        if decode is None and columns is not None and name in columns:
            raise ValueError(
                f"a column of an .mds file must hold text, numbers, JSON or arrays, got {name!r} encoded as {encoding} "
                f"in {path}; name another column"
            )
        decoders.append((name, decode) if decode and (columns is None or name in columns) else None)
    return decoders


def _decoder(encoding: str) -> Callable[[bytes], Any] | None:
    if encoding in _NUMBERS or encoding == "int":
        dtype = np.dtype("int64" if encoding == "int" else encoding)
        return lambda value: np.frombuffer(value, dtype)[0].item()
    if encoding.split(":")[0] == "ndarray":
        return lambda value: _array(value, encoding.split(":")[1:])
    plain: dict[str, Callable[[bytes], Any]] = {
        "str": bytes.decode,
        "json": parse_json,
        "bytes": bytes,
        "str_int": int,
        "str_float": float,
    }
    return plain.get(encoding)


def _array(value: bytes, fixed: Sequence[str]) -> np.ndarray:
    """Returns an array, whose dtype and shape come before its values where they are not fixed."""
    at = 0
    if fixed:
        dtype = np.dtype(fixed[0])
    else:
        dtype, at = np.dtype(_ARRAY_DTYPES[value[0]]), 1
    if len(fixed) > 1:
        shape = tuple(int(size) for size in fixed[1].split(","))
    else:
        # Two bits for the dtype of the shape, and six for the number of dimensions.
        num_dims, size = value[at] >> 2, np.dtype(f"u{1 << (value[at] & 3)}")
        shape = tuple(np.frombuffer(value, size, num_dims, at + 1).tolist())
        at += 1 + num_dims * size.itemsize
    return np.frombuffer(value, dtype, offset=at).reshape(shape)
