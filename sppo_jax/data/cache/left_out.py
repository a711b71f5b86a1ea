"""What of a source is not read, and why: counted where it is met, and kept beside the tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

# How many, by what is left out and why.
Tally = Counter[tuple[str, str]]
NO_TEXT = ("documents", "their text is null or empty")
NO_TOKENS = ("documents", "they have no tokens")
SAYS_SO = "their row says that it is not trained"
NOT_TRAINED = ("documents", SAYS_SO)
NOTHING_LEARNED = "nothing in them is learned"


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """What is left out for one reason.

    Args:
        what: what is left out, such as "documents".
        why: the reason.
        count: how many.
    """

    what: str
    why: str
    count: int


def as_facts(tally: Tally) -> dict[str, dict[str, int]]:
    """Returns counts as facts of the cache, which are added up where parts are joined."""
    facts: dict[str, dict[str, int]] = {}
    for (what, why), count in tally.items():
        facts.setdefault(what, {})[why] = count
    return facts


def of_facts(facts: Mapping[str, Mapping[str, int]]) -> tuple[LeftOut, ...]:
    """Returns what `as_facts` made facts of."""
    return tuple(
        LeftOut(what=what, why=why, count=count) for what, counts in facts.items() for why, count in counts.items()
    )


def summed(found: Iterable[LeftOut]) -> tuple[LeftOut, ...]:
    """Returns one count for each reason, in the order in which the reasons come."""
    tally = Tally()
    for one in found:
        tally[one.what, one.why] += one.count
    return tuple(LeftOut(what=what, why=why, count=count) for (what, why), count in tally.items() if count)
