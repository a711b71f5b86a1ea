"""What a search knows of its candidates: families that are not open yet, bounds, and the steps simulated so far."""

import heapq
import math
from collections.abc import Iterable
from dataclasses import replace

from sppo_jax.planner.candidates import Candidate, Candidates, Family
from sppo_jax.planner.evaluate import Choice, Outcome, Sized, evaluate, size
from sppo_jax.planner.layouts import Request
from sppo_jax.planner.least_memory import LeastMemory
from sppo_jax.planner.lower_bounds import LowerBounds
from sppo_jax.planner.memory import Memory
from sppo_jax.planner.offload import Places
from sppo_jax.planner.partitions import Partition
from sppo_jax.planner.rough_bounds import RoughBounds
from sppo_jax.planner.unit_times import UnitTimes

# How far a candidate is refined: bounded from its uncut sequence, from a few chunks, from all chunks; simulated.
_UNCUT, _SAMPLED, _BOUNDED, _SIMULATED = range(4)


class Start:
    """The candidates of a request and bounds of their seconds, which do not depend on the dtype of dK and dV."""

    def __init__(self, request: Request) -> None:
        """Finds the candidates.

        Raises:
            ValueError: the config, the model and the devices allow none.
        """
        times = UnitTimes(request)
        self.request, self.candidates = request, Candidates(request)
        self.rough, self.exact = RoughBounds(request, times), LowerBounds(request, times)


class Frontier:
    """The candidates of a search, dK and dV in one dtype, by rising bounds of their seconds.

    Families of candidates open one after another, as their bounds come up. Candidates are bounded ever better, and in
    the end simulated, as long as they have the lowest bound.
    """

    def __init__(self, start: Start, kv_grad_dtype: str) -> None:
        self.request, self.dtype, self._start = start.request, kv_grad_dtype, start
        self.memory = LeastMemory(start.request, kv_grad_dtype)
        self.candidates: Candidates = start.candidates
        self.families = start.candidates.families
        # Least seconds of families that are not open, and their place in `families`.
        self._closed = [(self.family_s(family), at) for at, family in enumerate(self.families)]
        heapq.heapify(self._closed)
        # Bound, number, and how far the candidate is refined.
        self._heap: list[tuple[float, int, int]] = []
        self._bounds: dict[int, float] = {}  # as far as candidates are refined
        self._changed: dict[int, Candidate] = {}  # candidates that are not among those of the start
        self._num = len(start.candidates)
        self.too_large: list[tuple[float, list[int]]] = []  # excess of the least memory, candidates
        self.nearly_fitting: list[tuple[float, int]] = []  # excess of device memory at its least, candidate
        self.unfit: set[int] = set()
        self.sizes: dict[int, Sized] = {}  # with keys and values in the way that takes the least memory
        self.outcomes: dict[int, Outcome] = {}
        self.errors: list[ValueError] = []
        self._excesses: dict[tuple, float] = {}

    def __len__(self) -> int:
        return self._num

    def __getitem__(self, number: int) -> Candidate:
        return self._changed[number] if number in self._changed else self.candidates[number]

    def number_of(self, outcome: Outcome) -> int:
        """Returns the number of the candidate whose outcome it is."""
        return next(number for number, known in self.outcomes.items() if known is outcome)

    def family_s(self, family: Family) -> float:
        """Returns about the least seconds of a family's candidates."""
        return self._start.rough.layout_s(family.layout, family.places, family.counts, family.drains)

    def least_s(self, number: int) -> float:
        """Returns the least seconds of a candidate's step as far as these are known."""
        if number not in self._bounds:
            candidate = self[number]
            self._bounds[number] = self._start.rough.uncut_step_s(candidate.partition, candidate.places)
        return self._bounds[number]

    def sampled_s(self, number: int) -> float:
        """Returns the least seconds of a candidate's step, at least as they are known from a few chunks."""
        candidate = self[number]
        sampled_s = self._start.rough.sampled_step_s(candidate.partition, candidate.places)
        self._bounds[number] = max(self.least_s(number), sampled_s)
        return self._bounds[number]

    def bound(self, number: int) -> tuple[float, float]:
        """Returns a candidate's bounds from every chunk: the excess of its least memory, and its least seconds.

        Raises:
            ValueError: the sequence cannot be cut so.
        """
        candidate = self[number]
        excess = self.memory.of_partition(candidate.partition, candidate.places)
        return excess, self._start.exact.step_s(candidate.partition, candidate.places, candidate.alpha)

    def rough_excess(self, partition: Partition, places: Places) -> float:
        """Returns roughly by how much a candidate's least memory is too large; most partitions of a layout share it."""
        key = partition.layout, partition.holds, places
        if key not in self._excesses:
            self._excesses[key] = self.memory.of_layout(partition, places)
        return self._excesses[key]

    def fits(self, number: int) -> bool:
        """Returns whether a candidate is simulated and fits."""
        return number in self.outcomes and self.outcomes[number].memory.fits(self.request.cluster)

    def add(self, candidates: Iterable[Candidate]) -> None:
        """Takes in further candidates."""
        for candidate in candidates:
            number = self._append(candidate)
            excess = self.rough_excess(candidate.partition, candidate.places)
            if excess > 0:
                self._drop(number, excess)
            else:
                heapq.heappush(self._heap, (self.least_s(number), number, _UNCUT))

    def change(self, number: int, candidate: Candidate, outcome: Outcome) -> None:
        """Puts a candidate and its outcome in the place of another one."""
        self._changed[number], self.outcomes[number], self._bounds[number] = candidate, outcome, outcome.step_s

    def keep(self, outcome: Outcome) -> None:
        """Keeps an outcome that `next` returned, to be returned again."""
        heapq.heappush(self._heap, (outcome.step_s, self.number_of(outcome), _SIMULATED))

    def next(self, limit_s: float = math.inf) -> Outcome | None:
        """Returns the next fastest outcome that fits and takes less than `limit_s`; None if none does."""
        while self.is_below(limit_s):
            number = self.refine()
            if number is not None and self.fits(number):
                return self.outcomes[number]
        return None

    def is_below(self, limit_s: float) -> bool:
        """Opens the families whose turn it is; returns whether the lowest bound of a candidate is below a limit."""
        while self._closed and self._closed[0][0] < (min(limit_s, self._heap[0][0]) if self._heap else limit_s):
            self._open_next()
        return bool(self._heap) and self._heap[0][0] < limit_s

    def lowest(self) -> tuple[int, bool]:
        """Returns the candidate of the lowest bound, and whether it is bounded from all chunks and not simulated."""
        _, number, level = self._heap[0]
        return number, level == _BOUNDED

    def pop(self) -> None:
        """Leaves out the candidate of the lowest bound."""
        heapq.heappop(self._heap)

    def near(self, limit_s: float) -> list[int]:
        """Returns the candidates that may take at most so long and fit, as far as a few chunks tell."""
        while self._closed and self._closed[0][0] <= limit_s:
            self._open_next()
        return [number for bound, number, _ in self._heap if bound <= limit_s and self.sampled_s(number) <= limit_s]

    def refine(self) -> int | None:
        """Refines the candidate of the lowest bound; returns it if it is simulated.

        A candidate that does not fit is dropped, or one that holds less in device memory takes its place.
        """
        bound, number, level = heapq.heappop(self._heap)
        if level == _SIMULATED:
            if not self.fits(number):
                self.unfit.add(number)
                self._send_more(number, self.outcomes[number].all_away)
            return number
        try:
            if level == _UNCUT:
                bound = self.sampled_s(number)
            elif level == _SAMPLED:
                excess, least_s = self.bound(number)
                self._bounds[number] = bound = max(bound, least_s)
                if excess > 0:
                    self._drop(number, excess)
                    return None
            else:
                if self._is_too_large(number):
                    return None
                self._bounds[number] = bound = self.evaluate(number).step_s
        except ValueError as error:
            self.errors.append(error)
            self._bounds[number] = math.inf
            return None
        heapq.heappush(self._heap, (bound, number, level + 1))
        return None

    def evaluate(self, number: int) -> Outcome:
        """Returns the outcome of a candidate: with the fastest way of keys and values that fits, else the smallest.

        Raises:
            ValueError: the choice breaks a rule.
        """
        if number not in self.outcomes:
            choice, sized = self._choice(number), self._size(number)
            self.outcomes[number] = self._fitting(choice, number) or evaluate(choice, sized)
        return self.outcomes[number]

    def try_to_size(self, number: int) -> Memory | None:
        """Returns the least memory of a candidate without its step; None if it breaks a rule."""
        try:
            return self._size(number).memory
        except ValueError as error:
            self.errors.append(error)
            return None

    def try_to_evaluate(self, number: int) -> Outcome | None:
        """Returns the outcome of a candidate; None if it breaks a rule."""
        try:
            return self.evaluate(number)
        except ValueError as error:
            self.errors.append(error)
            return None

    def _open_next(self) -> None:
        """Drops the groups of the next family that are too large for sure, and bounds the seconds of the others."""
        family = self.families[heapq.heappop(self._closed)[1]]
        for group in family.groups:
            excess, numbers = self.rough_excess(group.example, family.places), group.numbers
            if excess > 0:
                self.too_large.append((excess, numbers))
                continue
            for number in numbers:
                heapq.heappush(self._heap, (self.least_s(number), number, _UNCUT))

    def _drop(self, number: int, excess: float) -> None:
        self.unfit.add(number)
        self.too_large.append((excess, [number]))

    def _append(self, candidate: Candidate) -> int:
        self._changed[self._num] = candidate
        self._num += 1
        return self._num - 1

    def _send_more(self, number: int, all_away: bool) -> None:
        """Considers to send to the host what does not hide too, where a choice that sends what hides is too large."""
        candidate = self[number]
        if candidate.alpha == "hidden" and "host" in candidate.places[:2] and not all_away:
            more = self._append(candidate._replace(alpha="all"))
            self._bounds[more] = self._bounds[number]
            heapq.heappush(self._heap, (self._bounds[more], more, _SAMPLED))

    def _is_too_large(self, number: int) -> bool:
        """Returns whether a candidate does not fit, before its step is simulated; if so, drops it."""
        if number in self.outcomes:
            return False
        sized = self._size(number)
        excess = sized.memory.excess(self.request.cluster)
        if excess > 0:
            self._drop(number, excess)
            self.nearly_fitting.append((excess, number))
            self._send_more(number, sized.all_away)
        return excess > 0

    def _choice(self, number: int) -> Choice:
        """Returns a candidate's choice, with keys and values in the way that takes the least memory."""
        candidate = self[number]
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

    def _size(self, number: int) -> Sized:
        if number not in self.sizes:
            self.sizes[number] = size(self._choice(number))
        return self.sizes[number]

    def _fitting(self, choice: Choice, number: int) -> Outcome | None:
        """Returns the outcome of a choice with the first of the other ways of keys and values that fits, if any."""
        partition, places, _ = self[number]
        for kv in partition.kv(places)[:-1]:
            if self.memory.of_partition(partition, places, kv) <= 0:
                outcome = evaluate(replace(choice, kv=kv))
                if outcome.memory.fits(self.request.cluster):
                    return outcome
        return None
