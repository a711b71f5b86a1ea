"""The tokens with which answers of conversations stop."""

from __future__ import annotations

import warnings

import numpy as np

from sppo_jax.config.data import BYTES
from sppo_jax.data.chat.roles import ASSISTANT, Chat, Message
from sppo_jax.data.chat.spans import overlaps
from sppo_jax.data.chat.template import ChatTemplate
from sppo_jax.data.chat.template_places import Templates
from sppo_jax.data.tokens.encoding import Encoder

_CALL = {"type": "function", "id": "call00000", "function": {"name": "f", "arguments": {"a": 1}}}
_QUESTION: Message = {"role": "user", "content": "a"}


def stop_tokens(template: ChatTemplate, encoder: Encoder) -> tuple[int, ...]:
    """Returns the special tokens that end an answer and a call of a tool, as the template writes them."""
    return tuple(dict.fromkeys(token for token in _last_tokens(template, encoder) if token in encoder.special))


def warn_of_no_stop(templates: Templates, encoder: Encoder) -> None:
    """Warns if what is learned of a turn ends without a token that stops generation; bytes have no such token."""
    if encoder.name == BYTES:
        return
    for template in filter(None, (templates.default, templates.for_tools)):
        last = [token for token in _last_tokens(template, encoder) if token not in encoder.special | encoder.stops]
        if last:
            warnings.warn(
                "what is learned of a turn should end with a token that stops generation, got "
                f"{encoder.decode(np.array(last[:1]))!r} at the end with {template.name}: the model does not learn to "
                "stop; name an eos_token in tokenizer_config.json that the template writes, or name a template with "
                "data.chat.template that ends turns with a special token",
                stacklevel=4,
            )


def _last_tokens(template: ChatTemplate, encoder: Encoder) -> list[int]:
    """Returns the last token that is learned of an answer and of a call of a tool, spaces left out."""
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
                found.append(int(located.tokens[at]))
                break
    return found
