"""What a model reads before an answer: a prompt as text, or what a chat template makes of it, as tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from sppo_jax.config.data import DataConfig
from sppo_jax.data.tokens.encoding import Encoder

if TYPE_CHECKING:
    from sppo_jax.data.chat.template import ChatTemplate


@dataclass(frozen=True, kw_only=True)
class Prompter:
    """Writes prompts.

    Args:
        encoder: turns text into tokens.
        template: the chat template, whose generation prompt follows; None: the text itself, begun as documents begin.
    """

    encoder: Encoder
    template: ChatTemplate | None = None

    def text(self, asked: str, prefix: str = "") -> str:
        """Returns what the model reads, without the token that documents begin with.

        Args:
            asked: what a user says.
            prefix: the beginning of the answer, which is given.

        Raises:
            ValueError: the template refuses it.
        """
        if self.template is None:
            return asked + prefix
        before = self.template.prompt([{"role": "user", "content": asked}])
        return before + (prefix.lstrip() if before[-1:].isspace() else prefix)

    def tokens(self, text: str) -> np.ndarray:
        """Returns the tokens of a whole prompt, int64 [num_tokens]."""
        start = () if self.template is not None else self.encoder.start
        return np.concatenate([np.array(start, np.int64), self.encoder.encode([text])[0].astype(np.int64)])

    def continuations(self, text: str, answer: str) -> tuple[Continuation, ...]:
        """Returns the tokens with which a model may write an answer behind a prompt, the likeliest first.

        Between the last word of a prompt and an answer there may be a space or none. The tokens are those that follow
        the prompt's own in prompt and answer together; where these begin with other tokens, those of the answer alone.

        Args:
            text: of the prompt.
            answer: not empty.
        """
        has_space = text[-1:].isspace() or answer[:1].isspace()
        own = self.encoder.encode([text])[0]
        found: dict[tuple[int, ...], Continuation] = {}
        for form in (answer,) if has_space else (f" {answer}", answer):
            whole, alone = self.encoder.encode([text + form, form])
            joins = len(whole) > len(own) and np.array_equal(whole[: len(own)], own)
            tokens = tuple((whole[len(own) :] if joins else alone).tolist())
            found.setdefault(tokens, Continuation(tokens=tokens, joins=joins))
        return tuple(one for one in found.values() if one.tokens)


@dataclass(frozen=True, kw_only=True)
class Continuation:
    """Tokens of an answer behind a prompt.

    Args:
        tokens: at least one.
        joins: whether they are the tokens that follow the prompt's own in prompt and answer together.
    """

    tokens: tuple[int, ...]
    joins: bool


def chat_template(data: DataConfig) -> ChatTemplate | None:
    """Returns the chat template of the tokenizer, or the one that the config names; None where there is none.

    Raises:
        ValueError: a template that is there cannot be read, or jinja2 is not installed.
    """
    try:
        from sppo_jax.data.chat.template_places import Templates, read_template
    except ImportError:
        raise ValueError("chat templates need the jinja2 library, got none; run pip install jinja2") from None
    try:
        found = read_template(data)
    except ValueError:
        if data.chat.template != "auto":
            raise
        return None
    return Templates(found, data).default
