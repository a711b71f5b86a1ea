"""Every message's words are in the rendered text: one check of what a template makes of a conversation.

Each message's text and calls must be in what the message wrote. Spaces, quotes and escapes may differ, so that JSON,
YAML and Python's literals all count. Words may be elsewhere, such as a system message in the first question. A filter
may have changed them. They may be so short that a role's name has them too. In these cases the template is rendered
once more, with marks beside the words. Missing thoughts are no error: templates leave out those of earlier turns.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sppo_jax.data.chat.forms import parts_of, text_of
from sppo_jax.data.chat.marks import Marked
from sppo_jax.data.chat.roles import Message

_TAG = r"(?:\w+:)?(?:think|thinking|thought|reasoning)>"
_BEGIN = rf"<{_TAG}|\[THINK\]|<\|START_THINKING\|>|<\|channel>(?:thought)?"
_END = rf"</{_TAG}|\[/THINK\]|<\|END_THINKING\|>|<channel\|>"
_THOUGHT, _BEGINS = re.compile(rf"(?:{_BEGIN}|\A)(.*?)(?:{_END})", re.DOTALL), re.compile(_BEGIN)
_WORD, _MARK = re.compile(r"\w+"), "\u2063{}\u2063"
# Characters that one takes at most where it is escaped, and what a line's beginning takes.
_ESCAPED, _INDENTED = 12, 32
# The longest words that are looked for with a mark, since "<|im_start|>assistant" holds many short ones.
_SHORT = len("assistant")

_MOST_FRAMES = 16

# Other ways to write a piece, of which one must be in the text.
_Piece = tuple[str, ...]
# What a template writes before and behind the text of a message, by role, as marks have shown.
Frames = dict[str, list[tuple[str, str]]]


@dataclass(frozen=True, kw_only=True)
class _Part:
    """The text of a message (call: -1), or one of its calls.

    Args:
        message: number of the message, from 0.
        call: number of the call.
        pieces: what must be written; of a call its name first.
    """

    message: int
    call: int
    pieces: list[_Piece]

    @property
    def is_short(self) -> bool:
        return all(len(piece[0]) <= _SHORT for piece in self.pieces)

    def end(self, text: str, at: int = 0) -> int:
        """Returns where the pieces end in a text, behind `at`; -1: one of them is not there."""
        if self.call < 0:
            return _end(self.pieces, text, at)
        # A template may sort the arguments, or write them before the name.
        at = _end(self.pieces[:1], text, at)
        ends = [max(_end([piece], text, at), _end([piece], text, 0)) for piece in self.pieces[1:]]
        return -1 if at < 0 or min(ends, default=0) < 0 else max([at, *ends])

    def missing(self, text: str) -> str:
        """Returns the first piece that is not in a text; "": all are."""
        return next((piece[0] for piece in self.pieces if _end([piece], text, 0) < 0), "")


def check_words(
    messages: Sequence[Message], marked: Marked, render: Callable[[list[Message]], str], frames: Frames
) -> tuple[int, ...]:
    """Checks that a text has the words of each message.

    Args:
        messages: the messages, as the template got them.
        marked: what the template wrote.
        render: renders other messages, and raises ValueError where the template refuses them.
        frames: what is known of the template; grows.

    Returns:
        The messages whose own thought is not in the text.

    Raises:
        ValueError: words are missing; the message gives the number of the message and the words.
    """
    text, written = marked.text, _written(marked, len(messages))
    head = text[: marked.turns[0].first] if marked.turns else ""
    lost, doubtful = list[int](), list[tuple[_Part, str]]()
    for number, message in enumerate(messages):
        own = written[number]
        if _is_plain(message, own, frames):
            continue
        thoughts, parts = _said(message, number, own)
        if thoughts and _is_lost(thoughts, parts, own or text):
            lost.append(number)
        at = 0
        for part in parts:
            end = part.end(own, at if part.call > 0 else 0)
            if part.is_short or (end < 0 and (part.call >= 0 or part.end(head) < 0)):
                doubtful.append((part, part.missing(text) if end < 0 else ""))
            at = max(at, end) if part.call >= 0 else 0
    if doubtful:
        text = _check_marks(messages, doubtful, render)
        for mark, (part, missing) in enumerate(doubtful):
            if part.call < 0 and not missing:
                _learn(messages[part.message], written[part.message], text, _MARK.format(mark), frames)
    return tuple(lost)


def _is_plain(message: Message, written: str, frames: Frames) -> bool:
    """Returns whether a message has nothing but a text, which is written as it is; most have, and this is fast."""
    content = message.get("content")
    if not isinstance(content, str) or message.get("tool_calls") or message.get("reasoning_content"):
        return False
    words = content.strip()
    if len(words) > _SHORT:
        return words in written
    return any(written == f"{before}{words}{behind}" for before, behind in frames.get(message["role"], ()))


def _learn(message: Message, written: str, text: str, mark: str, frames: Frames) -> None:
    """Keeps what is written around a short text, which a mark behind the text shows."""
    known = frames.setdefault(message["role"], [])
    content = message.get("content")
    if not isinstance(content, str) or len(known) >= _MOST_FRAMES:
        return
    first, words = text.find(mark), content.strip()
    at = written.find(words)
    while at >= 0:
        before, behind = written[:at], written[at + len(words) :]
        if text.endswith(before + words, 0, first) and text.startswith(behind, first + len(mark)):
            known += [(before, behind)] if (before, behind) not in known else []
            return
        at = written.find(words, at + 1)


def _written(marked: Marked, count: int) -> list[str]:
    """Returns what each message wrote."""
    found = [""] * count
    for turn in marked.turns:
        found[turn.message] += marked.text[turn.first : turn.last]
    return found


def _said(message: Message, number: int, written: str) -> tuple[list[_Piece], list[_Part]]:
    """Returns the thoughts of a message, and its text and calls."""
    thoughts = [piece for value in _given_thoughts(message) for piece in _pieces(value)]
    content = message.get("content")
    if isinstance(content, str):
        text = content.strip()
        texts: list[_Piece] = [(text,)] if text else []
        if text and text not in written and _THOUGHT.search(text):
            inside, texts = _divided(text)
            thoughts += inside
    else:
        found = parts_of(content) if isinstance(content, list) else None
        divided = [text_of(part) for part in found or []]
        thoughts += [piece for _, thought in divided for piece in _pieces(thought)]
        texts = [piece for value, _ in divided for piece in _pieces(value)] if found else list(_pieces(content))
    parts = [_Part(message=number, call=-1, pieces=texts)] if texts else []
    for at, call in enumerate(message.get("tool_calls") or []):
        function = call.get("function", call)
        pieces = [*_pieces(function.get("name", "")), *_pieces(function.get("arguments"))]
        parts += [_Part(message=number, call=at, pieces=pieces)] if pieces else []
    return thoughts, parts


def _given_thoughts(message: Message) -> list[Any]:
    return [message["reasoning_content"]] if message.get("reasoning_content") is not None else []


def _divided(text: str) -> tuple[list[_Piece], list[_Piece]]:
    """Divides a text with thoughts between tags into thoughts and the rest."""
    thoughts, texts = [], []
    for at, piece in enumerate(_THOUGHT.split(text)):
        if at % 2 == 0:
            texts.append(piece)
        else:
            *before, thought = _BEGINS.split(piece)
            texts += before
            thoughts.append(thought)
    return [*_pieces(thoughts)], [*_pieces(texts)]


def _pieces(value: Any) -> Iterator[_Piece]:
    """Yields what must be written of a value; objects and lists are searched for their values."""
    if isinstance(value, dict):
        for one in value.values():
            yield from _pieces(one)
    elif isinstance(value, list):
        for one in value:
            yield from _pieces(one)
    elif isinstance(value, bool):
        yield (str(value).lower(), str(value))
    elif isinstance(value, str):
        if value.strip():
            yield (value.strip(),)
    elif value is not None:
        yield (json.dumps(value), str(value))


def _end(pieces: Sequence[_Piece], text: str, at: int) -> int:
    """Returns where pieces end that follow each other in a text, behind `at`; -1: one of them is not there."""
    for piece in pieces:
        ends = [end for way in piece if (end := _end_of(way, text, at)) >= 0]
        if not ends:
            return -1
        at = min(ends)
    return at


def _end_of(piece: str, text: str, at: int) -> int:
    # As it is, or as JSON has it.
    for way in (piece, json.dumps(piece, ensure_ascii=False)[1:-1]):
        found = text.find(way, at)
        if found >= 0:
            return found + len(way)
    end = _end_of_words(piece, text, at)
    return end if end >= 0 or piece.isascii() else _end_of_words(json.dumps(piece)[1:-1], text, at)


def _end_of_words(piece: str, text: str, at: int) -> int:
    """Returns where the words of a piece end that follow each other closely in a text; -1: they do not."""
    first = _WORD.search(piece)
    # A piece without words is looked for as it is.
    place = text.find(first[0], at) if first else -1
    while first and place >= 0:
        end = _end_of_rest(_WORD.finditer(piece, first.end()), first.end(), text, place + len(first[0]))
        if end >= 0:
            return end
        place = text.find(first[0], place + 1)
    return -1


def _end_of_rest(words: Iterable[re.Match[str]], before: int, text: str, at: int) -> int:
    """Returns where the words behind a first one end in a text; between two there may be escapes and indentation."""
    for word in words:
        most = _ESCAPED * (word.start() - before) + _INDENTED
        place = text.find(word[0], at, at + most + len(word[0]))
        if place < 0:
            return -1
        at, before = place + len(word[0]), word.end()
    return at


def _is_lost(thoughts: list[_Piece], parts: list[_Part], written: str) -> bool:
    """Returns whether a thought is not written, or only words of the message's text are like it."""
    end = _end(thoughts, written, 0)
    own = [part for part in parts if part.call < 0]
    return end < 0 or any(part.end(written, end) < 0 <= part.end(written) for part in own)


def _check_marks(
    messages: Sequence[Message], doubtful: list[tuple[_Part, str]], render: Callable[[list[Message]], str]
) -> str:
    """Renders messages with marks beside doubtful words, of which each must be written; returns the text."""
    changed = [dict(message) for message in messages]
    marks = [_MARK.format(number) for number in range(len(doubtful))]
    counts = [
        _put(changed[part.message], part.call, mark, whole=bool(missing))
        for (part, missing), mark in zip(doubtful, marks, strict=True)
    ]
    try:
        text = render(changed)
    except ValueError:  # a template may take only what it knows
        text = "".join(mark for (_, missing), mark in zip(doubtful, marks, strict=True) if not missing)
    for (part, missing), mark, count in zip(doubtful, marks, counts, strict=True):
        if text.count(mark) + text.count(json.dumps(mark)[1:-1]) < count:
            raise _error(part, missing, messages[part.message])
    return text


def _put(message: Message, call: int, mark: str, *, whole: bool) -> int:
    """Puts marks into the text of a message, or into a call; returns how many.

    Args:
        message: the message, whose values are replaced.
        call: number of the call; -1: the text.
        mark: the mark.
        whole: whether all texts get marks before and behind them; otherwise one mark is put behind the text or the
            name of the call.
    """
    if call >= 0:
        calls = list(message["tool_calls"])
        function = calls[call].get("function", calls[call])
        name = function.get("name", "")
        new = function | {"name": name + mark}
        if whole:
            new["arguments"] = _around(function.get("arguments"), mark)
        calls[call] = calls[call] | {"function": new} if "function" in calls[call] else new
        message["tool_calls"] = calls
        return 1 + (json.dumps(new["arguments"], ensure_ascii=False).count(mark) if whole else 0)
    content = message["content"]
    if whole:
        message["content"] = _around(content, mark)
        return json.dumps(message["content"], ensure_ascii=False).count(mark)
    if isinstance(content, list):
        message["content"] = [*content, {"type": "text", "text": mark}]
    else:
        message["content"] = content | {"mark": mark} if isinstance(content, dict) else f"{content}{mark}"
    return 1


def _around(value: Any, mark: str) -> Any:
    """Returns a value whose texts, at every depth, have marks before and behind them; numbers become such texts."""
    if isinstance(value, dict):
        return {key: one if key == "type" else _around(one, mark) for key, one in value.items()}
    if isinstance(value, list):
        return [_around(one, mark) for one in value]
    return value if value is None else f"{mark}{value}{mark}"


def _error(part: _Part, missing: str, message: Message) -> ValueError:
    name = part.pieces[0][0]
    what = f"the text {_short(missing or name)}"
    if part.call >= 0:
        in_call = missing and missing != name
        what = f"{_short(missing)} in the call of {_short(name)}" if in_call else f"the call of {_short(name)}"
    return ValueError(
        f"must write the words of every message, got {what} left out of message {part.message + 1} (role "
        f"{message.get('role')}); name a template that writes it with data.chat.template, or correct the row"
    )


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:40]}...")
