"""What a finished search tells besides its best plan: other plans, the rivals of a choice, the smallest plan."""

import heapq
import math
from collections.abc import Callable, Hashable, Iterator
from typing import NamedTuple

from sppo_jax.search.evaluate import Outcome, Sized, evaluate, outcome_of, size
from sppo_jax.search.frontier import Filter, Frontier, TooLarge, candidate_of
from sppo_jax.search.layouts import Layout
from sppo_jax.search.space import Candidate

# Of the rejected plans, how many do not fit, so that slower ones that fit are shown too. How many choices are worked
# out to find either.
_MOST_TOO_LARGE, _TOO_LARGE_TRIED, _SLOWER_TRIED = 2, 6, 10
# What is no difference, and how many rivals of a choice are simulated.
_SAME, _RIVALS_TRIED = 5e-4, 12
# Where nothing fits, how many of the least bounds of memory are worked out, and of those that were nearly chosen.
_LEAST_TRIED, _NEARLY_TRIED = 8, 2


def least(frontier: Frontier) -> Outcome:
    """Returns the plan that is least too large, or that fits with most to spare.

    Raises:
        ValueError: no choice keeps the rules; the first error.
    """
    sized = _smallest_sized(frontier)
    if not sized:
        raise frontier.errors[0]
    found = frontier.attempt(evaluate, _smallest_of(frontier, sized))
    if found is None:
        raise frontier.errors[-1]
    return found


def least_that_fits(frontier: Frontier) -> Outcome | None:
    """Returns the outcome of `least` if it fits, else None."""
    fitting = [one for one in _smallest_sized(frontier, most=0.0) if one.memory.fits(frontier.request.cluster)]
    return frontier.attempt(evaluate, _smallest_of(frontier, fitting)) if fitting else None


def _smallest_of(frontier: Frontier, sized: list[Sized]) -> Sized:
    # Where the host's memory is short, the excess of all may be the same.
    return min(sized, key=lambda one: (one.memory.excess(frontier.request.cluster), one.memory.hbm_bytes))


def _smallest_sized(frontier: Frontier, most: float = math.inf) -> list[Sized]:
    """Returns a few candidates that may be the smallest, with their memory.

    They are those that were least too large so far, and of each layout and places the one of the shortest chunks, least
    bound of memory first.

    Args:
        frontier: the search, over.
        most: the largest bound of the excess of memory.
    """
    cluster, found = frontier.request.cluster, math.inf
    nearly = heapq.nsmallest(_NEARLY_TRIED, frontier.sized, key=lambda one: one.memory.excess(cluster))
    sized = list(nearly)
    for excess, candidate in _smallest(frontier):
        # Those that follow are larger.
        if excess > min(found, most) or len(sized) == len(nearly) + _LEAST_TRIED:
            break
        one = frontier.attempt(size, candidate)
        if one is not None:
            sized.append(one)
            found = min(found, one.memory.excess(cluster))
    return sized


def _smallest(frontier: Frontier) -> Iterator[tuple[float, Candidate]]:
    """Yields the smallest candidate of each layout and places, least bound of memory first.

    Of equal bounds, the one of the most chunks comes first.
    """
    smallest = []
    for number, family in enumerate(frontier.families):
        bounds = [frontier.least_excess(one[0], family.places, family.kv_grad_dtype) for one in family.partitions]
        alike = [one for bound, one in zip(bounds, family.partitions, strict=True) if bound == min(bounds)]
        shortest = max((one for members in alike for one in members), key=lambda one: one.num_chunks)
        smallest.append((min(bounds), -shortest.num_chunks, number, shortest))
    for excess, _, number, partition in sorted(smallest, key=lambda one: one[:3]):
        family = frontier.families[number]
        kv = partition.kv(family.places)[-1]
        yield excess, Candidate(partition, family.places, frontier.alpha, family.kv_grad_dtype, kv)


def others(frontier: Frontier, best: Outcome, count: int, other: Outcome | None = None) -> list[Outcome]:
    """Returns up to `count` outcomes of other kinds than the best one, fastest first.

    Some are faster ones that do not fit, those first that are least too large; where the best one does not fit, they
    are the next smallest, and few.

    Args:
        frontier: the search, over.
        best: what it found.
        count: the most outcomes.
        other: one that is to be among them.
    """
    seen = _Seen(best)
    found = seen.new(other)
    found += _too_large(frontier, best, count - len(found), seen)
    return sorted(found + _slower(frontier, count - len(found), seen), key=lambda outcome: outcome.step_s)


class _Seen:
    """What kinds of plans were shown."""

    def __init__(self, best: Outcome) -> None:
        self.keys = _keys_of(best)

    def new(self, outcome: Outcome | None) -> list[Outcome]:
        """Returns an outcome of another kind than those before; none if it is of none."""
        if outcome is None or _keys_of(outcome) & self.keys:
            return []
        self.keys |= _keys_of(outcome)
        return [outcome]

    def is_new(self, candidate: Candidate) -> bool:
        """Returns whether a candidate is of another kind than those before."""
        return _key_of(candidate, candidate.places) not in self.keys


def _keys_of(outcome: Outcome) -> set[tuple]:
    """Returns what makes a plan another one; "host" counts as "keep" too if nothing is sent there."""
    candidate, places = outcome.candidate, outcome.candidate.places
    kept = tuple("keep" if place == "host" else place for place in places)
    return {_key_of(candidate, places), _key_of(candidate, places if outcome.memory.host else kept)}


def _key_of(candidate: Candidate, places: tuple[str, ...]) -> tuple:
    return candidate.layout.mesh, candidate.layout.interleave, candidate.partition.num_chunks, places


def _too_large(frontier: Frontier, best: Outcome, count: int, seen: _Seen) -> list[Outcome]:
    """Returns a few outcomes that do not fit, least too large first; if the best one fits, those that are faster."""
    fits = best.memory.fits(frontier.request.cluster)
    found: list[Outcome] = []
    num_tried = 0
    for candidate in _unfit(frontier, best.step_s if fits else None):
        if len(found) == min(count, _MOST_TOO_LARGE) or num_tried == _TOO_LARGE_TRIED:
            break
        if seen.is_new(candidate):
            num_tried += 1
            tried = frontier.attempt(outcome_of, candidate)
            if tried is not None and (not fits or tried.step_s < best.step_s):
                found += seen.new(tried)
    return found


def _unfit(frontier: Frontier, limit_s: float | None) -> Iterator[Candidate]:
    """Yields candidates that do not fit, least too large first; with a limit, those that may take less."""
    known = _sized(frontier) if limit_s is None else _sized(frontier) + frontier.too_large
    for family in sorted(known, key=lambda one: one.excess):
        for candidate in family.candidates():
            if limit_s is None or frontier.seconds.of_uncut(candidate.partition, candidate.places) < limit_s:
                yield candidate if candidate.kv else candidate._replace(kv=candidate.partition.kv(candidate.places)[-1])


def _sized(frontier: Frontier) -> list[TooLarge]:
    """Returns the candidates that turned out too large when their memory was worked out."""
    cluster = frontier.request.cluster
    return [TooLarge(one.memory.excess(cluster), one.candidate, (one.candidate.partition,)) for one in frontier.sized]


def _slower(frontier: Frontier, count: int, seen: _Seen) -> list[Outcome]:
    """Returns the next fastest outcomes of other kinds than those seen, as far as few trials tell."""
    found: list[Outcome] = []
    # What is slower and too large too tells less: it fills up at most.
    spare: list[Outcome] = []
    before = len(frontier.tried)
    others = Filter(candidate=seen.is_new)
    for _ in range(_SLOWER_TRIED):
        what = frontier.take(others)[1] if len(found) < count else None
        if what is None:
            break
        tried = what if isinstance(what, Outcome) else frontier.attempt(outcome_of, what)
        if tried is not None:
            (found if tried.memory.fits(frontier.request.cluster) else spare).extend(seen.new(tried))
    # Trials may end before a plan is proven the next fastest. The fastest plans tried then fill the rest.
    for tried in sorted(frontier.tried[:before], key=lambda one: one.step_s):
        found += seen.new(tried) if len(found) < count else []
    return found + spare[: count - len(found)]


class Rival(NamedTuple):
    """A choice that differs from the best one in something.

    Attributes:
        candidate: the choice.
        step_s: seconds of its step, or a bound that they are not below.
        is_simulated: whether these are the seconds of its step.
    """

    candidate: Candidate
    step_s: float
    is_simulated: bool = False


class Kind(NamedTuple):
    """What a rival differs in.

    Attributes:
        of: what it differs in.
        alike: what its layout must have in common with the best one's.
        of_layout: whether layout and places alone tell what it differs in.
    """

    of: Callable[[Candidate], Hashable]
    alike: Callable[[Layout], Hashable]
    of_layout: bool


class Rivals(NamedTuple):
    """Choices of the lowest bounds that differ from the best one in something.

    Attributes:
        slower: one that may fit; it is simulated if its bound alone does not show that it is slower.
        larger: one that would be faster than the best one and does not fit, nor does any other like it.
    """

    slower: Rival | None
    larger: Rival | None


def rivals(frontier: Frontier, best: Outcome, kind: Kind) -> Rivals:
    """Returns the rivals of the best plan in something, the search being over."""
    common, mine = kind.alike(best.candidate.layout), kind.of(best.candidate)

    def is_alike(layout: Layout) -> bool:
        return kind.alike(layout) == common

    slower = _slower_rival(frontier, Filter(is_alike, lambda one: kind.of(one) != mine), best.step_s)
    return Rivals(slower, _larger_rival(frontier, best, kind, is_alike))


def _slower_rival(frontier: Frontier, of: Filter, best_s: float) -> Rival | None:
    """Returns the candidate of the lowest bound that may fit.

    One whose bound is below the best step is simulated: a bound alone would make it seem faster. After a few of these
    nothing is returned.
    """
    known = [one for one in frontier.tried if of.layout(one.candidate.layout) and of.candidate(one.candidate)]
    fastest = min(known, key=lambda one: one.step_s, default=None)
    for _ in range(_RIVALS_TRIED):
        bound, what = frontier.take(of)
        if what is None:
            break
        if isinstance(what, Candidate) and bound < best_s * (1 - _SAME):
            frontier.simulate(bound, what)  # comes back with its seconds if it fits
            continue
        frontier.push(bound, what)
        if fastest is None or bound < fastest.step_s:
            return Rival(candidate_of(what), bound, isinstance(what, Outcome))
        break
    else:
        return None
    return Rival(fastest.candidate, fastest.step_s, True) if fastest is not None else None


def _larger_rival(frontier: Frontier, best: Outcome, kind: Kind, is_alike: Callable[[Layout], bool]) -> Rival | None:
    """Returns the candidate of the lowest bound that is faster and does not fit, nor does any other like it.

    Of those that are alike only the least too large one is considered.
    """
    nearest: dict[Hashable, tuple[float, Candidate]] = {}
    for family in frontier.too_large + _sized(frontier):
        if is_alike(family.example.layout):
            for candidate in [family.example] if kind.of_layout else family.candidates():
                value = kind.of(candidate)
                if value not in nearest or family.excess < nearest[value][0]:
                    nearest[value] = family.excess, candidate
    for tried in [best, *frontier.tried]:
        if is_alike(tried.candidate.layout):
            nearest.pop(kind.of(tried.candidate), None)
    least_s = ((frontier.seconds.of_uncut(one.partition, one.places), value) for value, (_, one) in nearest.items())
    for bound, value in sorted(least_s, key=lambda one: one[0]):
        if bound >= best.step_s:
            break
        if all(kind.of(one) != value for one in frontier.that_may_fit(is_alike)):
            return Rival(nearest[value][1], bound)
    return None
