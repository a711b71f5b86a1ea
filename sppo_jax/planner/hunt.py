"""A best-first search through choices: bounds order them, simulation settles them."""

import heapq
import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from sppo_jax.planner.evaluate import Choice, Outcome, evaluate
from sppo_jax.planner.floors import Floors
from sppo_jax.planner.frames import Frame, frames, lengths_of
from sppo_jax.planner.request import Request
from sppo_jax.planner.stash import Places, place_options

# Of the rejected ones, how many may be faster ones that do not fit, so that slower ones are shown too; and how many
# choices are worked out to find either.
_MOST_TOO_LARGE, _TOO_LARGE_TRIED, _SLOWER_TRIED = 2, 6, 16
# Where nothing fits, how many of the least bounds of memory are worked out.
_LEAST_TRIED = 8


@dataclass(frozen=True, kw_only=True)
class Node:
    """A choice on its way: a frame of layout, schedule and chunk count, with places and a rule for alpha."""

    frame: Frame
    places: Places
    alpha: str | float | tuple[float, ...]

    @property
    def key(self) -> tuple:
        """What makes a plan another one to a reader."""
        layout = self.frame.layout
        return layout.mesh, layout.interleave, self.frame.num_chunks, self.places


class Hunt:
    """One best-first search, dK and dV in one dtype."""

    def __init__(self, request: Request, kv_grad_dtype: str) -> None:
        self.request, self.dtype = request, kv_grad_dtype
        self.floors = Floors(request, kv_grad_dtype)
        self.nodes: list[Node] = []
        self.too_large: list[tuple[float, float, int]] = []  # excess of the least memory, bound, node
        self.bounds: list[float] = []  # of each node, the least seconds of its step as far as it is refined
        self.unfit: set[int] = set()
        self.outcomes: dict[int, Outcome] = {}
        self.errors: list[ValueError] = []
        # bound, node, and how far it is refined: 0 a few chunks, 1 every chunk, 2 simulated
        self.heap: list[tuple[float, int, int]] = []
        for frame in frames(request):
            self._expand(frame)
        heapq.heapify(self.heap)

    def _expand(self, frame: Frame) -> None:
        asked = self.request.config.stash
        try:
            options = place_options(asked, frame.layout.layers)
        except ValueError as error:
            self.errors.append(error)
            return
        for places in options:
            bound, excess = self.floors.rough_step_s(frame, places), self.floors.rough_excess(frame, places)
            number = self._add(frame, places, "hidden" if asked.alpha == "auto" else asked.alpha, bound)
            if excess > 0:
                self._drop(number, excess)
            else:
                self.heap.append((bound, number, 0))

    def _add(self, frame: Frame, places: Places, alpha: str | float | tuple[float, ...], bound: float) -> int:
        self.nodes.append(Node(frame=frame, places=places, alpha=alpha))
        self.bounds.append(bound)
        return len(self.nodes) - 1

    def _drop(self, number: int, excess: float) -> None:
        self.unfit.add(number)
        self.too_large.append((excess, self.bounds[number], number))

    def best(self) -> Outcome | None:
        """Returns the fastest outcome that fits; None if none does."""
        while self.heap:
            number = self._refine()
            if number is None:
                continue
            if self.outcomes[number].memory.fits(self.request.cluster):
                return self.outcomes[number]
            self.unfit.add(number)
            self._send_more(number)
        return None

    def _send_more(self, number: int) -> None:
        """Considers to send to the host what does not hide too, where a choice that sends what hides is too large."""
        node, outcome = self.nodes[number], self.outcomes[number]
        if node.alpha == "hidden" and "host" in node.places[:2] and not outcome.all_away:
            more = self._add(node.frame, node.places, "all", outcome.step_s)
            heapq.heappush(self.heap, (outcome.step_s, more, 1))

    def _refine(self) -> int | None:
        """Refines the choice of the lowest bound; returns it if it stays the lowest and is simulated."""
        bound, number, level = heapq.heappop(self.heap)
        if level == 2:
            return number
        node = self.nodes[number]
        try:
            if level == 0:
                lengths = lengths_of(self.request, node.frame)
                excess = self.floors.excess(node.frame, lengths, node.places)
                bound = max(bound, self.floors.step_s(node.frame, lengths, node.places, node.alpha))
                self.bounds[number] = bound
                if excess > 0:
                    self._drop(number, excess)
                    return None
            else:
                self.bounds[number] = bound = self._evaluate(number).step_s
        except ValueError as error:
            self.errors.append(error)
            self.bounds[number] = math.inf
            return None
        heapq.heappush(self.heap, (bound, number, level + 1))
        return None

    def _evaluate(self, number: int) -> Outcome:
        if number not in self.outcomes:
            node = self.nodes[number]
            choice = Choice(
                layout=node.frame.layout,
                chunk_lengths=lengths_of(self.request, node.frame),
                schedule=node.frame.schedule,
                places=node.places,
                alpha=node.alpha,
                kv_grad_dtype=self.dtype,
            )
            self.outcomes[number] = evaluate(self.request, choice)
        return self.outcomes[number]

    def least(self) -> Outcome:
        """Returns the outcome that is least too large, or that fits with most to spare.

        Raises:
            ValueError: no choice keeps the rules; the first error.
        """
        for number in self._smallest()[:_LEAST_TRIED]:
            self._try(number)
        if not self.outcomes:
            raise self.errors[0]
        return min(self.outcomes.values(), key=lambda outcome: self.floors.excess_of(outcome.memory))

    def others(self, best: Outcome, count: int) -> list[Outcome]:
        """Returns up to `count` outcomes of other kinds than `best`, fastest first.

        Some are faster ones that do not fit, those first that are least too large; where `best` does not fit, all are.
        """
        fits = best.memory.fits(self.request.cluster)
        seen = {self._key_of(best, self._number_of(best))}
        found: list[Outcome] = []
        known = [(self.floors.excess_of(outcome.memory), number) for number, outcome in self.outcomes.items()]
        larger = sorted((excess, number) for excess, number in known if excess > 0)
        if fits:
            larger = sorted(larger + [(more, number) for more, bound, number in self.too_large if bound < best.step_s])
        for _, number in larger if not fits else larger[:_TOO_LARGE_TRIED]:
            if len(found) < (_MOST_TOO_LARGE if fits else count):
                other = self._other(number, seen)
                found += [outcome for outcome in other if not fits or outcome.step_s < best.step_s]
        # What is slower and too large too tells less: it fills up at most.
        spare: list[Outcome] = []
        most = len(self.outcomes) + _SLOWER_TRIED
        while self.heap and len(found) < count and len(self.outcomes) < most:
            if self.nodes[self.heap[0][1]].key in seen:
                heapq.heappop(self.heap)
                continue
            refined = self._refine()
            if refined is not None:
                fitting = self.outcomes[refined].memory.fits(self.request.cluster)
                (found if fitting else spare).extend(self._other(refined, seen))
        found += spare[: count - len(found)]
        return sorted(found, key=lambda outcome: outcome.step_s)

    def rival(
        self, best: Outcome, of: Callable[[Node], Hashable], alike: Callable[[Node], Hashable], *, fits: bool
    ) -> tuple[Node, float] | None:
        """Returns the choice of the lowest bound that differs from the best one in something, and the bound.

        Args:
            best: the chosen outcome.
            of: what they must differ in.
            alike: what they must have in common.
            fits: whether to look among those that may fit; else among those that would be faster and do not fit, nor
                does any other like them.
        """
        chosen = self.nodes[self._number_of(best)]
        common = alike(chosen)
        related = [(bound, number) for number, bound in enumerate(self.bounds) if alike(self.nodes[number]) == common]
        possible = {of(self.nodes[number]) for _, number in related if number not in self.unfit}
        if fits:
            among = possible - {of(chosen)}
            found = [item for item in related if item[1] not in self.unfit and of(self.nodes[item[1]]) in among]
        else:
            found = [item for item in related if item[0] < best.step_s and of(self.nodes[item[1]]) not in possible]
        bound, number = min(found, default=(math.inf, 0))
        return None if bound == math.inf else (self.nodes[number], bound)

    def _smallest(self) -> list[int]:
        """Returns of each layout and places the choice of the shortest chunks, least bound of memory first."""
        least: dict[tuple, tuple[float, int, int]] = {}
        for number, node in enumerate(self.nodes):
            key = node.frame.layout, node.places
            excess = self.floors.rough_excess(node.frame, node.places)
            value = excess, -node.frame.num_chunks, number
            least[key] = min(value, least.get(key, value))
        return [number for _, _, number in sorted(least.values())]

    def _try(self, number: int) -> Outcome | None:
        try:
            return self._evaluate(number)
        except ValueError as error:
            self.errors.append(error)
            return None

    def _other(self, number: int, seen: set[tuple]) -> list[Outcome]:
        outcome = None if self.nodes[number].key in seen else self._try(number)
        if outcome is None or self._key_of(outcome, number) in seen:
            return []
        seen |= {self.nodes[number].key, self._key_of(outcome, number)}
        return [outcome]

    def _key_of(self, outcome: Outcome, number: int) -> tuple:
        """Returns what makes a plan another one, where "host" counts as "keep" if nothing is sent there."""
        *others, places = self.nodes[number].key
        if not outcome.memory.host:
            places = tuple("keep" if place == "host" else place for place in places)
        return *others, places

    def _number_of(self, outcome: Outcome) -> int:
        return next(number for number, known in self.outcomes.items() if known is outcome)
