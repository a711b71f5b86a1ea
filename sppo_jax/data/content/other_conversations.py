"""Rows of other forms as rows of messages: prompts with completions in messages, instructions with their outputs.

What the row as a whole says about the loss is put into its messages.
"""

from __future__ import annotations

from typing import Any

from sppo_jax.config.data import DataConfig
from sppo_jax.data.chat.roles import ASSISTANT, TRAIN, Message
from sppo_jax.data.content.conversations import SHAREGPT
from sppo_jax.data.content.loss_keys import concerning, per_message, row_trains, without
from sppo_jax.data.content.row_forms import COMPLETION, INSTRUCTION, OUTPUT, PROMPT, check_form

_INPUT, _SYSTEM, _HISTORY = "input", "system", "history"


def with_messages(row: dict[str, Any], config: DataConfig, where: str) -> dict[str, Any] | None:
    """Returns a row with messages under `data.chat.messages_key`; None: the row itself says that it is not trained.

    Args:
        row: the row, without nulls.
        config: names the keys, those that are ignored, and the form of rows that have several.
        where: the row's place, for messages.

    Raises:
        ValueError: the row has several forms, is wrong, or says something about the loss that is not obeyed.
    """
    row = without(row, config.ignore_keys)
    forms = check_form(row, config, where)
    form = config.format if config.format != "auto" else (*forms, "chat")[0]
    if not row_trains(row, where, "conversation"):
        return None
    key, num_given = config.chat.messages_key, 0
    if form == "prompt":
        given, completion = _prompt_and_completion(row, where)
        row, num_given = row | {key: given + completion}, len(given)
    elif form == "alpaca":
        row = row | {key: _of_instruction(row, where)}
    elif key not in row and SHAREGPT in row:
        key = SHAREGPT
    messages = row.get(key)
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        return row  # whoever makes a conversation of it says what is wrong
    if config.ignore_keys:
        row = row | {key: (messages := [without(message, config.ignore_keys) for message in messages])}
    if num_given or concerning(tuple(row), "conversation"):
        trains = per_message(row, [_role(message) for message in messages], where)
        trains[:num_given] = [False] * num_given
        both = zip(messages, trains, strict=True)
        row = row | {key: [message if learned else message | {TRAIN: False} for message, learned in both]}
    return row


def _role(message: Message) -> str:
    return str(message.get("role", message.get("from")))


def _prompt_and_completion(row: dict[str, Any], where: str) -> list[list[Message]]:
    """Returns the messages of a prompt, which are not trained, and those of its completion."""
    lists = []
    for key in (PROMPT, COMPLETION):
        found = row.get(key)
        if not isinstance(found, list) or not all(isinstance(message, dict) for message in found):
            got = f"a value of type {type(found).__name__}" if found is not None else "none"
            raise ValueError(
                f"{PROMPT} and {COMPLETION} must both be lists of messages in each row of a file (or both text), got "
                f"{got} for {key} in {where}; correct the row, or write it to another file"
            )
        lists.append(found)
    return lists


def _of_instruction(row: dict[str, Any], where: str) -> list[Message]:
    """Returns the messages of an instruction, with what came before it, and of its output."""
    texts = {key: row.get(key, "") for key in (_SYSTEM, INSTRUCTION, _INPUT, OUTPUT)}
    for key, text in texts.items():
        if not isinstance(text, str) or (key in (INSTRUCTION, OUTPUT) and key not in row):
            got = f"a value of type {type(text).__name__}" if key in row else "none"
            raise ValueError(f"{key} must be text where {INSTRUCTION} is given, got {got} in {where}; correct the row")
    messages = [{"role": "system", "content": texts[_SYSTEM]}] if texts[_SYSTEM] else []
    history = row.get(_HISTORY, [])
    if not isinstance(history, list) or not all(_is_pair(pair) for pair in history):
        raise ValueError(f"{_HISTORY} must be a list of pairs of texts, got another value in {where}; correct the row")
    asked = "\n\n".join(text for text in (texts[INSTRUCTION], texts[_INPUT]) if text)
    for user, assistant in [*history, (asked, texts[OUTPUT])]:
        messages += [{"role": "user", "content": user}, {"role": ASSISTANT, "content": assistant}]
    return messages


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(text, str) for text in value)
