"""What a search knows: open candidates by rising bounds of their seconds, the fastest, and what became of others."""

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from sppo_jax.plan.parts import has_share
from sppo_jax.search.bounds.least_memory import LeastMemory
from sppo_jax.search.bounds.least_seconds import LeastSeconds, Span, span_of
from sppo_jax.search.evaluate import Outcome, Sized, evaluate, size
from sppo_jax.search.refine import with_fewer_bodies
from sppo_jax.search.space.layouts import Layout
from sppo_jax.search.space.offload import Places, place_options
from sppo_jax.search.space.partitions import Candidate, Partition, equal_cost_partitions, partitions
from sppo_jax.search.space.request import Request, Trial, Way

T = TypeVar("T")
# Steps whose predicted seconds differ by less are ties: the prediction does not tell them apart.
TIE = 0.005
# How many simpler candidates are bounded, and how many of these are simulated, to find one that ties with the fastest.
_TIES_BOUNDED, _TIES_TRIED = 128, 6
# How many plans of equal cost may have to do with fewer tick shapes.
_FEWER_SHAPES_TRIED = 6


class CandidateFamily(NamedTuple):
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
# What the heap holds, from least to most refined: a layout with places; a candidate bounded from its uncut sequence;
# one bounded from all of its chunks, whose way of keys and values is decided; one that was simulated and fits, for the
# mean sequence first, then for the documents.
Open = Candidate | Outcome
Item = CandidateFamily | Open


def candidate_of(what: Open) -> Candidate:
    """Returns a candidate, simulated or not."""
    return what.candidate if isinstance(what, Outcome) else what


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
        self.options = place_options(request.config)
        self.seconds = LeastSeconds(request)
        self.num_considered = 0
        self.families: list[CandidateFamily] = []
        self.too_large: list[TooLarge] = []
        self.sized: list[Sized] = []  # those that do not fit
        self.tried: list[Outcome] = []  # those that fit
        self.errors: list[ValueError] = []
        self._heap: list[tuple[float, int, Item]] = []
        self._pushed = 0
        self._memory: dict[tuple[Way, str], LeastMemory] = {}
        self._partitions: dict[Way, dict[Layout, list[Partition]]] = {}
        self._excesses: dict[tuple, float] = {}

    def first(self, sets: Iterable[Sequence[Trial]], find: Callable[[], T | None]) -> T | None:
        """Opens trials, a set at a time, until `find` finds something; None if it never does.

        Args:
            sets: of trials.
            find: looks among all candidates so far.

        Raises:
            ValueError: the settings leave no candidate; that none fits is no error.
        """
        for trials in sets:
            for trial in trials:
                try:
                    self.open(trial)
                except ValueError as error:  # no mesh keeps the rules this way
                    if not self.families:
                        raise
                    self.errors.append(error)
            if (found := find()) is not None:
                return found
            if not self.too_large and not self.sized:
                raise self.errors[0]
        return None

    def open(self, trial: Trial) -> None:
        """Brings in the layouts of a trial.

        Raises:
            ValueError: the config, the model and the devices allow none.
        """
        for layout, members in self._partitions_of(trial.way).items():
            alike: dict[tuple, list[Partition]] = {}
            for partition in members:
                alike.setdefault(partition.holds, []).append(partition)
            shared, span = tuple(tuple(one) for one in alike.values()), span_of(members)
            for places in self.options:
                family = CandidateFamily(layout, places, trial.kv_grad_dtype, shared)
                self.families.append(family)
                self.push(self.rank_of_layout(layout, places, span), family)
            self.num_considered += len(members) * len(self.options)

    def add(self, candidates: Iterable[Candidate]) -> None:
        """Brings in further candidates."""
        for candidate in candidates:
            self.num_considered += 1
            excess = self.least_excess(candidate.partition, candidate.places, candidate.kv_grad_dtype)
            if excess > 0:
                self._drop(excess, candidate)
            else:
                self.push(self.rank_of_uncut(candidate, excess), candidate)

    def rank_of_layout(self, layout: Layout, places: Places, span: Span) -> float:
        """Returns the place in the heap of a layout, see `LeastSeconds.of_layout`."""
        return self.seconds.of_layout(layout, places, span)

    def rank_of_uncut(self, candidate: Candidate, excess: float) -> float:
        """Returns the place of a candidate before its chunks are known; its least memory is over by `excess`."""
        return self.seconds.of_uncut(candidate.partition, candidate.places)

    def rank_of_chunks(self, candidate: Candidate, excess: float) -> float:
        """Returns the place of a candidate whose chunks and way of keys and values are known."""
        return self.seconds.of_partition(candidate.partition, candidate.places, candidate.alpha, candidate.kv)

    def push(self, bound: float, what: Item) -> None:
        """Brings something in, or back, with the least seconds of its step."""
        self._pushed += 1
        heapq.heappush(self._heap, (bound, self._pushed, what))

    def next(self, limit_s: float = math.inf, of: Filter = ALL) -> Outcome | None:
        """Takes out the fastest plan that fits; None if none takes less than `limit_s`. `push` brings it back.

        Args:
            limit_s: seconds.
            of: the candidates to consider.
        """
        return self._take(of, limit_s, lambda what: isinstance(what, Outcome))[1]

    def take(self, of: Filter) -> tuple[float, Open | None]:
        """Takes out the candidate of the lowest bound from all of its chunks; None if none is left.

        Returns:
            The bound, and the candidate, or its outcome if it is simulated. `push` brings it back.
        """
        return self._take(of, math.inf, lambda what: isinstance(what, Outcome) or bool(what.kv))

    def near(self, limit_s: float) -> list[tuple[float, Open]]:
        """Returns the candidates of bounds up to a limit, each with its bound, or its outcome if simulated."""
        closed = [item for item in self._heap if isinstance(item[2], CandidateFamily) and item[0] <= limit_s]
        taken = {item[1] for item in closed}
        self._heap = [item for item in self._heap if item[1] not in taken]
        heapq.heapify(self._heap)
        for bound, _, what in closed:
            self._refine(bound, what)
        return [
            (bound, what) for bound, _, what in self._heap if not isinstance(what, CandidateFamily) and bound <= limit_s
        ]

    def that_may_fit(self, of: Callable[[Layout], bool]) -> Iterator[Candidate]:
        """Yields the candidates of some layouts that are not refuted by their least memory."""
        for _, _, what in self._heap:
            if not isinstance(what, CandidateFamily):
                if of(candidate_of(what).layout):
                    yield candidate_of(what)
                continue
            for alike in what.partitions if of(what.layout) else ():
                if self.least_excess(alike[0], what.places, what.kv_grad_dtype) <= 0:
                    yield from self._candidates(what, alike)

    def bounded(self, candidate: Candidate) -> list[tuple[float, Candidate]]:
        """Returns a candidate in each way of keys and values that may fit, with the least seconds of its step."""
        partition, places = candidate.partition, candidate.places
        memory, found = self._memory_of(candidate.way, candidate.kv_grad_dtype), []
        for kv in (candidate.kv,) if candidate.kv else partition.kv(places):
            excess, decided = memory.of_partition(partition, places, kv), candidate._replace(kv=kv)
            if excess > 0:
                self._drop(excess, decided)
            else:
                found.append((self.rank_of_chunks(decided, excess), decided))
        return found

    def least_excess(self, partition: Partition, places: Places, kv_grad_dtype: str) -> float:
        """Returns by how much a candidate's least memory is too large, before its chunks are known."""
        key = partition.layout, partition.holds, places, kv_grad_dtype
        if key not in self._excesses:
            memory = self._memory_of(partition.layout.request.way, kv_grad_dtype)
            self._excesses[key] = memory.of_layout(partition, places)
        return self._excesses[key]

    def simulate(self, bound: float, candidate: Candidate) -> None:
        """Simulates a candidate and brings it back if it fits; else one that sends more to the host comes in its place.

        Args:
            bound: the least seconds of its step.
            candidate: the candidate; its way of keys and values is decided.

        Raises:
            ValueError: it breaks a rule.
        """
        sized = size(candidate)
        if sized.memory.fits(self.request.cluster):
            self.tried.append(evaluate(candidate, sized))
            self.push(self.tried[-1].least_s, self.tried[-1])
            return
        self.sized.append(sized)
        if candidate.alpha == "hidden" and has_share(candidate.places) and not sized.all_away:
            for least_s, more in self.bounded(candidate._replace(alpha="all")):
                self.push(max(bound, least_s), more)

    def next_by_rank(self, count: int) -> list[Candidate]:
        """Returns the first candidates of the heap, as far as layouts are open."""
        found = ((bound, number, what) for bound, number, what in self._heap if not isinstance(what, CandidateFamily))
        return [candidate_of(what) for _, _, what in heapq.nsmallest(count, found, key=lambda one: one[:2])]

    def any_that_fits(self) -> Outcome | None:
        """Refines what is on top of the heap until a plan fits, and returns it; None if none does."""
        while not self.tried and self._heap:
            bound, _, what = heapq.heappop(self._heap)
            self._refine(bound, what)
        return self.tried[0] if self.tried else None

    def attempt(self, work: Callable[..., T], *given: Any) -> T | None:
        """Returns what some work on a candidate gives; None if the candidate breaks a rule."""
        try:
            return work(*given)
        except ValueError as error:
            self.errors.append(error)
            return None

    def _refine(self, bound: float, what: Item) -> None:
        if isinstance(what, CandidateFamily):
            self.attempt(self._open, what)
        elif isinstance(what, Candidate) and what.kv:
            self.attempt(self.simulate, bound, what)
        elif isinstance(what, Candidate):
            for least_s, candidate in self.attempt(self.bounded, what) or ():
                self.push(max(bound, least_s), candidate)

    def _open(self, family: CandidateFamily) -> None:
        for alike in family.partitions:
            excess = self.least_excess(alike[0], family.places, family.kv_grad_dtype)
            candidates = self._candidates(family, alike)
            if excess > 0:
                self.too_large.append(TooLarge(excess, next(candidates), alike))
                continue
            for candidate in candidates:
                self.push(self.rank_of_uncut(candidate, excess), candidate)

    def _candidates(self, family: CandidateFamily, alike: tuple[Partition, ...]) -> Iterator[Candidate]:
        return (Candidate(one, family.places, self.alpha, family.kv_grad_dtype) for one in alike)

    def _drop(self, excess: float, candidate: Candidate) -> None:
        self.too_large.append(TooLarge(excess, candidate, (candidate.partition,)))

    def _take(self, of: Filter, limit_s: float, is_done: Callable[[Any], bool]) -> tuple[float, Any]:
        """Refines the candidate of the lowest bound until it is refined far enough, and takes it out; else None.

        With documents the mean sequence bounds a step, which is worked out for those alone that come out.
        """
        aside: list[tuple[float, int, Item]] = []
        found: tuple[float, Any] = math.inf, None
        while found[1] is None and self._heap and self._heap[0][0] < limit_s:
            item = heapq.heappop(self._heap)
            bound, _, what = item
            if not self._is_of(of, what):
                aside.append(item)
            elif isinstance(what, Outcome) and what.step_s > bound:
                self.push(what.step_s, what)
            elif not isinstance(what, CandidateFamily) and is_done(what):
                found = bound, what
            else:
                self._refine(bound, what)
        for item in aside:
            heapq.heappush(self._heap, item)
        return found

    def _is_of(self, of: Filter, what: Item) -> bool:
        if of is ALL:
            return True
        if isinstance(what, CandidateFamily):
            return of.layout(what.layout)
        candidate = candidate_of(what)
        return of.layout(candidate.layout) and of.candidate(candidate)

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


class Fastest:
    """The plans of a frontier that fit, fastest first.

    Chunks of equal cost come in late: with the layout and the places of each plan that would be next otherwise. Their
    bounds tell little, because such chunks hardly wait for each other, but pad and fill kernels' waves less well. On
    every layout they would take the search several times as long.
    """

    def __init__(self, request: Request) -> None:
        """Starts without candidates; `frontier.open` brings them in.

        Raises:
            ValueError: places of the stash are asked for that contradict each other.
        """
        self.frontier = Frontier(request)
        self.lost_by_fewer_shapes_s: dict[Partition, float] = {}
        self._reduced: list[Outcome] = []  # those of equal cost, in as few tick shapes as their bodies ask for
        self._added: set[tuple] = set()

    def next(self, limit_s: float = math.inf, of: Filter = ALL) -> Outcome | None:
        """Returns the next plan; None if none takes less than `limit_s`. Arguments as `Frontier.next`."""
        while (found := self.frontier.next(limit_s, of)) is not None:
            settled = self._settled(found)
            if settled is not None and settled is not found:
                self.keep(settled)
            elif settled is not None and not self._adds_equal_cost(found):
                return found
        return None

    def keep(self, outcome: Outcome) -> None:
        """Brings back what `next` returned."""
        self.frontier.push(outcome.step_s, outcome)

    def next_best(self, fastest: Outcome, count: int, of: Filter = ALL) -> list[Outcome]:
        """Returns up to `count` plans that come next after the fastest one, in this order."""
        found: list[Outcome] = []
        while len(found) < count and (outcome := self.next(of=of)) is not None:
            found.append(outcome)
        for outcome in found:
            self.keep(outcome)
        return [outcome for outcome in found if outcome is not fastest]

    def other_forms(self, known: Sequence[Outcome], count: int, of: Filter) -> list[Outcome]:
        """Returns the fastest plan of each of up to `count` forms that no known plan has, in this order.

        Plans of one form have one layout and one place of layer inputs.
        """

        def form(candidate: Candidate) -> tuple[Layout, str]:
            return candidate.layout, candidate.places[0]

        forms: set[tuple[Layout, str]] = {form(one.candidate) for one in known}
        found: list[Outcome] = []
        new = of._replace(candidate=lambda candidate: of.candidate(candidate) and form(candidate) not in forms)
        while len(found) < count and (outcome := self.next(of=new)) is not None:
            found.append(outcome)
            forms.add(form(outcome.candidate))
        for outcome in found:
            self.keep(outcome)
        return found

    def simplest_tie(self, fastest: Outcome) -> Outcome:
        """Returns the simplest plan that fits and ties with the fastest one; the fastest if none is simpler."""
        limit_s, own = fastest.step_s * (1 + TIE), fastest.candidate.complexity
        near = [(candidate_of(what).complexity, bound, what) for bound, what in self.frontier.near(limit_s)]
        num_tried = 0
        for simplicity, bound, what in sorted(near, key=lambda one: one[:2])[:_TIES_BOUNDED]:
            if simplicity >= own or num_tried == _TIES_TRIED:
                break
            for least_s, way in sorted(self._ways(bound, what), key=lambda one: candidate_of(one[1]).complexity):
                if least_s > limit_s or candidate_of(way).complexity >= own:
                    continue
                num_tried += isinstance(way, Candidate)
                tied = self._settled(self._fitting(way))
                if tied is not None and tied.step_s <= limit_s:
                    self.keep(fastest)
                    return tied
        return fastest

    def _ways(self, bound: float, what: Open) -> Sequence[tuple[float, Open]]:
        """Returns a candidate in each way of keys and values that may fit, or the one that is decided."""
        if isinstance(what, Outcome) or what.kv:
            return [(bound, what)]
        return self.frontier.attempt(self.frontier.bounded, what) or []

    def _fitting(self, what: Open) -> Outcome | None:
        if isinstance(what, Outcome):
            return what
        sized = self.frontier.attempt(size, what)
        if sized is None or not sized.memory.fits(self.frontier.request.cluster):
            return None
        return self.frontier.attempt(evaluate, what, sized)

    def _adds_equal_cost(self, fastest: Outcome) -> bool:
        """Brings in chunks of equal cost beside a plan; returns whether there are any, and brings it back then."""
        candidate, request = fastest.candidate, self.frontier.request
        layout, config = candidate.layout, request.config
        key = layout, candidate.places, candidate.kv_grad_dtype
        given = request.table is not None or isinstance(config.sequence.chunks, tuple)
        # Each tick shape takes seconds to compile, and steps on CPUs are too few to earn these seconds back.
        on_cpus = request.cluster.device.platform == "cpu"
        asked = config.sequence.asked_balance != "auto"
        # Waves are another way to the same end, and one stage waits for no other.
        if key in self._added or given or on_cpus or asked or layout.mesh.pipe == 1 or candidate.partition.wave > 1:
            return False
        self._added.add(key)
        self.keep(fastest)
        further = equal_cost_partitions(layout, candidate.partition.num_chunks)
        self.frontier.add(candidate._replace(partition=one, alpha=self.frontier.alpha, kv="") for one in further)
        return True

    def _settled(self, outcome: Outcome | None) -> Outcome | None:
        """Returns a plan, that of equal cost in as few tick shapes as its bodies ask for; None after a few of these."""
        config, frontier = self.frontier.request.config.sequence, self.frontier
        is_open = config.asked_balance == config.shapes == "auto"
        if outcome is None or not is_open or outcome.candidate.partition.balance != "cost":
            return outcome
        if any(outcome is one for one in self._reduced):
            return outcome
        frontier.tried = [one for one in frontier.tried if one is not outcome]
        if len(self._reduced) == _FEWER_SHAPES_TRIED:
            return None
        fewer = with_fewer_bodies(outcome)
        self._reduced.append(fewer)
        frontier.tried.append(fewer)
        if fewer is not outcome:
            self.lost_by_fewer_shapes_s[fewer.candidate.partition] = fewer.step_s - outcome.step_s
        return fewer
