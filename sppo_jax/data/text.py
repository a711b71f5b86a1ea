"""Documents in text files, read piece by piece: plain text, JSON lines and Parquet."""

from __future__ import annotations

import io
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sppo_jax.data.compressed import COMPRESSED_SUFFIXES, is_torn, open_bytes, torn
from sppo_jax.data.folders import unreadable
from sppo_jax.files import parse_json

_JSON_SUFFIXES = tuple(f".jsonl{packed}" for packed in ("", *COMPRESSED_SUFFIXES))
TEXT_SUFFIXES = (".txt", *(f".txt{packed}" for packed in COMPRESSED_SUFFIXES), *_JSON_SUFFIXES, ".parquet")
_PIECE_CHARS = 1 << 22
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")

# A piece of a document, and whether the document ends with it.
Piece = tuple[str, bool]


def read_pieces(path: Path, *, text_key: str, strict: bool) -> Iterator[Piece]:
    """Yields the documents of a file in order, long ones in pieces that end with a line, without empty or null ones.

    Args:
        path: a file with one of TEXT_SUFFIXES; a plain text file is one document.
        text_key: key of the text in a JSON line, column of the text in a Parquet file.
        strict: whether plain text that is not UTF-8 is refused; otherwise such bytes become lone surrogates.

    Raises:
        ValueError: the file cannot be read, or is not of the kind that its name says; the message names file and line.
    """
    if path.name.endswith(".parquet"):
        documents = _parquet_documents(path, text_key)
    elif path.name.endswith(_JSON_SUFFIXES):
        documents = _json_documents(path, text_key)
    else:
        yield from _cut(_plain_blocks(path, strict))
        return
    for text in documents:
        yield from _cut(text[at : at + _PIECE_CHARS] for at in range(0, len(text), _PIECE_CHARS))


def _cut(blocks: Iterator[str]) -> Iterator[Piece]:
    """Cuts a document that comes in blocks after the last line of each block, so that few words are cut in two."""
    rest = ""
    for block in blocks:
        if rest:
            at = rest.rfind("\n") + 1 or len(rest)
            yield rest[:at], False
            rest = rest[at:]
        rest += block
    if rest:
        yield rest, True


def _plain_blocks(path: Path, strict: bool) -> Iterator[str]:
    try:
        errors = "strict" if strict else "surrogateescape"
        with io.TextIOWrapper(open_bytes(path), encoding="utf-8", errors=errors, newline="") as file:
            while block := file.read(_PIECE_CHARS):
                yield block
    except (OSError, EOFError, zlib.error) as error:
        if is_torn(path, error):
            raise torn(path, error, 0) from error
        assert isinstance(error, OSError)
        raise unreadable(path, error) from error
    except UnicodeDecodeError as error:
        change = "convert the file, or leave out data.tokenizer to train on bytes"
        raise _not_utf8("text for a tokenizer", path, error, change) from error


def _json_documents(path: Path, text_key: str) -> Iterator[str]:
    number = 0
    try:
        with open_bytes(path) as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield _text_of(line, text_key, f"{path} line {number}")
    except (OSError, EOFError, zlib.error) as error:
        if is_torn(path, error):
            raise torn(path, error, number) from error
        assert isinstance(error, OSError)
        raise unreadable(path, error) from error


def _text_of(line: bytes, text_key: str, where: str) -> str:
    try:
        record = parse_json(line)
    except UnicodeDecodeError as error:
        raise _not_utf8("the text of a .jsonl file", where, error, "correct the line") from error
    except ValueError as error:
        raise ValueError(
            f"a .jsonl file must hold one JSON object a line, got {where} ({error}); correct the line"
        ) from error
    if not isinstance(record, dict):
        got = type(record).__name__
        raise ValueError(
            f"a .jsonl file must hold one JSON object a line, got {where} with a value of type {got}; correct the line"
        )
    if text_key not in record:
        keys = ", ".join(map(repr, sorted(record))) or "none"
        raise ValueError(
            f"data.text_key must be a key of every line, got {text_key!r}, but {where} has {keys}; name one of these"
        )
    text = "" if record[text_key] is None else record[text_key]
    if not isinstance(text, str):
        got = type(text).__name__
        raise ValueError(
            f"data.text_key must name text, got {text_key!r} with a value of type {got} in {where}; name another key"
        )
    # JSON can escape halves of surrogate pairs, which UTF-8 cannot encode.
    return text if text.isascii() else _LONE_SURROGATE.sub("\ufffd", text)


def _not_utf8(what: str, where: str | Path, error: UnicodeDecodeError, change: str) -> ValueError:
    return ValueError(
        f"{what} must be UTF-8, got {where} ({error.reason}: byte 0x{error.object[error.start]:02x}); {change}"
    )


def _parquet_documents(path: Path, text_key: str) -> Iterator[str]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise ValueError(f"{path} needs the pyarrow library, which is not installed; run pip install pyarrow") from None
    try:
        with pq.ParquetFile(path) as file:
            _check_column(file.schema_arrow, text_key, path, pa)
            for batch in file.iter_batches(batch_size=256, columns=[text_key]):
                yield from (text for text in batch.column(0).to_pylist() if text)
    except UnicodeDecodeError as error:
        raise _not_utf8("the text of a .parquet file", path, error, "write the file again") from error
    except pa.ArrowException as error:
        raise ValueError(f"a .parquet file must be whole, got {path} ({error}); write the file again") from error
    except OSError as error:
        raise unreadable(path, error) from error


def _check_column(schema: Any, text_key: str, path: Path, pa: Any) -> None:
    if text_key not in schema.names:
        names = ", ".join(map(repr, schema.names))
        raise ValueError(f"data.text_key must be a column, got {text_key!r}, but {path} has {names}; name one of these")
    kind = schema.field(text_key).type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise ValueError(
            f"data.text_key must name text, got {text_key!r} of type {kind} in {path}; name another column"
        )
