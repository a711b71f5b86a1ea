"""Thoughts of answers that a template leaves out: counts, the place of the first one, and a warning."""

from __future__ import annotations

import warnings

from sppo_jax.data.chat.roles import Rendered
from sppo_jax.data.tokens.learned import Learned


def count_thoughts(rendered: Rendered, where: str, *, is_first: bool) -> Learned:
    """Counts the thoughts that a conversation lost, and those of turns that are trained all the same.

    Args:
        rendered: the conversation as text.
        where: its place.
        is_first: whether no conversation before lost any; then the place is kept.
    """
    lost = set(rendered.lost_thoughts)
    if not lost:
        return Learned()
    trained = {
        turn.message
        for turn in rendered.turns
        if turn.message in lost and any(first < turn.last and turn.first < last for first, last in rendered.trained)
    }
    place = (f"message {min(lost) + 1} of {where}",) if is_first else ()
    return Learned(lost_thoughts=len(lost), trained_without=len(trained), first_lost=place)


def thoughts_line(found: Learned) -> str:
    """Says how many thoughts are left out; empty if there are none."""
    if not found.lost_thoughts:
        return ""
    return (
        f"{found.lost_thoughts:,} thoughts are left out by the template, the first in {found.first_lost[0]}; "
        f"{found.trained_without:,} of their turns are trained"
    )


def warn_of_thoughts(found: Learned) -> None:
    """Warns if turns are trained without their own thoughts."""
    if found.trained_without:
        warnings.warn(
            f"a turn should be trained with its own thought, got {found.trained_without:,} turns whose thoughts the "
            f"template leaves out (the first that it leaves out is in {found.first_lost[0]}); set "
            "data.chat.train_on=last, or name a template that keeps all thoughts with data.chat.template",
            stacklevel=3,
        )
