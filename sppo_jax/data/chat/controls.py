"""Control tokens in texts that the model does not write.

The tokenizer makes the token that ends a turn of the text `<|im_end|>`, whoever wrote the text. In a user's message
this token ends the turn too soon.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np

from sppo_jax.data.chat.roles import ASSISTANTS, Chat
from sppo_jax.data.tokens.encoding import Encoder
from sppo_jax.data.tokens.learned import Learned


class ControlTokens:
    """Finds the control tokens of a tokenizer in messages."""

    def __init__(self, encoder: Encoder) -> None:
        """Takes the special tokens of an encoder that have a text; bytes have none."""
        texts = [encoder.decode(np.array([token])) for token in encoder.special]
        self._texts = sorted(filter(None, texts), key=lambda text: (-len(text), text))
        self._pattern = re.compile("|".join(map(re.escape, self._texts)))

    def count(self, chat: Chat) -> Learned:
        """Counts those in the messages of a conversation that are not the assistant's."""
        found: list[str] = []
        for message in chat.messages:
            if message["role"] not in ASSISTANTS:
                for text in _texts(message["content"]):
                    # Few texts have any, and this is faster than the pattern.
                    if any(control in text for control in self._texts):
                        found += self._pattern.findall(text)
        return Learned(control_tokens=len(found), with_controls=int(bool(found)), controls=tuple(dict.fromkeys(found)))


def control_line(found: Learned) -> str:
    """Says how many control tokens there are; empty if there are none."""
    if not found.control_tokens:
        return ""
    shown = ", ".join(found.controls[:4]) + (", ..." if len(found.controls) > 4 else "")
    return (
        f"{found.control_tokens:,} control tokens ({shown}) in {found.with_controls:,} of {found.read:,} "
        "conversations, in messages that are not the assistant's"
    )


def warn_of_controls(found: Learned) -> None:
    """Warns if there are control tokens in messages that are not the assistant's."""
    if found.control_tokens:
        warnings.warn(
            f"messages should hold no control tokens of data.tokenizer, got {control_line(found)}; the model reads "
            "them as the ends of turns and the like: write them differently in the rows, or leave these rows out",
            stacklevel=3,
        )


def _texts(content: Any) -> Iterator[str]:
    """Yields the texts of a message's content, which may be in parts."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, (list, dict)):
        for part in content.values() if isinstance(content, dict) else content:
            yield from _texts(part)
