"""Rows of files as conversations: OpenAI's messages and ShareGPT's, without nulls, with arguments as objects.

Calls in other forms become tool calls: the `function_call` of OpenAI's first form, and turns whose role is a call.
"""

from __future__ import annotations

from typing import Any

from sppo_jax.config.data import ChatConfig
from sppo_jax.data.cache.left_out import Tally
from sppo_jax.data.chat.roles import ASSISTANT, Chat, Message
from sppo_jax.data.content.loss_keys import with_train
from sppo_jax.data.forms.record import Rows
from sppo_jax.data.forms.rows import read_rows
from sppo_jax.data.storage.folders import Place
from sppo_jax.files.whole import parse_json

_ROLES = {"human": "user", "gpt": ASSISTANT, "bing": ASSISTANT, "chatgpt": ASSISTANT, "observation": "tool"}
SHAREGPT = "conversations"
_OLD_TOOLS = "functions"  # tools in OpenAI's first form
# Roles of turns that are a call, or a list of calls, as JSON text.
_CALL_ROLES = ("function_call", "tool_call")


def rows_of(path: Place, left_out: Tally | None = None) -> Rows:
    """Yields the rows of a file in order, each with its place for messages; nulls are dropped at every depth.

    Args:
        path: a file of rows.
        left_out: takes the number of what is not read.

    Raises:
        ValueError: the file cannot be read; the message names file and place.
    """
    return ((where, without_nulls(row)) for where, row in read_rows(path, left_out=left_out))


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
    tools_key = config.tools_key if config.tools_key in row else _OLD_TOOLS
    tools = row.get(tools_key)
    if isinstance(tools, str):
        tools = _json(tools, f"{tools_key} in {where}")
    if tools_key == _OLD_TOOLS and isinstance(tools, list):
        tools = [_tool(tool) for tool in tools]
    if tools is not None and not isinstance(tools, list):
        raise ValueError(f"data.chat.tools_key must name a list of tools, got {type(tools).__name__} in {where}")
    return Chat(messages=messages, tools=tools or None)


def _message(found: Any, number: int, where: str) -> Message:
    where = f"message {number} of {where}"
    if not isinstance(found, dict):
        raise ValueError(f"a message must be an object, got {type(found).__name__} in {where}; correct the row")
    message = with_train(dict(found), where)
    if "role" not in message and "from" in message:
        role = message.pop("from")
        message = {"role": _ROLES.get(role, role), "content": message.pop("value", "")} | message
    if not isinstance(message.get("role"), str):
        raise ValueError(f"a message must have a role, got keys {', '.join(sorted(found))} in {where}; add the role")
    _rename_calls(message, where)
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


def _rename_calls(message: Message, where: str) -> None:
    """Makes tool calls of calls in other forms."""
    is_call = message["role"] in _CALL_ROLES
    if not is_call and "function_call" not in message:
        return
    if "tool_calls" in message or (is_call and "function_call" in message):
        raise ValueError(f"a message must have its calls in one form, got two in {where}; leave one out")
    calls = message.pop("function_call", None)
    if is_call:
        calls, message["role"], message["content"] = message.get("content", ""), ASSISTANT, ""
    if isinstance(calls, str):
        calls = _json(calls, f"a call in {where}")
    calls = calls if isinstance(calls, list) else [calls]
    message["tool_calls"] = [
        call if isinstance(call, dict) and "function" in call else {"type": "function", "function": call}
        for call in calls
    ]


def _tool(tool: Any) -> Any:
    """Returns a tool of OpenAI's first form in today's form."""
    return tool if isinstance(tool, dict) and "function" in tool else {"type": "function", "function": tool}


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
