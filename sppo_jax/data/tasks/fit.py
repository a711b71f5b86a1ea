"""A needle sample of a length in tokens: its haystack is cut, and never a needle or the question."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from sppo_jax.data.tasks.needles import Needles
from sppo_jax.data.tasks.prompts import Continuation, Prompter

_MOST_CHARACTERS = 64  # of a token: a haystack of so many more is not looked at
_USUAL_CHARACTERS = 4


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """A sample as tokens.

    Args:
        prompt: int64 [num_tokens].
        answers: each way of writing the answer.
        depth: of the needle that is asked for, a share of the haystack.
    """

    prompt: np.ndarray
    answers: tuple[Continuation, ...]
    depth: float


def fit_needles(drawn: Needles, prompter: Prompter, length: int) -> Fitted:
    """Cuts the haystack of a sample such that prompt and answer have a length, or as little less as tokens allow.

    One more character of the haystack would give more tokens than `length`.

    Args:
        drawn: the sample.
        prompter: writes the prompt; what its template adds counts.
        length: tokens of prompt and answer together.

    Raises:
        ValueError: the sample does not fit even without its haystack.
    """

    def prompt_of(count: int) -> str:
        return prompter.text(drawn.text(count), drawn.prefix)

    answers = prompter.continuations(prompt_of(0), drawn.answer)
    room = length - max(len(one.tokens) for one in answers)
    least = len(prompter.tokens(prompt_of(0)))
    if least > room:
        raise ValueError(
            f"a length must hold needles, question and answer, got {length} tokens where they alone have "
            f"{least + length - room}; use a length of {least + length - room} or more"
        )
    count = _most(lambda count: len(prompter.tokens(prompt_of(count))), least, room)
    text = prompt_of(count)
    return Fitted(prompt=prompter.tokens(text), answers=prompter.continuations(text, drawn.answer), depth=drawn.depth)


def _most(tokens_of: Callable[[int], int], least: int, room: int) -> int:
    """Returns a count of characters that fits, and with one more of which it does not.

    Args:
        tokens_of: the number of tokens with a count of characters.
        least: their number with none.
        room: the most tokens.
    """
    low, at_low, high, at_high = 0, least, None, 0
    guess, top = (room - least) * _USUAL_CHARACTERS, (room - least) * _MOST_CHARACTERS
    while (high is None or high - low > 1) and low < top:
        guess = max(low + 1, min(guess, top if high is None else high - 1))
        found = tokens_of(guess)
        if found > room:
            high, at_high = guess, found
        else:
            low, at_low = guess, found
        if high is None:
            guess = low * (room - least) // max(at_low - least, 1) + 1
        else:
            guess = low + (room - at_low) * (high - low) // max(at_high - at_low, 1)
    return low
