"""Counts of what is learned in documents whose tokens are not all learned."""

from __future__ import annotations

import dataclasses
import warnings
from dataclasses import dataclass

import numpy as np

_WARN_SHARE = 0.01
_TEXTS = ("marks", "controls", "first_lost", "kinds")


@dataclass(frozen=True, kw_only=True)
class Learned:
    """What became of the conversations, or of the rows of tokens, of a source.

    Args:
        read: number of conversations that were read.
        too_long: number of these that are longer than a sequence.
        cut: number of these that lost their end.
        dropped: number of these that are left out, because nothing in them would be learned.
        tokens: tokens of all that were read.
        cut_tokens: tokens behind the cuts.
        dropped_tokens: tokens of those left out.
        trained_tokens: tokens that are targets.
        marks: who says what is learned.
        control_tokens: number of control tokens in messages that are not the assistant's.
        with_controls: number of conversations that have some.
        controls: the texts of these tokens.
        lost_thoughts: number of messages whose own thought the template leaves out.
        trained_without: number of these that are trained.
        first_lost: the place of the first one of each part.
        kinds: what they are: conversations, rows, or both.
    """

    read: int = 0
    too_long: int = 0
    cut: int = 0
    dropped: int = 0
    tokens: int = 0
    cut_tokens: int = 0
    dropped_tokens: int = 0
    trained_tokens: int = 0
    marks: tuple[str, ...] = ()
    control_tokens: int = 0
    with_controls: int = 0
    controls: tuple[str, ...] = ()
    lost_thoughts: int = 0
    trained_without: int = 0
    first_lost: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()

    @property
    def noun(self) -> str:
        """What the documents are called."""
        return " and ".join(self.kinds) or "conversations"

    @property
    def kept_tokens(self) -> int:
        return self.tokens - self.cut_tokens - self.dropped_tokens

    def __add__(self, other: Learned) -> Learned:
        """Returns the counts of both."""
        names = [field.name for field in dataclasses.fields(self)]
        sums = {name: getattr(self, name) + getattr(other, name) for name in names}
        return Learned(**sums | {name: tuple(dict.fromkeys(sums[name])) for name in _TEXTS})


def learned_of(facts: dict[str, object]) -> Learned:
    """Returns the counts that `dataclasses.asdict` made facts of."""
    return Learned(**{key: tuple(fact) if key in _TEXTS else fact for key, fact in facts.items()})  # type: ignore[arg-type]


def count(learned: np.ndarray, kept: int, length: int, *, size: int | None = None) -> Learned:
    """Counts one conversation.

    Args:
        learned: which of its tokens are learned, bool [num_tokens].
        kept: number of leading tokens that are kept.
        length: tokens that a sequence holds.
        size: tokens of the conversation before its oldest turns were left out; None: all are in `learned`.
    """
    size, trained = len(learned) if size is None else size, int(learned[1:kept].sum())
    return Learned(
        read=1,
        too_long=int(size > length),
        cut=int(0 < kept < size and trained > 0),
        dropped=int(not trained),
        tokens=size,
        cut_tokens=size - kept if trained else 0,
        dropped_tokens=0 if trained else size,
        trained_tokens=trained,
    )


def warn_of_dropped(found: Learned, length: int, advice: str = "") -> None:
    """Warns if more than one of a hundred conversations are left out.

    Args:
        found: the counts.
        length: tokens that a sequence holds.
        advice: what helps beside longer sequences.
    """
    if found.dropped > _WARN_SHARE * found.read:
        warnings.warn(
            f"{found.noun} must have something to learn in a sequence of {length:,} tokens, got {found.dropped:,} of "
            f"{found.read:,} without, which are left out ({found.too_long:,} are longer than a sequence); raise "
            f"sequence.length{advice and f', or {advice}'}",
            stacklevel=3,
        )
