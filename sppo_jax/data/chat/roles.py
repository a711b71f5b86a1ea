"""A conversation, and what of its text is learned; imports no jinja2."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

TrainOn = Literal["assistant", "last", "all"]
Message = dict[str, Any]
ASSISTANT, TRAIN = "assistant", "train"
# Names of the assistant in other tools' rows.
ASSISTANTS = frozenset({ASSISTANT, "model", "gpt", "chatgpt", "bing"})


@dataclass(frozen=True, kw_only=True)
class Region:
    """Characters first..last-1 of a text, which a message wrote, or a generation region; -1: no known message."""

    message: int
    first: int
    last: int


@dataclass(frozen=True, kw_only=True)
class Chat:
    """A conversation: its messages, and the tools that it may call; None: no tools."""

    messages: Sequence[Message]
    tools: list[Any] | None = None


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """A conversation as text.

    Args:
        text: the text.
        trained: the first and one past the last character of each part that is learned; they rise.
        turns: what each message wrote, in order.
        lost_thoughts: the messages whose own thought the template leaves out; they rise.
    """

    text: str
    trained: tuple[tuple[int, int], ...]
    turns: tuple[Region, ...]
    lost_thoughts: tuple[int, ...] = ()
