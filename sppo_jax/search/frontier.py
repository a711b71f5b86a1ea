"""What a search knows: open candidates by rising bounds of their seconds, and what became of the others."""

import heapq
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from sppo_jax.search.evaluate import Choice, Outcome, Sized, evaluate, size
from sppo_jax.search.layouts import Layout
from sppo_jax.search.least_memory import LeastMemory
from sppo_jax.search.least_seconds import LeastSeconds
from sppo_jax.search.offload import Places, place_options
from sppo_jax.search.request import Request, Trial, Way
from sppo_jax.search.space import Candidate, Partition, partitions

# How far an item of the heap is refined: a layout with places; a candidate bounded from its uncut sequence, and from
# all of its chunks; a simulated candidate.
_LAYOUT, _UNCUT, _CHUNKS, _SIMULATED = range(4)


class Tried(NamedTuple):
    """A candidate that was simulated, and its outcome."""

    candidate: Candidate
    outcome: Outcome

    @property
    def step_s(self) -> float:
        """Seconds of the step."""
        return self.outcome.step_s


class Family(NamedTuple):
    """The candidates of a layout that share places, dtype, and their least memory as far as it is known.

    Attributes:
        layout: the layout.
        places: of the stash.
        kv_grad_dtype: in which dK and dV are summed.
        partitions: the partitions, those of the same least memory together.
    """

    layout: Layout
    places: Places
    kv_grad_dtype: str
    partitions: tuple[tuple[Partition, ...], ...]


class TooLarge(NamedTuple):
    """Candidates whose least memory is too much.

    Attributes:
        excess: by how much, as a share of the limit.
        example: one of them.
        partitions: their partitions; all else is the example's.
    """

    excess: float
    example: Candidate
    partitions: tuple[Partition, ...]

    def candidates(self) -> Iterator[Candidate]:
        """Yields all of them."""
        return (self.example._replace(partition=one) for one in self.partitions)


def _any(_: Any) -> bool:
    return True


class Filter(NamedTuple):
    """Which candidates are of interest.

    Attributes:
        layout: whether a layout may have some.
        candidate: whether a candidate is one.
    """

    layout: Callable[[Layout], bool] = _any
    candidate: Callable[[Candidate], bool] = _any


ALL = Filter()


class Frontier:
    """The candidates of a search by rising bounds of their seconds.

    An item of the heap is refined when its bound is the lowest: a layout opens into its candidates, a candidate is
    bounded from all of its chunks, then simulated. What is too large for sure leaves the heap.
    """

    def __init__(self, request: Request) -> None:
        """Starts without candidates; `open` brings them in.

        Raises:
            ValueError: places of the stash are asked for that contradict each other.
        """
        asked = request.config.stash.alpha
        self.request, self.alpha = request, "hidden" if asked == "auto" else asked
        self.options = place_options(request.config.stash)
        self.seconds = LeastSeconds(request)
        self.num_considered = 0
        self.families: list[Family] = []
        self.too_large: list[TooLarge] = []
        self.sized: list[tuple[Candidate, Sized]] = []  # those that do not fit
        self.tried: list[Tried] = []
        self.errors: list[ValueError] = []
        self._heap: list[tuple[float, int, int, Any]] = []
        self._pushed = 0
        self._memory: dict[tuple[Way, str], LeastMemory] = {}
        self._partitions: dict[Way, dict[Layout, list[Partition]]] = {}
        self._excesses: dict[tuple, float] = {}

    def open(self, trial: Trial) -> None:
        """Brings in the layouts of a trial.

        Raises:
            ValueError: the config, the model and the devices allow none.
        """
        for layout, members in self._partitions_of(trial.way).items():
            alike: dict[tuple, list[Partition]] = {}
            for partition in members:
                alike.setdefault(partition.holds, []).append(partition)
            # Of given chunks the first ones may be short, and then further ones add little.
            counts = [1 if one.balance == "given" else one.num_chunks for one in members]
            span, drains = (min(counts), max(counts)), min(one.drains for one in members)
            shared = tuple(tuple(one) for one in alike.values())
            for places in self.options:
                family = Family(layout, places, trial.kv_grad_dtype, shared)
                self.families.append(family)
                self._push(self.seconds.of_layout(layout, places, span, drains), _LAYOUT, family)
            self.num_considered += len(members) * len(self.options)

    def add(self, candidates: Iterable[Candidate]) -> None:
        """Brings in further candidates."""
        for candidate in candidates:
            self.num_considered += 1
            excess = self.least_excess(candidate.partition, candidate.places, candidate.kv_grad_dtype)
            if excess > 0:
                self._drop(excess, candidate)
            else:
                self._push(self.seconds.of_uncut(candidate.partition, candidate.places), _UNCUT, candidate)

    def keep(self, tried: Tried) -> None:
        """Brings back what `next` returned."""
        self._push(tried.step_s, _SIMULATED, tried)

    def forget(self, tried: Tried) -> None:
        """Leaves out a plan that `next` returned, because another one like it was kept."""
        self.tried = [one for one in self.tried if one is not tried]

    def next(self, limit_s: float = math.inf, of: Filter = ALL) -> Tried | None:
        """Returns the fastest plan that fits of those not returned yet; None if none takes less than `limit_s`.

        Args:
            limit_s: seconds.
            of: the candidates to consider.
        """
        return self._take(_SIMULATED, limit_s, of)

    def take(self, of: Filter) -> tuple[float, Candidate, Tried | None] | None:
        """Takes out the candidate of the lowest bound, with the bound and its outcome if it is simulated.

        None if no such candidate is left. `put_back` brings it back.
        """
        found = self._take(_CHUNKS, math.inf, of)
        if isinstance(found, Tried):
            return found.step_s, found.candidate, found
        return None if found is None else (*found, None)

    def put_back(self, bound: float, candidate: Candidate, tried: Tried | None) -> None:
        """Brings back what `take` returned."""
        self._push(bound, *((_CHUNKS, candidate) if tried is None else (_SIMULATED, tried)))

    def near(self, limit_s: float) -> list[tuple[float, Candidate, Tried | None]]:
        """Returns the candidates of bounds up to a limit, each with its bound, and its outcome if simulated."""
        closed = [item for item in self._heap if item[2] == _LAYOUT and item[0] <= limit_s]
        taken = {item[1] for item in closed}
        self._heap = [item for item in self._heap if item[1] not in taken]
        heapq.heapify(self._heap)
        for item in closed:
            self._refine(item)
        found = [item for item in self._heap if item[2] != _LAYOUT and item[0] <= limit_s]
        return [
            (bound, *((what.candidate, what) if level == _SIMULATED else (what, None)))
            for bound, _, level, what in found
        ]

    def that_may_fit(self, of: Callable[[Layout], bool]) -> Iterator[Candidate]:
        """Yields the candidates of some layouts that are not refuted by their least memory."""
        for _, _, level, what in self._heap:
            if level != _LAYOUT:
                candidate = what.candidate if level == _SIMULATED else what
                if of(candidate.partition.layout):
                    yield candidate
                continue
            for alike in what.partitions if of(what.layout) else ():
                if self.least_excess(alike[0], what.places, what.kv_grad_dtype) <= 0:
                    yield from self._candidates(what, alike)

    def bounded(self, candidate: Candidate) -> list[tuple[float, Candidate]]:
        """Returns a candidate in each way of keys and values that may fit, with the least seconds of its step."""
        partition, places = candidate.partition, candidate.places
        memory, found = self._memory_of(partition.layout.request.way, candidate.kv_grad_dtype), []
        for kv in (candidate.kv,) if candidate.kv else partition.kv(places):
            excess, way = memory.of_partition(partition, places, kv), candidate._replace(kv=kv)
            if excess > 0:
                self._drop(excess, way)
            else:
                found.append((self.seconds.of_partition(partition, places, candidate.alpha, kv), way))
        return found

    def least_excess(self, partition: Partition, places: Places, kv_grad_dtype: str) -> float:
        """Returns by how much a candidate's least memory is too large, before its chunks are known."""
        key = partition.layout, partition.holds, places, kv_grad_dtype
        if key not in self._excesses:
            memory = self._memory_of(partition.layout.request.way, kv_grad_dtype)
            self._excesses[key] = memory.of_layout(partition, places)
        return self._excesses[key]

    def try_to_size(self, candidate: Candidate) -> Sized | None:
        """Returns alpha and memory of a candidate; None if it breaks a rule."""
        try:
            return size(choice_of(candidate))
        except ValueError as error:
            self.errors.append(error)
            return None

    def try_to_simulate(self, candidate: Candidate, sized: Sized | None = None) -> Tried | None:
        """Returns a candidate with its outcome; None if it breaks a rule."""
        try:
            return Tried(candidate, evaluate(choice_of(candidate), sized))
        except ValueError as error:
            self.errors.append(error)
            return None

    def _push(self, bound: float, level: int, what: Any) -> None:
        self._pushed += 1
        heapq.heappush(self._heap, (bound, self._pushed, level, what))

    def _refine(self, item: tuple[float, int, int, Any]) -> None:
        bound, _, level, what = item
        try:
            if level == _LAYOUT:
                self._open(what)
            elif level == _UNCUT:
                for least_s, candidate in self.bounded(what):
                    self._push(max(bound, least_s), _CHUNKS, candidate)
            else:
                self.simulate(bound, what)
        except ValueError as error:
            self.errors.append(error)

    def _open(self, family: Family) -> None:
        for alike in family.partitions:
            excess = self.least_excess(alike[0], family.places, family.kv_grad_dtype)
            candidates = self._candidates(family, alike)
            if excess > 0:
                self.too_large.append(TooLarge(excess, next(candidates), alike))
                continue
            for candidate in candidates:
                self._push(self.seconds.of_uncut(candidate.partition, candidate.places), _UNCUT, candidate)

    def _candidates(self, family: Family, alike: tuple[Partition, ...]) -> Iterator[Candidate]:
        return (Candidate(one, family.places, self.alpha, family.kv_grad_dtype) for one in alike)

    def _drop(self, excess: float, candidate: Candidate) -> None:
        self.too_large.append(TooLarge(excess, candidate, (candidate.partition,)))

    def _take(self, least_level: int, limit_s: float, of: Filter) -> Any:
        """Refines the item of the lowest bound until it is refined far enough, and takes it out."""
        aside: list[tuple[float, int, int, Any]] = []
        found = None
        while found is None and self._heap and self._heap[0][0] < limit_s:
            item = heapq.heappop(self._heap)
            bound, _, level, what = item
            if not self._is_of(of, level, what):
                aside.append(item)
            elif level == _SIMULATED:
                found = what
            elif level >= least_level:
                found = bound, what
            else:
                self._refine(item)
        for item in aside:
            heapq.heappush(self._heap, item)
        return found

    def _is_of(self, of: Filter, level: int, what: Any) -> bool:
        if of is ALL:
            return True
        if level == _LAYOUT:
            return of.layout(what.layout)
        candidate = what.candidate if level == _SIMULATED else what
        return of.layout(candidate.partition.layout) and of.candidate(candidate)

    def simulate(self, bound: float, candidate: Candidate) -> None:
        """Simulates a candidate and brings it back if it fits; else one that sends more to the host comes in its place.

        Args:
            bound: the least seconds of its step.
            candidate: the candidate; its way of keys and values is decided.

        Raises:
            ValueError: it breaks a rule.
        """
        sized = size(choice_of(candidate))
        if sized.memory.fits(self.request.cluster):
            self.tried.append(Tried(candidate, evaluate(choice_of(candidate), sized)))
            self._push(self.tried[-1].step_s, _SIMULATED, self.tried[-1])
            return
        self.sized.append((candidate, sized))
        if candidate.alpha == "hidden" and "host" in candidate.places[:2] and not sized.all_away:
            for least_s, more in self.bounded(candidate._replace(alpha="all")):
                self._push(max(bound, least_s), _CHUNKS, more)

    def _memory_of(self, way: Way, kv_grad_dtype: str) -> LeastMemory:
        key = way, kv_grad_dtype
        if key not in self._memory:
            self._memory[key] = LeastMemory(replace(self.request, way=way), kv_grad_dtype)
        return self._memory[key]

    def _partitions_of(self, way: Way) -> dict[Layout, list[Partition]]:
        if way not in self._partitions:
            found: dict[Layout, list[Partition]] = {}
            for partition in partitions(replace(self.request, way=way)):
                # One device alone has its weights either way.
                alone = partition.layout.mesh.data * partition.layout.mesh.seq == 1
                if way.weights == "gathered" or not alone:
                    found.setdefault(partition.layout, []).append(partition)
            self._partitions[way] = found
        return self._partitions[way]


def choice_of(candidate: Candidate) -> Choice:
    """Returns the choice of a candidate."""
    partition = candidate.partition
    return Choice(
        layout=partition.layout,
        chunk_lengths=partition.chunk_lengths,
        schedule=partition.schedule,
        places=candidate.places,
        alpha=candidate.alpha,
        kv_grad_dtype=candidate.kv_grad_dtype,
        wave=partition.wave,
        shapes=partition.shapes,
        kv=candidate.kv or partition.kv(candidate.places)[-1],
        waiting=partition.layout.request.waiting,
    )
