"""Samples of the needle tasks: sentences that state numbers hide in a long text, and the end asks for one of them.

| task | needles | key | value |
|---|---|---|---|
| needle | 1 | two words | seven digits |
| needle-keys | 4, one of them asked for | two words | seven digits |
| needle-uuid | 4, one of them asked for | a uuid | a uuid |

A sample is a function of task, seed, stream and number alone. Its depth is the place of the needle that is asked for,
as a share of the text. Ten samples in a row have one depth each of 0 to 0.1, 0.1 to 0.2, ..., 0.9 to 1.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass

import numpy as np

from sppo_jax.config.data import NEEDLE_TASKS
from sppo_jax.data.tasks.haystack import ADJECTIVES, NOUNS, DrawnSentences, GivenText, Haystack

# The streams share no sample; those of the recall task have the same numbers.
EVALUATION = 2
DEPTHS = 10
_OTHERS = {"needle": 0, "needle-keys": 3, "needle-uuid": 3}
_NEAR = 400  # characters in which the end of a sentence is looked for


@dataclass(frozen=True, kw_only=True)
class Needles:
    """A sample before its text is cut.

    Args:
        head: what stands before the text.
        haystack: the text.
        hidden: needles with their depths, in [0, 1].
        question: what stands behind the text.
        prefix: the beginning of the answer, which is given.
        answer: the rest of it, which begins with a space.
        depth: of the needle that is asked for.
    """

    head: str
    haystack: Haystack
    hidden: tuple[tuple[float, str], ...]
    question: str
    prefix: str
    answer: str
    depth: float

    def text(self, count: int) -> str:
        """Returns head, the first characters of the haystack with all needles, and question."""
        hay, parts, begin = self.haystack.take(count), [self.head, "\n\n"], 0
        for at, needle in sorted((_place(hay, int(depth * count)), needle) for depth, needle in self.hidden):
            before = hay[begin:at]
            parts += [before, " " if before and not before[-1].isspace() else "", needle, " "]
            begin = at
        return "".join([*parts, hay[begin:], "\n\n", self.question])


def draw_needles(task: str, *, seed: int, stream: int, number: int, haystack: str | None = None) -> Needles:
    """Draws a sample.

    Args:
        task: one of NEEDLE_TASKS.
        seed: of all samples.
        stream: samples of different streams differ.
        number: of the sample.
        haystack: a text of the user's, from `read_haystack`; None: sentences of our own words.
    """
    rng = np.random.default_rng((seed, stream, number, NEEDLE_TASKS.index(task)))
    count, what = 1 + _OTHERS[task], "code" if task == "needle-uuid" else "number"
    keys = _uuids(rng, count) if what == "code" else _names(rng, count)
    values = _uuids(rng, count) if what == "code" else _numbers(rng, count)
    depth = (number % DEPTHS + rng.random()) / DEPTHS
    depths = [depth, *rng.random(count - 1).tolist()]
    stated = [f"The {what} of {key} is {value}." for key, value in zip(keys, values, strict=True)]
    states = f"states a {what}" if count == 1 else f"states {count} {what}s"
    return Needles(
        head=f"The text below {states}. Remember {'it' if count == 1 else 'them'}.",
        haystack=DrawnSentences(rng) if haystack is None else GivenText(haystack, rng),
        hidden=tuple(zip(depths, stated, strict=True)),
        question=f"What is the {what} of {keys[0]}?",
        prefix=f" The {what} of {keys[0]} is",
        answer=f" {values[0]}",
        depth=depth,
    )


def _names(rng: np.random.Generator, count: int) -> list[str]:
    found = rng.choice(len(ADJECTIVES) * len(NOUNS), size=count, replace=False).tolist()
    return [f"the {ADJECTIVES[at % len(ADJECTIVES)]} {NOUNS[at // len(ADJECTIVES)]}" for at in found]


def _numbers(rng: np.random.Generator, count: int) -> list[str]:
    return [str(value) for value in (10**6 + rng.choice(9 * 10**6, size=count, replace=False)).tolist()]


def _uuids(rng: np.random.Generator, count: int) -> list[str]:
    return [str(uuid.UUID(bytes=rng.bytes(16), version=4)) for _ in range(count)]


def _place(text: str, at: int) -> int:
    """Returns where a needle goes: behind the first sentence, or else the first word, that ends behind a place."""
    end = text.find(". ", at, at + _NEAR)
    if end >= 0:
        return end + 2
    end = text.find(" ", at)
    return end + 1 if end >= 0 else len(text)
