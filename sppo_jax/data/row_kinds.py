"""What the rows of a file hold: text, conversations or tokens."""

from __future__ import annotations

from typing import Literal, get_args

from sppo_jax.config.data import DataConfig
from sppo_jax.data.chat_rows import SHAREGPT
from sppo_jax.data.folders import File, Place
from sppo_jax.data.forms.rows import ROW_SUFFIXES, columns_of, read_rows
from sppo_jax.data.token_files import TOKEN_SUFFIXES
from sppo_jax.data.token_rows import IDS

Kind = Literal["text", "chat", "rows of tokens", "tokens"]
KINDS: tuple[Kind, ...] = get_args(Kind)


def kind_of(config: DataConfig, file: File) -> Kind:
    """Returns what a file holds, by `data.format` and the keys of its first row.

    Raises:
        ValueError: data.format asks for what the file cannot hold.
    """
    has_rows, is_tokens = file.name.endswith(ROW_SUFFIXES), file.name.endswith(TOKEN_SUFFIXES)
    possible = {
        "auto": True,
        "text": not is_tokens,
        "chat": has_rows,
        "tokens": is_tokens or has_rows,
    }
    if not possible[config.format]:
        kinds = ", ".join(ROW_SUFFIXES if config.format != "tokens" else (*ROW_SUFFIXES, *TOKEN_SUFFIXES))
        kinds = "text" if config.format == "text" else f"{kinds} files"
        raise ValueError(
            f"data.source must hold {kinds} where data.format is {config.format}, got {file.path}; leave out the file, "
            "or set data.format=auto"
        )
    if is_tokens:
        return "tokens"
    if config.format == "auto":
        return _kind_of_rows(config, file.path) if has_rows else "text"
    return "rows of tokens" if config.format == "tokens" else config.format


def _kind_of_rows(config: DataConfig, path: Place) -> Kind:
    names = _first_keys(config, path)
    if config.text_key in names:
        return "text"
    if config.chat.messages_key in names or SHAREGPT in names:
        return "chat"
    return "rows of tokens" if any(key in names for key in IDS) else "text"


def _first_keys(config: DataConfig, path: Place) -> list[str]:
    """Returns the keys of the first row; of a file that cannot be read none, which is said where the file is read."""
    try:
        columns = columns_of(path)
        return list(next(read_rows(path, text_key=config.text_key), ("", {}))[1]) if columns is None else columns
    except ValueError:
        return []
