"""Documents as text, read piece by piece from files of any form."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator
from typing import Any

from sppo_jax.config.data import DataConfig
from sppo_jax.data.cache.left_out import NO_TEXT, NOT_TRAINED, Tally
from sppo_jax.data.content.loss_keys import concerning
from sppo_jax.data.content.row_forms import forms_of, looked_at
from sppo_jax.data.forms.record import not_utf8
from sppo_jax.data.forms.rows import ROW_SUFFIXES, columns_of, read_rows
from sppo_jax.data.storage.compressed import COMPRESSED_SUFFIXES, reading
from sppo_jax.data.storage.folders import Place

_PLAIN_SUFFIXES = (".txt", *(f".txt{packed}" for packed in COMPRESSED_SUFFIXES))
TEXT_SUFFIXES = (*_PLAIN_SUFFIXES, *ROW_SUFFIXES)
_PIECE_CHARS = 1 << 22
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")

# A piece of a document, and whether the document ends with it.
Piece = tuple[str, bool]


def read_pieces(
    path: Place, *, text_key: str, strict: bool, left_out: Tally | None = None, config: DataConfig | None = None
) -> Iterator[Piece]:
    """Yields the documents of a file in order, long ones in pieces that end with a line, without empty or null ones.

    Args:
        path: a file with one of ROW_SUFFIXES; any other file is plain text, and one document.
        text_key: key of the text in a row.
        strict: whether plain text that is not UTF-8 is refused; otherwise such bytes become lone surrogates.
        left_out: takes the number of what is not read.
        config: decides which keys of rows are ignored, and what a row's form is; None: the rows are not looked at.

    Raises:
        ValueError: the file cannot be read, or is not of the kind that its name says; the message names file and line.
    """
    if not path.name.endswith(ROW_SUFFIXES):
        yield from _told(_cut(_plain_blocks(path, strict)), left_out)
        return
    columns = columns_of(path)
    if columns is not None and text_key not in columns:
        names = ", ".join(map(repr, columns)) or "none"
        raise ValueError(
            f"data.text_key must be a column, got {text_key!r}, but {path} has {names}; "
            f"{_change(dict.fromkeys(columns, ''), config)}"
        )
    wanted = (text_key, *_of_loss(columns or (), config))
    for where, found in read_rows(path, text_key=text_key, columns=wanted, left_out=left_out):
        row = found if config is None else looked_at(found, config, where)
        if row is None:
            if left_out is not None:
                left_out[NOT_TRAINED] += 1
            continue
        text = _text_of(row, text_key, where, config)
        yield from _told(_cut(text[at : at + _PIECE_CHARS] for at in range(0, len(text), _PIECE_CHARS)), left_out)


def _of_loss(columns: Iterable[str], config: DataConfig | None) -> tuple[str, ...]:
    """Returns the columns that may say something about the loss."""
    return concerning(tuple(key for key in columns if key not in config.ignore_keys), "row") if config else ()


def _change(row: dict[str, Any], config: DataConfig | None) -> str:
    """Returns what to change where a row has no text: its form, if it has another one."""
    forms = forms_of(row, config) if config else ()
    return f"set data.format={forms[0]}" if forms else "name one of these"


def _told(pieces: Iterator[Piece], left_out: Tally | None) -> Iterator[Piece]:
    """Yields the pieces of one document, and counts a document of none."""
    is_last = False
    for piece, is_last in pieces:
        yield piece, is_last
    if left_out is not None and not is_last:
        left_out[NO_TEXT] += 1


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


def _plain_blocks(path: Place, strict: bool) -> Iterator[str]:
    errors = "strict" if strict else "surrogateescape"
    try:
        with reading(path) as content, io.TextIOWrapper(content, encoding="utf-8", errors=errors, newline="") as file:
            while block := file.read(_PIECE_CHARS):
                yield block
    except UnicodeDecodeError as error:
        change = "convert the file, or leave out data.tokenizer to train on bytes"
        raise not_utf8("text for a tokenizer", path, error, change) from error


def _text_of(row: dict[str, Any], text_key: str, where: str, config: DataConfig | None) -> str:
    if text_key not in row:
        keys = ", ".join(map(repr, sorted(row))) or "none"
        raise ValueError(
            f"data.text_key must be a key of every row, got {text_key!r}, but {where} has {keys}; "
            f"{_change(row, config)}"
        )
    text = "" if row[text_key] is None else row[text_key]
    if not isinstance(text, str):
        got = type(text).__name__
        raise ValueError(
            f"data.text_key must name text, got {text_key!r} with a value of type {got} in {where}; name another key"
        )
    return encodable(text)


def encodable(text: str) -> str:
    """Returns a text that UTF-8 can encode: JSON can escape halves of surrogate pairs, which it cannot."""
    return text if text.isascii() else _LONE_SURROGATE.sub("\ufffd", text)
