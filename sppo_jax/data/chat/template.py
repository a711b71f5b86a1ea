"""A chat template made ready: the text of a conversation, and what of the text is to be learned.

The template is rendered once, with marks (`chat_marks`), and once without to see that the marks changed nothing. Where
the template has `{% generation %}` regions, these are learned. Otherwise each assistant's turn is learned from where
the generation prompt ends: exactly what the model must write, the token that stops it included.
"""

from __future__ import annotations

import datetime
import functools
import json
from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from sppo_jax.data.chat.forms import ANSWERS_CALL, CALL, FUNCTION, PROBE, Forms
from sppo_jax.data.chat.marks import (
    FIND,
    MOST_MESSAGES,
    Generation,
    Marked,
    MarksError,
    finder,
    has_generation,
    put_marks,
    read_marks,
    without_marks,
)
from sppo_jax.data.chat.roles import ASSISTANT, TRAIN, Chat, Message, Region, Rendered, TrainOn
from sppo_jax.data.chat.words import Frames, check_words

# The names under which rows have the reasoning of a message, the one that counts first.
_REASONING = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """Renders conversations; every error is one line without the place of the conversation."""

    def __init__(
        self,
        source: str,
        *,
        name: str,
        variables: dict[str, Any],
        date: str | None = None,
        train_on: TrainOn = "assistant",
    ) -> None:
        """Reads a template.

        Args:
            source: the template.
            name: the name of the template in messages.
            variables: special tokens and further variables that the template may read.
            date: the date that the template may write, as YYYY-MM-DD; None: it may write none.
            train_on: the turns to learn.

        Raises:
            ValueError: the template is not in the language of jinja2.
        """
        self.name, self._variables, self._train_on = name, variables, train_on
        self._date = datetime.date.fromisoformat(date) if date else None
        self._environment = environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = self._today
        try:
            tree = environment.parse(source)
            self.has_generation = has_generation(tree)
            self._plain = self._compile(without_marks(tree))
            self._marked = self._compile(put_marks(environment.parse(source)))
        except jinja2.TemplateError as error:
            raise ValueError(
                f"data.chat.template must be a chat template that jinja2 can read, got {name} ({_line(error)}); "
                "correct the template"
            ) from error
        self._header = functools.cache(self._find_header)
        self._frames: Frames = {}
        self._forms = Forms(lambda messages: self._text(self._plain, messages, None, prompt=False))

    def _compile(self, tree: jinja2.nodes.Template) -> jinja2.Template:
        tree.set_environment(self._environment)
        made = self._environment.make_globals(None)
        return jinja2.Template.from_code(self._environment, self._environment.compile(tree), made)

    @property
    def whose_marks(self) -> str:
        """Says who decides what is learned."""
        if self._train_on == "all":
            return "data.chat.train_on=all: all tokens"
        return "the template's {% generation %} regions" if self.has_generation else "turns found in the template"

    def render(self, chat: Chat) -> Rendered:
        """Returns the text of a conversation and what is learned of it.

        Raises:
            ValueError: the template refuses the conversation, or what it writes cannot be marked.
        """
        if len(chat.messages) > MOST_MESSAGES:
            raise ValueError(f"a conversation must have at most {MOST_MESSAGES:,} messages, got {len(chat.messages):,}")
        trains = [message.get(TRAIN, True) is not False for message in chat.messages]
        messages = [_with_reasoning(one) for one in self._forms.fitted(chat.messages)]
        marked = self._marks(messages, chat.tools, prompt=False)
        plain = self._text(self._plain, messages, chat.tools, prompt=False)
        if marked.text != plain:
            raise ValueError(
                f"the template {self.name} must write the same text with marks, got another text (a filter around "
                "turns, or a character of a private use plane in a message); put {% generation %} regions elsewhere"
            )
        lost = self._check_words(messages, chat.tools, marked)
        if self._train_on == "all":
            excluded = self._excluded(trains, messages, chat.tools, marked)
            return Rendered(text=plain, trained=_between(excluded, len(plain)), turns=marked.turns, lost_thoughts=lost)
        regions = marked.generated if self.has_generation else self._answers(messages, chat.tools, marked)
        if not all(trains) and any(region.message < 0 for region in regions):
            raise ValueError(
                f'a message with "train": false must be written in a loop of its own, got a {{% generation %}} region '
                f"of no known message in {self.name}; leave out the key, or change the template"
            )
        regions = tuple(region for region in regions if region.message < 0 or trains[region.message])
        if self._train_on == "last":
            last = max((region.message for region in regions), default=-1)
            regions = tuple(region for region in regions if region.message == last) if last >= 0 else regions[-1:]
        trained = tuple((region.first, region.last) for region in regions if region.first < region.last)
        return Rendered(text=plain, trained=trained, turns=marked.turns, lost_thoughts=lost)

    def prompt(self, messages: list[Message]) -> str:
        """Returns the text of messages and of the generation prompt, behind which the model writes an answer.

        Raises:
            ValueError: the template refuses the messages.
        """
        return self._text(self._plain, self._forms.fitted(messages), None, prompt=True)

    def _check_words(self, messages: list[Message], tools: list[Any] | None, marked: Marked) -> tuple[int, ...]:
        """Returns the messages whose thoughts are left out; refuses a text without the words of a message."""
        try:
            render = functools.partial(self._text, self._plain, tools=tools, prompt=False)
            return check_words(messages, marked, render, self._frames)
        except ValueError as error:
            raise ValueError(f"the template {self.name} {error}") from None

    def _excluded(
        self, trains: list[bool], messages: list[Message], tools: list[Any] | None, marked: Marked
    ) -> list[Region]:
        """Returns what the messages wrote that are not to be trained."""
        written = {turn.message for turn in marked.turns}
        for number, learned in enumerate(trains):
            if not learned and number not in written:
                self._check_left_out(number, messages, tools, marked.text)
        return [turn for turn in marked.turns if turn.message >= 0 and not trains[turn.message]]

    def _answers(self, messages: list[Message], tools: list[Any] | None, marked: Marked) -> tuple[Region, ...]:
        """Returns what the model must write: the assistant's turns without what the generation prompt gives."""
        found = []
        written = {turn.message for turn in marked.turns}
        for number, message in enumerate(messages):
            if message.get("role") == ASSISTANT and number not in written:
                self._check_left_out(number, messages, tools, marked.text)
        before = None
        for turn in marked.turns:
            if messages[turn.message].get("role") == ASSISTANT:
                # What goes on with a turn has no prompt of its own.
                goes_on = before is not None and before.last == turn.first and self._is_answer(messages, before)
                first = turn.first + self._given(messages, tools, marked.text, turn, goes_on)
                found.append(Region(message=turn.message, first=first, last=turn.last))
            before = turn
        return tuple(found)

    def _is_answer(self, messages: list[Message], turn: Region) -> bool:
        return messages[turn.message].get("role") == ASSISTANT

    def _given(self, messages: list[Message], tools: list[Any] | None, text: str, turn: Region, goes_on: bool) -> int:
        """Returns how many characters of a turn the generation prompt gives."""
        role = messages[turn.message - 1].get("role") if turn.message else "user"
        sender = "tool" if role == "tool" else "user"
        for header in dict.fromkeys((self._header(sender, bool(tools)), self._header("user", bool(tools)))):
            # A turn before may have written the first part of the prompt.
            for before in (0, *range(len(header), 0, -1)):
                if not text.endswith(header[:before], 0, turn.first):
                    continue
                shared = _shared(header, before, text, turn)
                if before == len(header) or shared:
                    return shared
        if goes_on:
            return 0
        begins = text[turn.first : turn.first + 30]
        raise ValueError(
            f"an assistant's turn must begin as the generation prompt of {self.name} does, with "
            f"{self._header('user', bool(tools))!r}, got {begins!r} in message {turn.message + 1}; "
            "put {% generation %} regions into a copy of the template and name it with data.chat.template"
        )

    def _check_left_out(self, number: int, messages: list[Message], tools: list[Any] | None, text: str) -> None:
        """Refuses a message that the template writes where no mark can be."""
        changed = [dict(message) for message in messages]
        changed[number]["content"] = f"{changed[number].get('content') or ''}{PROBE}"
        if self._text(self._plain, changed, tools, prompt=False) != text:
            raise ValueError(
                f"the template {self.name} must write each message in a loop over messages, got message {number + 1} "
                "written elsewhere; put {% generation %} regions into a copy and name it with data.chat.template"
            )

    def _find_header(self, sender: str, has_tools: bool) -> str:
        """Returns what the template writes behind a last turn to ask for an answer."""
        asked: list[Message] = [{"role": "user", "content": "a"}]
        if sender == "tool":
            asked += [
                {"role": ASSISTANT, "content": "", "tool_calls": [CALL]},
                {"role": "tool", **ANSWERS_CALL, "content": "b"},
            ]
        schema = {"type": "object", "properties": {"a": {"type": "integer", "description": "a"}}, "required": ["a"]}
        tools = [{"type": "function", "function": {"name": FUNCTION, "description": "a", "parameters": schema}}]
        try:
            marked = self._marks(self._forms.fitted(asked), tools if has_tools else None, prompt=True)
        except ValueError:
            if sender != "user":
                return self._header("user", has_tools)
            raise
        if not any(turn.message == len(asked) - 1 for turn in marked.turns):  # the last message is written in no loop
            without = self._text(self._plain, self._forms.fitted(asked), tools if has_tools else None, prompt=False)
            return marked.text.removeprefix(without)
        return marked.text[marked.tail :]

    def _marks(self, messages: list[Message], tools: list[Any] | None, *, prompt: bool) -> Marked:
        try:
            return read_marks(self._text(self._marked, messages, tools, prompt=prompt))
        except MarksError as error:
            raise ValueError(f"{error}, got {self.name}; change a copy and name it with data.chat.template") from error

    def _text(
        self, template: jinja2.Template, messages: list[Message], tools: list[Any] | None, *, prompt: bool
    ) -> str:
        variables = self._variables | {FIND: finder(messages)}
        try:
            return template.render(
                messages=messages, tools=tools, documents=None, add_generation_prompt=prompt, **variables
            )
        except _NoDate:
            raise ValueError(
                f"data.chat.date must be given where the template writes today's date, got null and {self.name}; "
                "set data.chat.date to a day such as 2026-01-31"
            ) from None
        except Exception as error:  # a template is a program: it may fail in any way
            raise ValueError(
                f"the template {self.name} must take the conversation, got {type(error).__name__} ({_line(error)}); "
                "correct the conversation, or choose another template"
            ) from error

    def _today(self, pattern: str) -> str:
        if self._date is None:
            raise _NoDate
        return self._date.strftime(pattern)


class _NoDate(Exception):
    """The template asked for the date, and there is none."""


def _between(excluded: list[Region], size: int) -> tuple[tuple[int, int], ...]:
    """Returns the parts of a text of some size that are in no region."""
    firsts = [0, *(region.last for region in excluded)]
    lasts = [*(region.first for region in excluded), size]
    return tuple((first, last) for first, last in zip(firsts, lasts, strict=True) if first < last)


def _shared(header: str, at: int, text: str, turn: Region) -> int:
    """Returns how many characters a turn shares with the rest of a prompt."""
    count = 0
    most = min(len(header) - at, turn.last - turn.first)
    while count < most and header[at + count] == text[turn.first + count]:
        count += 1
    return count


def _with_reasoning(message: Message) -> Message:
    """Returns a message without `train`, its reasoning under every name that templates read it by, as transformers."""
    found = {key: value for key, value in message.items() if key != TRAIN}
    reasoning = next((found[key] for key in _REASONING if found.get(key) is not None), None)
    if reasoning is not None:
        found = {"thinking": reasoning, **found, "reasoning_content": reasoning}
    return found


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or "no message"
