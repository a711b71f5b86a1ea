"""How often the computations of a scheduled HLO text run."""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from sppo_jax.fit.hlo.text import inner_of

_NAMED = re.compile(r'op_name="([^"]*)"')


class Runs(NamedTuple):
    """The computations that mention a word, each with how often it runs.

    Attributes:
        times: the name of a computation, and its runs; a name may come again.
        unknown: loops of whose iterations neither the text nor the caller says anything; each counts as one iteration.
    """

    times: list[tuple[str, float]]
    unknown: int


def runs_of(computations: Mapping[str, Sequence[str]], entry: str, word: str, turn_shares: Mapping[str, float]) -> Runs:
    """Follows loops and conditionals from the entry.

    Args:
        computations, entry: of `computations_of`.
        word: a loop or a branch that does not mention it, at any depth, is left out.
        turn_shares: by the scope of loops of at most one iteration, the share of their runs with an iteration
            (`fit/turns.py`).
    """
    found: list[tuple[str, float]] = []
    todo, mentions, unknown = [(entry, 1.0)], _Mentions(computations, word), 0
    while todo:
        name, times = todo.pop()
        found.append((name, times))
        for line in computations[name]:
            for inner, trips in inner_of(line):
                if not mentions(inner):
                    continue
                iterations = _share_of(line, turn_shares) if trips is None else trips
                unknown += iterations is None
                todo.append((inner, times * (1 if iterations is None else iterations)))
    return Runs(found, unknown)


class _Mentions:
    def __init__(self, computations: Mapping[str, Sequence[str]], word: str):
        self._computations, self._word = computations, word
        self._known: dict[str, bool] = {}

    def __call__(self, name: str) -> bool:
        if name not in self._known:
            lines = self._computations[name]
            self._known[name] = any(
                self._word in line or any(self(inner) for inner, _ in inner_of(line)) for line in lines
            )
        return self._known[name]


def _share_of(line: str, turn_shares: Mapping[str, float]) -> float | None:
    """Returns the share of the runs of a loop that have an iteration; None if that is not known."""
    named = _NAMED.search(line)
    scopes = named.group(1).split("/") if named else []
    return next((share for scope, share in turn_shares.items() if scope in scopes), None)
