"""The form of a row: text, a conversation, tokens, a prompt with its completion, or an instruction with its output."""

from __future__ import annotations

import functools
from typing import Any

from sppo_jax.config.data import DataConfig
from sppo_jax.data.content.conversations import SHAREGPT
from sppo_jax.data.content.loss_keys import names_of, row_trains, without
from sppo_jax.data.content.row_documents import FIELDS, POSITIONS

IDS = ("input_ids", "token_ids")
PROMPT, COMPLETION = "prompt", "completion"
INSTRUCTION, OUTPUT = "instruction", "output"
# What makes ids a statement of their own beside another form: without these they are only that form's tokens.
_OF_TOKENS = frozenset((*names_of("tokens", "labels"), *names_of("tokens", "mask"), *FIELDS)) - {*POSITIONS}


def forms_of(row: dict[str, Any], config: DataConfig) -> tuple[str, ...]:
    """Returns the forms that a row has, as `data.format` names them, by its keys whose value is not null."""
    forms = _forms(tuple(row), config.text_key, config.chat.messages_key)
    if len(forms) < 2:
        return forms
    return _forms(
        tuple(key for key, value in row.items() if value is not None), config.text_key, config.chat.messages_key
    )


@functools.lru_cache(1 << 12)
def _forms(keys: tuple[str, ...], text_key: str, messages_key: str) -> tuple[str, ...]:
    found = []
    if text_key in keys:
        found.append("text")
    if messages_key in keys or SHAREGPT in keys:
        found.append("chat")
    if PROMPT in keys and COMPLETION in keys:
        found.append("prompt")
    if INSTRUCTION in keys and OUTPUT in keys:
        found.append("alpaca")
    if any(key in keys for key in IDS) and (not found or not _OF_TOKENS.isdisjoint(keys)):
        found.append("tokens")
    return tuple(found)


def check_form(row: dict[str, Any], config: DataConfig, where: str) -> tuple[str, ...]:
    """Returns the forms of a row: at most one, unless data.format says which of them is meant.

    Raises:
        ValueError: the row has several.
    """
    forms = forms_of(row, config)
    if len(forms) > 1 and config.format == "auto":
        keys = ", ".join(sorted(key for key in row if row[key] is not None))
        raise ValueError(
            f"a row must have one form where data.format is auto, got {' and '.join(forms)} (keys {keys}) in {where}; "
            f"set data.format to {' or '.join(forms)}"
        )
    return forms


def looked_at(row: dict[str, Any], config: DataConfig, where: str) -> dict[str, Any] | None:
    """Returns a row of text without the keys that are ignored; None: the row itself says that it is not trained.

    Raises:
        ValueError: the row has several forms, or says something about the loss that is not obeyed.
    """
    row = without(row, config.ignore_keys)
    check_form(row, config, where)
    return row if row_trains(row, where) else None
