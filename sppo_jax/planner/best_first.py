"""A best-first search: lower bounds order the candidates, the simulated step settles them."""

import heapq
import math
from collections.abc import Callable, Hashable, Iterable
from dataclasses import replace
from itertools import islice

from sppo_jax.planner.bodies import with_fewer_bodies
from sppo_jax.planner.candidates import Candidate, Start, start_of
from sppo_jax.planner.evaluate import Choice, Outcome, evaluate, size
from sppo_jax.planner.layouts import Request
from sppo_jax.planner.partitions import Partition, equal_cost_partitions

# Steps whose predicted seconds differ by less are ties: the prediction does not tell them apart.
TIE = 0.005
# How many simpler candidates are bounded, and how many of these are simulated, to find one that ties with the fastest.
_TIES_BOUNDED, _TIES_TRIED = 64, 6
# Of the rejected ones, how many may be faster ones that do not fit, so that slower ones are shown too; and how many
# choices are worked out to find either.
_MOST_TOO_LARGE, _TOO_LARGE_TRIED, _SLOWER_TRIED = 2, 6, 10
# How many plans of equal cost may have to do with fewer tick shapes.
_FEWER_SHAPES_TRIED = 6
# Where nothing fits, how many of the least bounds of memory are worked out, and of those that were nearly chosen.
_LEAST_TRIED, _NEARLY_TRIED = 8, 2


class BestFirst:
    """One best-first search from all candidates of a request, dK and dV in one dtype."""

    def __init__(self, request: Request, kv_grad_dtype: str, start: Start) -> None:
        self.request, self.dtype = request, kv_grad_dtype
        self.lower_bounds = start.lower_bounds.with_dtype(kv_grad_dtype)
        self.candidates: list[Candidate] = []
        self.too_large: list[tuple[float, int]] = []  # excess of the least memory, candidate
        # Of each candidate, the least seconds of its step as far as it is refined; 0 where nothing is known yet.
        self.bounds: list[float] = []
        self._new: list[int] = []  # candidates that no search has met yet
        self.nearly_fitting: list[tuple[float, int]] = []  # excess of device memory at its least, candidate
        self._excesses: dict[tuple, float] = {}  # by what a candidate's rough excess depends on
        self._excess_of: dict[int, float] = {}
        self.unfit: set[int] = set()
        self.outcomes: dict[int, Outcome] = {}
        self.lost_by_fewer_shapes_s: dict[int, float] = {}  # of candidates with fewer tick shapes, for fewer bodies
        self.errors: list[ValueError] = []
        # bound, candidate, and how far it is refined: 0 a few chunks, 1 every chunk, 2 simulated
        self.heap: list[tuple[float, int, int]] = []
        self._add(start)

    def _add(self, start: Start) -> None:
        first = len(self.candidates)
        self.candidates += start.candidates
        self.bounds += [0.0] * len(start.candidates)
        self._new += range(first, len(self.candidates))

    def _meet_new(self, limit_s: float = math.inf) -> None:
        """Drops new candidates that are too large for sure, and bounds the seconds of the others.

        Those whose bound is not below a limit stay new: their memory is of no interest yet.
        """
        later = []
        for number in self._new:
            if limit_s < math.inf and self._least_s(number) >= limit_s:
                later.append(number)
                continue
            excess = self._rough_excess(number)
            if excess > 0:
                self._drop(number, excess)
            else:
                self.heap.append((self._least_s(number), number, 0))
        self._new = later
        heapq.heapify(self.heap)

    def _least_s(self, number: int) -> float:
        """Returns the least seconds of a candidate's step as far as these are known, at least roughly."""
        if not self.bounds[number]:
            candidate = self.candidates[number]
            self.bounds[number] = self.lower_bounds.rough_step_s(candidate.partition, candidate.places)
        return self.bounds[number]

    def _rough_excess(self, number: int) -> float:
        """Returns roughly by how much a candidate's least memory is too large; partitions of a layout share it."""
        if number not in self._excess_of:
            partition, places = self.candidates[number].partition, self.candidates[number].places
            held = partition.passes_groups_in_turn, partition.lets_chunks_wait, partition.num_chunks == 1
            key = partition.layout, partition.wave, held, partition.kv(places), places
            if key not in self._excesses:
                self._excesses[key] = self.lower_bounds.rough_excess(partition, places)
            self._excess_of[number] = self._excesses[key]
        return self._excess_of[number]

    def _may_fit(self, number: int) -> bool:
        """Returns whether nothing that is known so far says that a candidate does not fit."""
        return number not in self.unfit and self._rough_excess(number) <= 0

    def _drop(self, number: int, excess: float) -> None:
        self.unfit.add(number)
        self.too_large.append((excess, number))

    def best(self, limit_s: float = math.inf) -> Outcome | None:
        """Returns the fastest outcome that fits and takes less than `limit_s`; None if none does."""
        self._meet_new(limit_s)
        while self.heap and self.heap[0][0] < limit_s:
            number = self._refine()
            if number is None:
                continue
            if self.outcomes[number].memory.fits(self.request.cluster):
                return self.outcomes[number]
            self.unfit.add(number)
            self._send_more(number, self.outcomes[number].all_away, self.outcomes[number].step_s)
        return None

    def next_best(self, fastest: Outcome, count: int) -> list[Outcome]:
        """Returns up to `count` outcomes that fit and come next after the fastest one, in this order."""
        found: list[Outcome] = []
        while len(found) < count and (outcome := self.best()) is not None:
            found.append(outcome)
        for outcome in found:
            heapq.heappush(self.heap, (outcome.step_s, self._number_of(outcome), 2))
        return [outcome for outcome in found if outcome is not fastest]

    def with_equal_cost(self, fastest: Outcome) -> Outcome:
        """Returns the fastest outcome if chunks of equal cost are tried too, with its layout and places.

        Their bounds tell little: such chunks hardly wait for each other, but they pad and fill kernels' waves less
        well. On every layout they would take the search several times as long.

        Args:
            fastest: the fastest outcome with other chunks, from `best`.
        """
        choice, config = fastest.choice, self.request.config
        given = self.request.table is not None or isinstance(config.sequence.chunks, tuple)
        # Each tick shape takes seconds to compile, and steps on CPUs are too few to earn these seconds back.
        on_cpus = self.request.cluster.device.platform == "cpu"
        # Waves are another way to the same end.
        if given or on_cpus or config.sequence.balance != "auto" or choice.layout.mesh.pipe == 1 or choice.wave > 1:
            return fastest
        partitions_of_equal_cost = equal_cost_partitions(choice.layout, len(choice.chunk_lengths))
        self._add(start_of(self.request, partitions_of_equal_cost, [choice.places], self.lower_bounds))
        best = fastest
        for _ in range(_FEWER_SHAPES_TRIED):
            # What is found in all shapes may be slower in fewer than the next one.
            found = self.best(best.step_s)
            if found is None:
                break
            best = self._with_fewer_bodies(found, best, best.step_s)
        return best

    def _with_fewer_bodies(self, best: Outcome, other: Outcome, limit_s: float) -> Outcome:
        """Returns an outcome in as few tick shapes as its bodies ask for, or another if it then takes too long."""
        number = self._number_of(best)
        candidate = self.candidates[number]
        if candidate.partition.balance != "cost" or self.request.config.sequence.shapes != "auto":
            return best
        fewer = with_fewer_bodies(best)
        if fewer is best:
            return best
        partition = replace(candidate.partition, most_shapes=len(fewer.choice.shapes))
        self.candidates[number] = candidate._replace(partition=partition)
        self.bounds[number], self.outcomes[number] = fewer.step_s, fewer
        self.lost_by_fewer_shapes_s[number] = fewer.step_s - best.step_s
        return fewer if fewer.step_s <= limit_s else other

    def simplest_tie(self, fastest: Outcome) -> Outcome:
        """Returns the simplest outcome found that fits and ties with the fastest; the fastest if none is simpler."""
        number, limit_s, tried = self._number_of(fastest), fastest.step_s * (1 + TIE), 0
        own = self.candidates[number].complexity
        near = [other for bound, other, _ in self.heap if bound <= limit_s]
        simpler = sorted((self.candidates[other].complexity, self.bounds[other], other) for other in near)
        for complexity, _, other in simpler[:_TIES_BOUNDED]:
            if complexity >= own or tried == _TIES_TRIED:
                break
            if not self._may_tie(other, limit_s):
                continue
            tried += 1
            outcome = self._try(other)
            if outcome and not outcome.memory.fits(self.request.cluster):
                self.unfit.add(other)
            elif outcome and outcome.step_s <= limit_s:
                heapq.heappush(self.heap, (fastest.step_s, number, 2))
                return self._with_fewer_bodies(outcome, fastest, limit_s)
        return fastest

    def _may_tie(self, number: int, limit_s: float) -> bool:
        """Returns whether a candidate may fit and take at most so long, by its bounds from every chunk."""
        try:
            excess, least_s = self._bound(number)
        except ValueError:
            return False
        return excess <= 0 and least_s <= limit_s

    def _bound(self, number: int) -> tuple[float, float]:
        """Returns a candidate's bounds from every chunk: the excess of its least memory, and its least seconds."""
        candidate, bounds = self.candidates[number], self.lower_bounds
        excess = bounds.excess(candidate.partition, candidate.places)
        return excess, bounds.step_s(candidate.partition, candidate.places, candidate.alpha)

    def _send_more(self, number: int, all_away: bool, bound: float) -> None:
        """Considers to send to the host what does not hide too, where a choice that sends what hides is too large."""
        candidate = self.candidates[number]
        if candidate.alpha == "hidden" and "host" in candidate.places[:2] and not all_away:
            self.candidates.append(candidate._replace(alpha="all"))
            self.bounds.append(bound)
            heapq.heappush(self.heap, (bound, len(self.candidates) - 1, 1))

    def _refine(self) -> int | None:
        """Refines the choice of the lowest bound; returns it if it stays the lowest and is simulated."""
        bound, number, level = heapq.heappop(self.heap)
        if level == 2:
            return number
        try:
            if level == 0:
                excess, least_s = self._bound(number)
                self.bounds[number] = bound = max(bound, least_s)
                if excess > 0:
                    self._drop(number, excess)
                    return None
            else:
                if self._is_too_large(number):
                    return None
                self.bounds[number] = bound = self._evaluate(number).step_s
        except ValueError as error:
            self.errors.append(error)
            self.bounds[number] = math.inf
            return None
        heapq.heappush(self.heap, (bound, number, level + 1))
        return None

    def _is_too_large(self, number: int) -> bool:
        """Returns whether a candidate does not fit, before its step is simulated; if so, drops it."""
        if number in self.outcomes:
            return False
        sized = size(self._choice(number))
        excess = self.lower_bounds.excess_of(sized.memory)
        if excess > 0:
            self._drop(number, excess)
            self.nearly_fitting.append((excess, number))
            self._send_more(number, sized.all_away, self.bounds[number])
        return excess > 0

    def _choice(self, number: int) -> Choice:
        """Returns a candidate's choice, with keys and values in the way that takes the least memory."""
        candidate = self.candidates[number]
        return Choice(
            layout=candidate.partition.layout,
            chunk_lengths=candidate.partition.chunk_lengths,
            schedule=candidate.partition.schedule,
            places=candidate.places,
            alpha=candidate.alpha,
            kv_grad_dtype=self.dtype,
            wave=candidate.partition.wave,
            shapes=candidate.partition.shapes,
            kv=candidate.partition.kv(candidate.places)[-1],
            waiting=self.request.waiting,
        )

    def _evaluate(self, number: int) -> Outcome:
        if number not in self.outcomes:
            candidate, choice = self.candidates[number], self._choice(number)
            faster = candidate.partition.kv(candidate.places)[:-1]
            self.outcomes[number] = self._fitting(choice, candidate, faster) or evaluate(choice)
        return self.outcomes[number]

    def _fitting(self, choice: Choice, candidate: Candidate, faster: tuple[str, ...]) -> Outcome | None:
        """Returns the outcome of a choice with the first of some other ways of keys and values that fits, if any."""
        for kv in faster:
            if self.lower_bounds.excess(candidate.partition, candidate.places, kv) <= 0:
                outcome = evaluate(replace(choice, kv=kv))
                if outcome.memory.fits(self.request.cluster):
                    return outcome
        return None

    def least(self) -> Outcome:
        """Returns the outcome that is least too large, or that fits with most to spare.

        Raises:
            ValueError: no choice keeps the rules; the first error.
        """
        for number in self._smallest():
            self._try(number)
        if not self.outcomes:
            raise self.errors[0]
        # Where the host's memory is short, the excess of all may be the same.
        return min(
            self.outcomes.values(),
            key=lambda one: (self.lower_bounds.excess_of(one.memory), one.memory.hbm_bytes),
        )

    def least_excess(self) -> float:
        """Returns by which share of a memory the outcome of `least` is too large.

        Raises:
            ValueError: no choice keeps the rules; the first error.
        """
        least = math.inf
        for number in self._smallest():
            # Those that follow are larger.
            if self._rough_excess(number) >= least:
                break
            outcome = self._try(number)
            least = min(least, self.lower_bounds.excess_of(outcome.memory)) if outcome else least
        if not self.outcomes:
            raise self.errors[0]
        return min(self.lower_bounds.excess_of(outcome.memory) for outcome in self.outcomes.values())

    def least_that_fits(self) -> Outcome | None:
        """Returns the outcome of `least` if it fits, else None."""
        for number in self._smallest():
            if self._rough_excess(number) <= 0:
                self._try(number)
        fitting = [outcome for outcome in self.outcomes.values() if outcome.memory.fits(self.request.cluster)]
        return min(fitting, key=lambda outcome: self.lower_bounds.excess_of(outcome.memory), default=None)

    def others(self, best: Outcome, count: int) -> list[Outcome]:
        """Returns up to `count` outcomes of other kinds than `best`, fastest first.

        Some are faster ones that do not fit, those first that are least too large; where `best` does not fit, all are.
        """
        self._meet_new()
        fits = best.memory.fits(self.request.cluster)
        seen = {self._key_of(best, self._number_of(best))}
        found: list[Outcome] = []
        known = [(self.lower_bounds.excess_of(outcome.memory), number) for number, outcome in self.outcomes.items()]
        larger = sorted((excess, number) for excess, number in known if excess > 0)
        if fits:
            all_larger = sorted(larger + self.too_large)
            faster = (one for one in all_larger if one[1] in self.outcomes or self._least_s(one[1]) < best.step_s)
            larger = list(islice(faster, _TOO_LARGE_TRIED))
        for _, number in larger:
            if len(found) < (_MOST_TOO_LARGE if fits else count):
                other = self._other(number, seen)
                found += [outcome for outcome in other if not fits or outcome.step_s < best.step_s]
        found += self._slower(count - len(found), seen)
        return sorted(found, key=lambda outcome: outcome.step_s)

    def _slower(self, count: int, seen: set[tuple]) -> list[Outcome]:
        """Returns the next fastest outcomes of other kinds than those seen, as far as few trials tell."""
        found: list[Outcome] = []
        # What is slower and too large too tells less: it fills up at most.
        spare: list[Outcome] = []
        tried: set[tuple] = set()
        most = self._num_tried() + _SLOWER_TRIED
        while self.heap and len(found) < count and self._num_tried() < most:
            _, number, level = self.heap[0]
            key = self.candidates[number].key
            # Of plans with the same key, only one that fits is worked out.
            if key in seen or (level == 1 and key in tried):
                heapq.heappop(self.heap)
                continue
            refined = self._refine()
            if level == 1 and self._is_fitting(number):
                tried.add(key)
            if refined is not None:
                (found if self._is_fitting(refined) else spare).extend(self._other(refined, seen))
        # Trials may end before a plan is proven the next fastest. The fastest plans tried then fill the rest.
        fitting = [number for number in self.outcomes if self._is_fitting(number)]
        for number in sorted(fitting, key=lambda number: self.outcomes[number].step_s):
            found += self._other(number, seen) if len(found) < count else []
        return found + spare[: count - len(found)]

    def _num_tried(self) -> int:
        """Returns how many choices were worked out so far, in full or as far as their least memory."""
        return len(self.outcomes) + len(self.nearly_fitting)

    def _is_fitting(self, number: int) -> bool:
        return number in self.outcomes and self.outcomes[number].memory.fits(self.request.cluster)

    def rivals(
        self, best: Outcome, of: Callable[[Candidate], Hashable], alike: Callable[[Partition], Hashable]
    ) -> tuple[tuple[Candidate, float] | None, tuple[Candidate, float] | None]:
        """Returns the choices of the lowest bounds that differ from the best one in something, with their bounds.

        Args:
            best: the chosen outcome.
            of: what they must differ in.
            alike: what their partitions must have in common.

        Returns:
            One of those that may fit; and one that would be faster than the best one and does not fit, nor does any
            other like it. Of those that are alike only the least too large one is considered.
        """
        chosen = self.candidate_of(best)
        common, mine = alike(chosen.partition), of(chosen)
        related, partition, is_alike = [], None, False
        for number, candidate in enumerate(self.candidates):
            if candidate.partition is not partition:
                partition, is_alike = candidate.partition, alike(candidate.partition) == common
            if is_alike:
                related.append((number, of(candidate)))
        alike_in: dict[Hashable, list[int]] = {}
        for number, value in related:
            alike_in.setdefault(value, []).append(number)
        impossible = [numbers for numbers in alike_in.values() if not any(map(self._may_fit, numbers))]
        nearest = (min((self._rough_excess(number), number) for number in numbers) for numbers in impossible)
        faster = (number for _, number in nearest if self._least_s(number) < best.step_s)
        # By rising bounds, the first that may fit is the one.
        others = sorted((self.bounds[number], number) for number, value in related if value != mine)
        slower = next(([number] for bound, number in others if bound and self._may_fit(number)), [])
        return self._first(slower), self._first(faster)

    def _first(self, numbers: Iterable[int]) -> tuple[Candidate, float] | None:
        """Returns the candidate of the lowest bound with the bound, if there are any."""
        bound, number = min(((self._least_s(number), number) for number in numbers), default=(math.inf, 0))
        return None if bound == math.inf else (self.candidates[number], bound)

    def _smallest(self) -> list[int]:
        """Returns a few candidates that may be the smallest.

        They are those that were least too large so far, and of each layout and places the choice of the shortest
        chunks, least bound of memory first.
        """
        least: dict[tuple, tuple[float, int, int]] = {}
        for number, candidate in enumerate(self.candidates):
            key = candidate.partition.layout, candidate.places
            value = self._rough_excess(number), -candidate.partition.num_chunks, number
            least[key] = min(value, least.get(key, value))
        nearly = [number for _, number in sorted(self.nearly_fitting)[:_NEARLY_TRIED]]
        return nearly + [number for _, _, number in sorted(least.values())[:_LEAST_TRIED]]

    def _try(self, number: int) -> Outcome | None:
        try:
            return self._evaluate(number)
        except ValueError as error:
            self.errors.append(error)
            return None

    def _other(self, number: int, seen: set[tuple]) -> list[Outcome]:
        outcome = None if self.candidates[number].key in seen else self._try(number)
        if outcome is None or self._key_of(outcome, number) in seen:
            return []
        seen |= {self.candidates[number].key, self._key_of(outcome, number)}
        return [outcome]

    def _key_of(self, outcome: Outcome, number: int) -> tuple:
        """Returns what makes a plan another one, where "host" counts as "keep" if nothing is sent there."""
        *others, places = self.candidates[number].key
        if not outcome.memory.host:
            places = tuple("keep" if place == "host" else place for place in places)
        return *others, places

    def lost_by_fewer_shapes(self, outcome: Outcome) -> float | None:
        """Returns the seconds that an outcome loses by tick shapes left out for fewer bodies; None if it has all."""
        return self.lost_by_fewer_shapes_s.get(self._number_of(outcome))

    def candidate_of(self, outcome: Outcome) -> Candidate:
        """Returns the candidate whose outcome it is."""
        return self.candidates[self._number_of(outcome)]

    def _number_of(self, outcome: Outcome) -> int:
        return next(number for number, known in self.outcomes.items() if known is outcome)
