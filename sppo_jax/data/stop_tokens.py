"""The chat template that a run was trained with, and the tokens with which its answers stop."""

from __future__ import annotations

import numpy as np

from sppo_jax.config.data import DataConfig
from sppo_jax.data.chat import ASSISTANT, Chat, Message
from sppo_jax.data.chat_spans import overlaps
from sppo_jax.data.chat_template import ChatTemplate
from sppo_jax.data.chats import read_template
from sppo_jax.data.encoding import Encoder
from sppo_jax.data.row_kinds import kind_of
from sppo_jax.data.sources import LIBRARY, find_files

_CALL = {"type": "function", "id": "call00000", "function": {"name": "f", "arguments": {"a": 1}}}
_QUESTION: Message = {"role": "user", "content": "a"}


def has_chats(data: DataConfig) -> bool:
    """Returns whether a config trains on conversations; where its files are gone, whether it names a template."""
    try:
        for name in data.sources:
            own = data.with_settings(data.settings_of(name, data.source))
            if name not in (LIBRARY, "recall") and any(kind_of(own, file) == "chat" for file in find_files(name)[0]):
                return True
    except ValueError:
        return data.chat.template != "auto" or data.format in ("chat", "alpaca")
    return False


def template_of(data: DataConfig) -> tuple[str, ChatTemplate]:
    """Returns the text of the template that conversations are written with, and the template.

    Raises:
        ValueError: there is no template any more.
    """
    source, name, variables = read_template(data)
    chat = data.chat
    return source, ChatTemplate(source, name=name, variables=variables, date=chat.date, train_on=chat.train_on)


def stop_tokens(template: ChatTemplate, encoder: Encoder) -> tuple[int, ...]:
    """Returns the special tokens that end an answer and a call of a tool, as the template writes them."""
    found: list[int] = []
    for answer in ({"content": "b"}, {"content": "", "tool_calls": [_CALL]}):
        try:
            rendered = template.render(Chat(messages=[_QUESTION, {"role": ASSISTANT, **answer}]))
        except ValueError:  # a template may know no tools
            continue
        (located,) = encoder.locate([rendered.text])
        for at in reversed(np.flatnonzero(overlaps(located, rendered.trained)).tolist()):
            first, last = located.span(at)
            if rendered.text[first:last].strip():
                token = int(located.tokens[at])
                found += [token] if token in encoder.special else []
                break
    return tuple(dict.fromkeys(found))
