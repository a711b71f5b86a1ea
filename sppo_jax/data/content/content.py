"""What the rows of a file hold: text, conversations or tokens."""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal, get_args

from sppo_jax.config.data import DataConfig
from sppo_jax.data.content.loss_keys import concerning, without
from sppo_jax.data.content.row_forms import PROMPT, check_form, forms_of
from sppo_jax.data.content.token_files import TOKEN_SUFFIXES
from sppo_jax.data.forms.record import Row
from sppo_jax.data.forms.rows import ROW_SUFFIXES, columns_of, read_rows
from sppo_jax.data.storage.folders import File

FileContent = Literal["text", "chat", "rows of tokens", "prompts", "tokens"]
CONTENTS: tuple[FileContent, ...] = get_args(FileContent)
# Instructions with their outputs become conversations, and so do prompts that are lists of messages.
_OF_FORM: dict[str, FileContent] = {
    "text": "text",
    "chat": "chat",
    "tokens": "rows of tokens",
    "prompt": "prompts",
    "alpaca": "chat",
}


def content_of(config: DataConfig, file: File) -> FileContent:
    """Returns what a file holds, by `data.format` and the keys of its first row.

    Raises:
        ValueError: data.format asks for what the file cannot hold, or is auto and the first row has several forms.
    """
    has_rows, is_tokens = file.name.endswith(ROW_SUFFIXES), file.name.endswith(TOKEN_SUFFIXES)
    possible = {"auto": True, "text": not is_tokens, "tokens": is_tokens or has_rows}
    if not possible.get(config.format, has_rows):
        wanted = ", ".join(ROW_SUFFIXES if config.format != "tokens" else (*ROW_SUFFIXES, *TOKEN_SUFFIXES))
        wanted = "text" if config.format == "text" else f"{wanted} files"
        raise ValueError(
            f"data.source must hold {wanted} where data.format is {config.format}, got {file.path}; leave out the "
            "file, or set data.format=auto"
        )
    if is_tokens:
        return "tokens"
    return _content_of_rows(config, file) if has_rows else "text"


def speaks_of_loss(config: DataConfig, file: File) -> bool:
    """Returns whether the first row of a file of text has a key that may say something about the loss."""
    keys = _first_row(config, file)[1] if file.name.endswith(ROW_SUFFIXES) else {}
    return bool(concerning(tuple(keys), "row"))


def _content_of_rows(config: DataConfig, file: File) -> FileContent:
    form: str = config.format
    if form in ("auto", "prompt"):
        where, row = _first_row(config, file)
        forms = check_form(row, config, where)
        form = form if form != "auto" else (*forms, "text")[0]
        if form == "prompt" and isinstance(row.get(PROMPT), list):
            return "chat"
    return _OF_FORM[form]


def _first_row(config: DataConfig, file: File) -> Row:
    """Returns what `_look` does; a file that may be far away is looked at once."""
    return _look(dataclasses.replace(config, source="stdlib", validation_source=None), file)  # a mapping has no hash


@functools.lru_cache(maxsize=64)
def _look(config: DataConfig, file: File) -> Row:
    """Returns the first row; an empty one of a file that cannot be read, which is said where the file is read.

    Where a file names its columns once, they are the keys. Only where they have several forms, or a prompt, which may
    hold either of two, the row itself is read.
    """
    path = file.path
    try:
        columns = columns_of(path)
        named = None if columns is None else without(dict.fromkeys(columns, ""), config.ignore_keys)
        if named is not None and len(forms_of(named, config)) < 2 and PROMPT not in named:
            return str(path), named
        where, row = next(read_rows(path, text_key=config.text_key), (str(path), {}))
        row = {key: value for key, value in row.items() if value is not None}
        return where, without(row, config.ignore_keys) or named or {}
    except ValueError:
        return str(path), {}
