"""A best-first search: lower bounds order the candidates, the simulated step settles them."""

import math
from dataclasses import replace

from sppo_jax.planner.bodies import with_fewer_bodies
from sppo_jax.planner.candidates import Candidate
from sppo_jax.planner.evaluate import Outcome
from sppo_jax.planner.frontier import Frontier, Start
from sppo_jax.planner.partitions import equal_cost_partitions

# Steps whose predicted seconds differ by less are ties: the prediction does not tell them apart.
TIE = 0.005
# How many simpler candidates are bounded, and how many of these are simulated, to find one that ties with the fastest.
_TIES_BOUNDED, _TIES_TRIED = 64, 6
# How many plans of equal cost may have to do with fewer tick shapes.
_FEWER_SHAPES_TRIED = 6


class BestFirst:
    """One best-first search from all candidates of a request, dK and dV in one dtype."""

    def __init__(self, start: Start, kv_grad_dtype: str) -> None:
        self.request, self.frontier = start.request, Frontier(start, kv_grad_dtype)
        self.lost_by_fewer_shapes_s: dict[int, float] = {}  # of candidates with fewer tick shapes, for fewer bodies

    def best(self, limit_s: float = math.inf) -> Outcome | None:
        """Returns the fastest outcome that fits and takes less than `limit_s`; None if none does."""
        return self.frontier.next(limit_s)

    def next_best(self, fastest: Outcome, count: int) -> list[Outcome]:
        """Returns up to `count` outcomes that fit and come next after the fastest one, in this order."""
        found: list[Outcome] = []
        while len(found) < count and (outcome := self.best()) is not None:
            found.append(outcome)
        for outcome in found:
            self.frontier.keep(outcome)
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
        if (
            given
            or on_cpus
            or config.sequence.asked_balance != "auto"
            or choice.layout.mesh.pipe == 1
            or choice.wave > 1
        ):
            return fastest
        further = equal_cost_partitions(choice.layout, len(choice.chunk_lengths))
        alpha = self.frontier.candidates.alpha
        self.frontier.add(Candidate(partition, choice.places, alpha) for partition in further)
        best = fastest
        for _ in range(_FEWER_SHAPES_TRIED):
            # What is found in all shapes may be slower in fewer than the next one.
            found = self.best(best.step_s)
            if found is None:
                break
            best = self._with_fewer_bodies(found, best, best.step_s)
        return best

    def simplest_tie(self, fastest: Outcome) -> Outcome:
        """Returns the simplest outcome found that fits and ties with the fastest; the fastest if none is simpler."""
        limit_s, tried, frontier = fastest.step_s * (1 + TIE), 0, self.frontier
        own, near = self.candidate_of(fastest).complexity, frontier.near(limit_s)
        simpler = sorted((frontier[number].complexity, frontier.least_s(number), number) for number in near)
        for complexity, _, number in simpler[:_TIES_BOUNDED]:
            if complexity >= own or tried == _TIES_TRIED:
                break
            if not self._may_tie(number, limit_s):
                continue
            tried += 1
            outcome = frontier.try_to_evaluate(number)
            if outcome and not outcome.memory.fits(self.request.cluster):
                frontier.unfit.add(number)
            elif outcome and outcome.step_s <= limit_s:
                frontier.keep(fastest)
                return self._with_fewer_bodies(outcome, fastest, limit_s)
        return fastest

    def lost_by_fewer_shapes(self, outcome: Outcome) -> float | None:
        """Returns the seconds that an outcome loses by tick shapes left out for fewer bodies; None if it has all."""
        return self.lost_by_fewer_shapes_s.get(self.frontier.number_of(outcome))

    def candidate_of(self, outcome: Outcome) -> Candidate:
        """Returns the candidate whose outcome it is."""
        return self.frontier[self.frontier.number_of(outcome)]

    def _with_fewer_bodies(self, best: Outcome, other: Outcome, limit_s: float) -> Outcome:
        """Returns an outcome in as few tick shapes as its bodies ask for, or another if it then takes too long."""
        number = self.frontier.number_of(best)
        candidate = self.frontier[number]
        if candidate.partition.balance != "cost" or self.request.config.sequence.shapes != "auto":
            return best
        fewer = with_fewer_bodies(best)
        if fewer is best:
            return best
        partition = replace(candidate.partition, most_shapes=len(fewer.choice.shapes))
        self.frontier.change(number, candidate._replace(partition=partition), fewer)
        self.lost_by_fewer_shapes_s[number] = fewer.step_s - best.step_s
        return fewer if fewer.step_s <= limit_s else other

    def _may_tie(self, number: int, limit_s: float) -> bool:
        """Returns whether a candidate may fit and take at most so long, by its bounds from every chunk."""
        try:
            excess, least_s = self.frontier.bound(number)
        except ValueError:
            return False
        return excess <= 0 and least_s <= limit_s
