"""A conversation that is too long, from a user's turn on: the newest turns that fit, with the system message.

The kept messages are rendered again, because templates look at the places of messages: the first one, or the last
question. The tokens of the whole conversation say from which turn on the rest about fits, so few renderings are needed.
"""

from __future__ import annotations

import bisect
import dataclasses

from sppo_jax.data.chat.roles import Chat, Rendered
from sppo_jax.data.chat.template import ChatTemplate
from sppo_jax.data.tokens.encoding import Encoder, Located

_SYSTEM = ("system", "developer")
_USER = ("user", "human")


def newest_turns(
    template: ChatTemplate, encoder: Encoder, chat: Chat, rendered: Rendered, located: Located, length: int
) -> tuple[Rendered, Located]:
    """Returns the text and the tokens of the newest turns of a conversation.

    Args:
        template: renders conversations.
        encoder: turns text into tokens.
        chat: the conversation.
        rendered: all of it as text.
        located: its tokens, more than `length`.
        length: tokens that a sequence holds.

    Returns:
        As many turns as fit; where not even the last question and what follows it fit, the whole conversation.

    Raises:
        ValueError: the template refuses the newest turns.
    """
    roles = [message.get("role") for message in chat.messages]
    num_system = next((number for number, role in enumerate(roles) if role not in _SYSTEM), len(roles))
    begins = [number for number, role in enumerate(roles) if role in _USER and number > num_system]

    def fitting(at: int) -> tuple[Rendered, Located] | None:
        kept = [*chat.messages[:num_system], *chat.messages[begins[at] :]]
        found = template.render(dataclasses.replace(chat, messages=kept))
        (tokens,) = encoder.locate([found.text])
        return (found, tokens) if len(tokens.tokens) <= length else None

    if not begins:
        return rendered, located
    guess = min(len(begins) - 1, _first_guess(begins, num_system, rendered, located, length))
    best, at = fitting(guess), guess
    if best is None:
        while best is None and (at := at + 1) < len(begins):
            best = fitting(at)
        return best or (rendered, located)
    while at > 0 and (found := fitting(at - 1)):
        best, at = found, at - 1
    return best


def _first_guess(begins: list[int], num_system: int, rendered: Rendered, located: Located, length: int) -> int:
    """Returns the number of the first beginning from which on the tokens of the whole conversation about fit."""
    size = len(located.tokens)

    def tokens_before(message: int) -> int:
        char = min((turn.first for turn in rendered.turns if turn.message >= message), default=len(rendered.text))
        return bisect.bisect_left(range(size), char, key=lambda token: located.span(token)[0])

    head = tokens_before(num_system)
    return bisect.bisect_left(begins, True, key=lambda message: head + size - tokens_before(message) <= length)
