"""The fastest plans of a frontier, with chunks of equal cost, and the simplest plan that ties with one of them."""

import math
from dataclasses import replace

from sppo_jax.search.bodies import with_fewer_bodies
from sppo_jax.search.frontier import ALL, Filter, Frontier, Tried
from sppo_jax.search.space import Candidate, equal_cost_partitions

# Steps whose predicted seconds differ by less are ties: the prediction does not tell them apart.
TIE = 0.005
# How many simpler candidates are bounded, and how many of these are simulated, to find one that ties with the fastest.
_TIES_BOUNDED, _TIES_TRIED = 128, 6
# How many plans of equal cost may have to do with fewer tick shapes.
_FEWER_SHAPES_TRIED = 6


class Fastest:
    """The plans of a frontier that fit, fastest first.

    Chunks of equal cost come in late: with the layout and the places of each plan that would be next otherwise. Their
    bounds tell little, because such chunks hardly wait for each other, but pad and fill kernels' waves less well. On
    every layout they would take the search several times as long.
    """

    def __init__(self, frontier: Frontier) -> None:
        self.frontier = frontier
        self.lost_by_fewer_shapes_s: dict[int, float] = {}  # by `id` of the outcome
        self._reduced: list[Tried] = []  # those of equal cost, in as few tick shapes as their bodies ask for
        self._added: set[tuple] = set()

    def next(self, limit_s: float = math.inf, of: Filter = ALL) -> Tried | None:
        """Returns the next plan; None if none takes less than `limit_s`. Arguments as `Frontier.next`."""
        while (found := self.frontier.next(limit_s, of)) is not None:
            settled = self._settled(found)
            if settled is not None and settled is not found:
                self.frontier.keep(settled)
            elif settled is not None and not self._adds_equal_cost(found):
                return found
        return None

    def simplest_tie(self, fastest: Tried) -> Tried:
        """Returns the simplest plan that fits and ties with the fastest one; the fastest if none is simpler."""
        limit_s, own, frontier = fastest.step_s * (1 + TIE), fastest.candidate.complexity, self.frontier
        near = sorted(frontier.near(limit_s), key=lambda one: (one[1].complexity, one[0]))
        num_tried = 0
        for bound, candidate, known in near[:_TIES_BOUNDED]:
            if candidate.complexity >= own or num_tried == _TIES_TRIED:
                break
            ways = [(bound, candidate)] if known is not None or candidate.kv else self._bounded(candidate)
            for least_s, way in sorted(ways, key=lambda one: one[1].complexity):
                if least_s > limit_s or way.complexity >= own:
                    continue
                num_tried += known is None
                tied = self._settled(known or self._fitting(way))
                if tied is not None and tied.step_s <= limit_s:
                    frontier.keep(fastest)
                    return tied
        return fastest

    def next_best(self, fastest: Tried, count: int, of: Filter = ALL) -> list[Tried]:
        """Returns up to `count` plans that come next after the fastest one, in this order."""
        found: list[Tried] = []
        while len(found) < count and (tried := self.next(of=of)) is not None:
            found.append(tried)
        for tried in found:
            self.frontier.keep(tried)
        return [tried for tried in found if tried.outcome is not fastest.outcome]

    def _bounded(self, candidate: Candidate) -> list[tuple[float, Candidate]]:
        try:
            return self.frontier.bounded(candidate)
        except ValueError as error:
            self.frontier.errors.append(error)
            return []

    def _fitting(self, candidate: Candidate) -> Tried | None:
        sized = self.frontier.try_to_size(candidate)
        fits = sized is not None and sized.memory.fits(self.frontier.request.cluster)
        return self.frontier.try_to_simulate(candidate, sized) if fits else None

    def _adds_equal_cost(self, fastest: Tried) -> bool:
        """Brings in chunks of equal cost beside a plan; returns whether there are any, and brings it back then."""
        candidate, request = fastest.candidate, self.frontier.request
        layout, config = candidate.partition.layout, request.config
        key = layout, candidate.places, candidate.kv_grad_dtype
        given = request.table is not None or isinstance(config.sequence.chunks, tuple)
        # Each tick shape takes seconds to compile, and steps on CPUs are too few to earn these seconds back.
        on_cpus = request.cluster.device.platform == "cpu"
        asked = config.sequence.asked_balance != "auto"
        # Waves are another way to the same end, and one stage waits for no other.
        if key in self._added or given or on_cpus or asked or layout.mesh.pipe == 1 or candidate.partition.wave > 1:
            return False
        self._added.add(key)
        further = equal_cost_partitions(layout, candidate.partition.num_chunks)
        self.frontier.add(candidate._replace(partition=one, alpha=self.frontier.alpha, kv="") for one in further)
        self.frontier.keep(fastest)
        return True

    def _settled(self, tried: Tried | None) -> Tried | None:
        """Returns a plan, that of equal cost in as few tick shapes as its bodies ask for; None after a few of these."""
        config = self.frontier.request.config.sequence
        is_open = config.asked_balance == config.shapes == "auto"
        if tried is None or not is_open or tried.candidate.partition.balance != "cost":
            return tried
        if any(tried is one for one in self._reduced):
            return tried
        self.frontier.forget(tried)
        if len(self._reduced) == _FEWER_SHAPES_TRIED:
            return None
        fewer = with_fewer_bodies(tried.outcome)
        partition = replace(tried.candidate.partition, most_shapes=len(fewer.choice.shapes))
        self._reduced.append(Tried(tried.candidate._replace(partition=partition), fewer))
        self.frontier.tried.append(self._reduced[-1])
        if fewer is not tried.outcome:
            self.lost_by_fewer_shapes_s[id(fewer)] = fewer.step_s - tried.step_s
        return self._reduced[-1]
