"""What a finished search tells besides its best plan: other plans, the rivals of a choice, the smallest plan."""

import heapq
import math
from collections.abc import Callable, Hashable, Iterator
from itertools import islice
from typing import NamedTuple

from sppo_jax.planner.candidates import Candidate, Family
from sppo_jax.planner.evaluate import Outcome
from sppo_jax.planner.frontier import Frontier
from sppo_jax.planner.layouts import Layout

# Of the rejected plans, how many do not fit, so that slower ones that fit are shown too. How many choices are worked
# out to find either.
_MOST_TOO_LARGE, _TOO_LARGE_TRIED, _SLOWER_TRIED = 2, 6, 10
# Where nothing fits, how many of the least bounds of memory are worked out, and of those that were nearly chosen.
_LEAST_TRIED, _NEARLY_TRIED = 8, 2


def least(frontier: Frontier) -> Outcome:
    """Returns the outcome that is least too large, or that fits with most to spare.

    Raises:
        ValueError: no choice keeps the rules; the first error.
    """
    cluster, found = frontier.request.cluster, math.inf
    for excess, number in _smallest(frontier):
        # Those that follow are larger.
        if excess > found:
            break
        memory = frontier.try_to_size(number)
        found = min(found, memory.excess(cluster)) if memory else found
    if not frontier.sizes:
        raise frontier.errors[0]
    # Where the host's memory is short, the excess of all may be the same.
    return frontier.evaluate(min(frontier.sizes, key=lambda one: _by_size(frontier, one)))


def least_that_fits(frontier: Frontier) -> Outcome | None:
    """Returns the outcome of `least` if it fits, else None."""
    cluster = frontier.request.cluster
    sizes = {number: frontier.try_to_size(number) for excess, number in _smallest(frontier) if excess <= 0}
    fitting = [number for number, memory in sizes.items() if memory and memory.fits(cluster)]
    return frontier.evaluate(min(fitting, key=lambda one: _by_size(frontier, one))) if fitting else None


def _by_size(frontier: Frontier, number: int) -> tuple[float, int]:
    memory = frontier.sizes[number].memory
    return memory.excess(frontier.request.cluster), memory.hbm_bytes


def _smallest(frontier: Frontier) -> list[tuple[float, int]]:
    """Returns a few candidates that may be the smallest, each with the bound of its excess of memory.

    They are those that were least too large so far, and of each family the one of the shortest chunks, least bound of
    memory first.
    """
    smallest = []
    for family in frontier.families:
        excesses = [(frontier.rough_excess(group.example, family.places), group.numbers) for group in family.groups]
        excess = min(excesses)[0]
        numbers = [number for one, found in excesses if one == excess for number in found]
        smallest.append((excess, min((-frontier[number].partition.num_chunks, number) for number in numbers)))
    nearly = [number for _, number in heapq.nsmallest(_NEARLY_TRIED, frontier.nearly_fitting)]
    of_nearly = [(frontier.rough_excess(frontier[one].partition, frontier[one].places), one) for one in nearly]
    return of_nearly + [(excess, number) for excess, (_, number) in heapq.nsmallest(_LEAST_TRIED, smallest)]


def others(frontier: Frontier, best: Outcome, count: int) -> list[Outcome]:
    """Returns up to `count` outcomes of other kinds than the best one, fastest first.

    Some are faster ones that do not fit, those first that are least too large; where the best one does not fit, they
    are the next smallest, and few.

    Args:
        frontier: the search, over.
        best: what it found.
        count: the most outcomes.
    """
    seen = _Seen(frontier, best)
    found = _too_large(frontier, best, count, seen)
    return sorted(found + _slower(frontier, count - len(found), seen), key=lambda outcome: outcome.step_s)


class _Seen:
    """What kinds of plans were shown."""

    def __init__(self, frontier: Frontier, best: Outcome) -> None:
        self._frontier = frontier
        self.keys = {self._key_of(best, frontier.number_of(best))}

    def new(self, number: int) -> list[Outcome]:
        """Returns the outcome of a candidate of another kind than those before; none if it is of none."""
        key = self._frontier[number].key
        outcome = None if key in self.keys else self._frontier.try_to_evaluate(number)
        if outcome is None or self._key_of(outcome, number) in self.keys:
            return []
        self.keys |= {key, self._key_of(outcome, number)}
        return [outcome]

    def _key_of(self, outcome: Outcome, number: int) -> tuple:
        """Returns what makes a plan another one, where "host" counts as "keep" if nothing is sent there."""
        *besides, places = self._frontier[number].key
        if not outcome.memory.host:
            places = tuple("keep" if place == "host" else place for place in places)
        return *besides, places


def _too_large(frontier: Frontier, best: Outcome, count: int, seen: _Seen) -> list[Outcome]:
    """Returns a few outcomes that do not fit, least too large first; if the best one fits, those that are faster."""
    cluster = frontier.request.cluster
    fits = best.memory.fits(cluster)
    of = frontier.outcomes if fits else frontier.sizes
    known = ((one.memory.excess(cluster), number) for number, one in of.items())
    larger = sorted((excess, number) for excess, number in known if excess > 0)
    if fits:
        larger = list(islice(_faster_too_large(frontier, larger, best.step_s), _TOO_LARGE_TRIED))
    found: list[Outcome] = []
    for _, number in larger:
        if len(found) < min(count, _MOST_TOO_LARGE):
            found += [outcome for outcome in seen.new(number) if not fits or outcome.step_s < best.step_s]
    return found


def _faster_too_large(
    frontier: Frontier, simulated: list[tuple[float, int]], limit_s: float
) -> Iterator[tuple[float, int]]:
    """Yields candidates that do not fit, least too large first: simulated ones, and others that may be faster."""
    groups = sorted([(excess, [number]) for excess, number in simulated] + frontier.too_large)
    for excess, numbers in groups:
        for number in numbers:
            if number in frontier.outcomes or frontier.sampled_s(number) < limit_s:
                yield excess, number


def _slower(frontier: Frontier, count: int, seen: _Seen) -> list[Outcome]:
    """Returns the next fastest outcomes of other kinds than those seen, as far as few trials tell."""
    found: list[Outcome] = []
    # What is slower and too large too tells less: it fills up at most.
    spare: list[Outcome] = []
    tried: set[tuple] = set()
    most = _num_tried(frontier) + _SLOWER_TRIED
    while len(found) < count and _num_tried(frontier) < most and frontier.is_below(math.inf):
        number, is_next = frontier.lowest()
        key = frontier[number].key
        # Of plans with the same key, only one that fits is worked out.
        if key in seen.keys or (is_next and key in tried):
            frontier.pop()
            continue
        refined = frontier.refine()
        if is_next and frontier.fits(number):
            tried.add(key)
        if refined is not None:
            (found if frontier.fits(refined) else spare).extend(seen.new(refined))
    # Trials may end before a plan is proven the next fastest. The fastest plans tried then fill the rest.
    fitting = filter(frontier.fits, list(frontier.outcomes))
    for number in sorted(fitting, key=lambda number: frontier.outcomes[number].step_s):
        found += seen.new(number) if len(found) < count else []
    return found + spare[: count - len(found)]


def _num_tried(frontier: Frontier) -> int:
    """Returns how many choices were worked out so far, in full or as far as their least memory."""
    return len(frontier.outcomes) + len(frontier.nearly_fitting)


class Rivals(NamedTuple):
    """Choices of the lowest bounds that differ from the best one in something, with the bounds of their seconds.

    Attributes:
        slower: one that may fit.
        larger: one that would be faster than the best one and does not fit, nor does any other like it.
    """

    slower: tuple[Candidate, float] | None
    larger: tuple[Candidate, float] | None


def rivals(
    frontier: Frontier, best: Outcome, of: Callable[[Candidate], Hashable], alike: Callable[[Layout], Hashable]
) -> Rivals:
    """Returns the rivals of the best outcome in something.

    Args:
        frontier: the search, over.
        best: the chosen outcome.
        of: what they must differ in.
        alike: what their layouts must have in common.
    """
    chosen = frontier[frontier.number_of(best)]
    common, mine = alike(chosen.partition.layout), of(chosen)
    families = [family for family in frontier.families if alike(family.layout) == common]
    bounded = sorted(((frontier.family_s(family), at) for at, family in enumerate(families)))
    related = [(bound, families[at]) for bound, at in bounded]
    return Rivals(_slower_rival(frontier, related, of, mine), _larger_rival(frontier, related, of, best.step_s))


def _slower_rival(
    frontier: Frontier, related: list[tuple[float, Family]], of: Callable[[Candidate], Hashable], mine: Hashable
) -> tuple[Candidate, float] | None:
    """Returns the candidate of the lowest bound that differs from the best one and may fit."""
    lowest: list[tuple[float, int, bool]] = []  # bound, number, whether it is bounded from a few chunks
    following = [bound for bound, _ in related[1:]] + [math.inf]
    for (_, family), bound in zip(related, following, strict=True):
        for group in family.groups:
            if frontier.rough_excess(group.example, family.places) <= 0:
                differing = (one for one in group.numbers if of(frontier[one]) != mine and one not in frontier.unfit)
                lowest += [(frontier.least_s(number), number, False) for number in differing]
        heapq.heapify(lowest)
        while lowest and lowest[0][0] <= bound:
            found, number, sampled = heapq.heappop(lowest)
            if sampled:
                return frontier[number], found
            heapq.heappush(lowest, (frontier.sampled_s(number), number, True))
    return None


def _larger_rival(
    frontier: Frontier, related: list[tuple[float, Family]], of: Callable[[Candidate], Hashable], limit_s: float
) -> tuple[Candidate, float] | None:
    """Returns the candidate of the lowest bound that is faster and does not fit, nor does any other like it.

    Of those that are alike only the least too large one is considered.
    """
    nearest: dict[Hashable, tuple[float, int]] = {}
    fitting: set[Hashable] = set()
    for bound, family in related:
        if bound >= limit_s and fitting >= nearest.keys():
            break
        for group in family.groups:
            excess = frontier.rough_excess(group.example, family.places)
            for number in group.numbers:
                value = of(frontier[number])
                if excess <= 0 and number not in frontier.unfit:
                    fitting.add(value)
                elif bound < limit_s:
                    nearest[value] = min((excess, number), nearest.get(value, (math.inf, 0)))
    impossible = (number for value, (_, number) in nearest.items() if value not in fitting)
    least_s = ((frontier.sampled_s(number), number) for number in impossible)
    bound, number = min(least_s, default=(math.inf, 0))
    return (frontier[number], bound) if bound < limit_s else None
