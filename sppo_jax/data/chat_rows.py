"""Rows of files as conversations: OpenAI's messages and ShareGPT's, without nulls, with arguments as objects."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sppo_jax.config.data import ChatConfig
from sppo_jax.data.chat import ASSISTANT, Chat, Message
from sppo_jax.data.compressed import COMPRESSED_SUFFIXES, is_torn, open_bytes, torn
from sppo_jax.data.folders import unreadable
from sppo_jax.files import parse_json

ROW_SUFFIXES = (*(f".jsonl{packed}" for packed in ("", *COMPRESSED_SUFFIXES)), ".parquet")
_ROLES = {"human": "user", "gpt": ASSISTANT, "bing": ASSISTANT, "chatgpt": ASSISTANT, "observation": "tool"}
SHAREGPT = "conversations"
_BATCH_ROWS = 64


def read_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the rows of a file in order, each with its place for messages; nulls are dropped at every depth.

    Raises:
        ValueError: the file cannot be read; the message names file and line.
    """
    yield from _parquet_rows(path) if path.name.endswith(".parquet") else _json_rows(path)


def _json_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    number = 0
    try:
        with open_bytes(path) as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    where = f"{path} line {number}"
                    yield where, _row_of(line, where)
    except (OSError, EOFError, zlib.error) as error:
        if is_torn(path, error):
            raise torn(path, error, number) from error
        assert isinstance(error, OSError)
        raise unreadable(path, error) from error


def _row_of(line: bytes, where: str) -> dict[str, Any]:
    rule = "a .jsonl file must hold one JSON object a line"
    try:
        row = parse_json(line)
    except ValueError as error:
        raise ValueError(f"{rule}, got {where} ({error}); correct the line") from error
    if not isinstance(row, dict):
        raise ValueError(f"{rule}, got {where} with a value of type {type(row).__name__}; correct the line")
    return without_nulls(row)


def _parquet_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise ValueError(f"{path} needs the pyarrow library, which is not installed; run pip install pyarrow") from None
    number = 0
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=_BATCH_ROWS):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path} row {number}", without_nulls(row)
    except pa.ArrowException as error:
        raise ValueError(f"a .parquet file must be whole, got {path} ({error}); write the file again") from error
    except OSError as error:
        raise unreadable(path, error) from error


def without_nulls(value: Any) -> Any:
    """Returns a value without the keys of objects whose value is null, at every depth."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def chat_of(row: dict[str, Any], config: ChatConfig, where: str) -> Chat:
    """Returns the conversation of a row.

    Raises:
        ValueError: the row is no conversation; the message names the row.
    """
    key = config.messages_key
    if key not in row and SHAREGPT in row:
        key = SHAREGPT
    found = row.get(key)
    if not isinstance(found, list) or not found:
        got = "no messages" if found == [] else f"keys {', '.join(sorted(row)) or 'none'}"
        raise ValueError(f"data.chat.messages_key must name a list of messages, got {got} in {where}; correct the row")
    messages = [_message(one, number, where) for number, one in enumerate(found, 1)]
    if isinstance(row.get("system"), str) and key == SHAREGPT and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": row["system"]})
    tools = row.get(config.tools_key)
    if isinstance(tools, str):
        tools = _json(tools, f"{config.tools_key} in {where}")
    if tools is not None and not isinstance(tools, list):
        raise ValueError(f"data.chat.tools_key must name a list of tools, got {type(tools).__name__} in {where}")
    return Chat(messages=messages, tools=tools or None)


def _message(found: Any, number: int, where: str) -> Message:
    where = f"message {number} of {where}"
    if not isinstance(found, dict):
        raise ValueError(f"a message must be an object, got {type(found).__name__} in {where}; correct the row")
    message = dict(found)
    if "role" not in message and "from" in message:
        role = message.pop("from")
        message = {"role": _ROLES.get(role, role), "content": message.pop("value", "")} | message
    if not isinstance(message.get("role"), str):
        raise ValueError(f"a message must have a role, got keys {', '.join(sorted(found))} in {where}; add the role")
    if "tool_calls" in message:
        if not isinstance(message["tool_calls"], list):
            got = type(message["tool_calls"]).__name__
            raise ValueError(f"tool_calls must be a list, got {got} in {where}; correct the row")
        message["tool_calls"] = [_call(call, where) for call in message["tool_calls"]]
        if not message["tool_calls"]:
            del message["tool_calls"]
    # What is null in OpenAI's form, beside a call of a tool, is no text.
    message.setdefault("content", "")
    return message


def _call(call: Any, where: str) -> Any:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise ValueError(f"a call of a tool must be an object, got {call!r} in {where}; correct the row")
    if isinstance(function.get("arguments"), str):
        arguments = _json(function["arguments"] or "{}", f"the arguments of a call in {where}")
        function = function | {"arguments": arguments}
    return call | {"function": function} if "function" in call else function


def _json(text: str, what: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        raise ValueError(f"{what} must be JSON, got {text[:40]!r} ({error}); correct the row") from error
