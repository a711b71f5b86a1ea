"""Messages in the forms that a template takes: roles, contents in parts or as objects, arguments of calls as text.

Rows of other tools name roles differently and give contents as lists of parts. A template is tried once with a made-up
message of each form: what it writes stays as it is in the row, everything else is changed to what it writes.
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable, Sequence
from typing import Any

from sppo_jax.data.chat.roles import ASSISTANT, ASSISTANTS, Message

# Python's text of a list escapes these invisible characters, so a list that is written as Python does is not found.
PROBE = "\u2063probe\u2063"
FUNCTION = "look_up_000"
CALL = {"type": "function", "id": "call00000", "function": {"name": FUNCTION, "arguments": {"a": "b"}}}
# The role that every template has, by the role of a row. The first group is changed wherever the template writes that
# role: only the assistant's turns are learned, and "function" comes with calls that no template reads. The second
# group stays where the template writes it.
_CHANGED = {role: ASSISTANT for role in ASSISTANTS - {ASSISTANT}} | {"function": "tool"}
_UNLESS_KNOWN = {"developer": "system", "human": "user", "observation": "tool", "tool_response": "tool"}
_USER: Message = {"role": "user", "content": "a"}
ANSWERS_CALL = {"name": FUNCTION, "tool_call_id": "call00000"}
# Contents in each form, and what of them must be written.
_PROBES: dict[str, tuple[Any, str]] = {
    "text": (PROBE, PROBE),
    "list": ([{"type": "text", "text": PROBE}], PROBE),
    "object": ({"a": PROBE}, PROBE),
    "values": ([{"a": PROBE}], PROBE),
    "number": (4206917, "4206917"),
}
_TEXTS, _THOUGHTS = ("text", "input_text", "output_text"), ("thinking", "reasoning")


class Forms:
    """Changes messages to what a template takes; what was found out about the template is kept."""

    def __init__(self, write: Callable[[list[Message]], str]) -> None:
        """Takes a function that renders messages, and raises ValueError where the template refuses them."""
        self._write = write
        self._calls: tuple[bool, bool] | None = None
        self._role = functools.cache(self._find_role)
        self._takes = functools.cache(self._find_takes)

    def fitted(self, messages: Sequence[Message]) -> list[Message]:
        """Returns messages in the forms that the template takes.

        Raises:
            ValueError: a content is neither text nor parts of text; the message gives the number of the message.
        """
        return self._with_calls([self._fitted(message, number) for number, message in enumerate(messages, 1)])

    def _fitted(self, message: Message, number: int) -> Message:
        role, content = self._role(message.get("role")), message.get("content")
        if role != message.get("role"):
            message = message | {"role": role}
        if isinstance(content, str) and not self._takes(role, "text") and self._takes(role, "list"):
            content = [content]
        if content is None or isinstance(content, str):
            return message
        parts = parts_of(content)
        if parts is None:
            return message | {"content": self._plain(content, role, number)}
        texts, thoughts = _texts(parts, number)
        if isinstance(content, list) and self._takes(role, "list"):
            return message | {"content": [_named(part) for part in parts]}
        if thoughts:  # templates read them under their own key
            message = {"reasoning_content": "\n\n".join(thoughts)} | message
        return message | {"content": "".join(texts)}

    def _plain(self, content: Any, role: str, number: int) -> Any:
        """Returns an object or a number, which only a tool's result may be, as the template takes it."""
        if isinstance(content, (dict, list)) and role != "tool":
            raise ValueError(
                f"the content of a message must be text or a list of parts, got {type(content).__name__} in message "
                f"{number}; correct the row"
            )
        form = "object" if isinstance(content, dict) else "values" if isinstance(content, list) else "number"
        return content if self._takes(role, form) else json.dumps(content, ensure_ascii=False)

    def _find_role(self, role: str) -> str:
        if role in _CHANGED:
            return _CHANGED[role] if self._writes(_CHANGED[role], _CHANGED[role]) else role
        target = _UNLESS_KNOWN.get(role)
        if target is None or self._writes(role, target) or not self._writes(target, target):
            return role
        return target

    def _find_takes(self, role: str, form: str) -> bool:
        return self._writes(role, _UNLESS_KNOWN.get(role, role), form)

    def _writes(self, role: str, target: str, form: str = "text") -> bool:
        """Returns whether the template writes a message of a role, at a place where one of the target role may be."""
        content, wanted = _PROBES[form]
        asked = [{"role": role, "content": content}]
        if target == "system":
            asked = [*asked, self._fitted(_USER, 0)]
        elif target == "tool":
            call = {"role": ASSISTANT, "content": "", "tool_calls": [CALL]}
            asked = [self._fitted(_USER, 0), call, asked[0] | ANSWERS_CALL]
        elif target != "user":
            asked = [self._fitted(_USER, 0), *asked]
        try:
            return wanted in self._write(self._with_calls(asked))
        except ValueError:
            return False

    def _with_calls(self, messages: list[Message]) -> list[Message]:
        """Returns messages whose calls are as the template takes them."""
        if not any(message.get("tool_calls") for message in messages):
            return messages
        if self._calls is None:
            self._calls = self._find_calls()
        return [_changed(message, *self._calls) for message in messages]

    def _find_calls(self) -> tuple[bool, bool]:
        """Tries a made-up call; returns whether arguments must be text, and whether no text beside a call must be null.

        What writes the call comes first, then what the template does not refuse.
        """
        asked = [self._fitted(_USER, 0), {"role": ASSISTANT, "content": "", "tool_calls": [CALL]}]
        taken = []
        for form in ((False, False), (True, False), (False, True), (True, True)):
            try:
                text = self._write([_changed(message, *form) for message in asked])
            except ValueError:
                continue
            if FUNCTION in text:
                return form
            taken.append(form)
        return next(iter(taken), (False, False))


def parts_of(content: Any) -> list[Any] | None:
    """Returns the parts of a content; None: it is no list of parts."""
    parts = [content] if isinstance(content, dict) else content
    if not isinstance(parts, list) or not all(isinstance(part, str) or _is_part(part) for part in parts):
        return None
    return parts


def text_of(part: Any) -> tuple[str, str]:
    """Returns the text and the thought of a part; of a part that is neither, two empty texts."""
    if isinstance(part, str):
        return part, ""
    part_type = part.get("type", "text")
    if part_type in _TEXTS:
        return str(part.get("text", "")), ""
    if part_type in _THOUGHTS:
        found = next((part[key] for key in (*_THOUGHTS, "text") if key in part), "")
        return "", found if isinstance(found, str) else "".join(text_of(one)[0] for one in parts_of(found) or [])
    return "", ""


def _is_part(part: Any) -> bool:
    return isinstance(part, dict) and isinstance(part.get("type", "text" if "text" in part else None), str)


def _texts(parts: list[Any], number: int) -> tuple[list[str], list[str]]:
    """Returns the texts and the thoughts of parts; refuses parts of other types."""
    for part in parts:
        part_type = "text" if isinstance(part, str) else part.get("type", "text")
        if part_type not in _TEXTS + _THOUGHTS:
            raise ValueError(
                f"the parts of a message must be text, got a part of type {part_type} in message {number}; leave out "
                "the row, or the part where the words make sense without it"
            )
    found = [text_of(part) for part in parts]
    return [text for text, _ in found if text], [thought for _, thought in found if thought]


def _named(part: Any) -> Any:
    """Returns a part whose type is "text" where it has another tool's name of it."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    return part | {"type": "text"} if part.get("type", "text") in _TEXTS else part


def _changed(message: Message, as_text: bool, as_null: bool) -> Message:
    """Returns a message whose calls have arguments as JSON text, and null beside them where there is no text."""
    if not message.get("tool_calls") or not (as_text or as_null):
        return message
    message = copy.deepcopy(message)
    if as_null and message.get("content") == "":
        message["content"] = None
    for call in message["tool_calls"] if as_text else []:
        function = call.get("function", call)
        function["arguments"] = json.dumps(function.get("arguments", {}), ensure_ascii=False)
    return message
