"""The fast planner: teams and their documents for one microbatch, in milliseconds, without a solver.

1. Every composition of the cluster gets the time that it would take with divisible documents (`compositions.py`).
2. The best compositions are filled, longest document first. Below a target time a document goes into the team whose
   tokens it fits best (best-fit decreasing); if no team ends by the target, into the team that then ends first.
   Targets close in on the fastest time, several at once.
3. In the fastest fillings, documents move out of the slowest team, or swap with others, until nothing gets faster.

Changes of degrees need no search of their own, since step 2 takes all compositions of up to 64 devices. The work is
limited by counts, never by a clock, and ties go to the lowest index, so every machine finds the same plan.

Suffixes: C rows (a composition with a target), D degrees, G teams of a row, K documents (longest first).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sppo_jax.flex.flexsp.blaster import blast, microbatch_counts
from sppo_jax.flex.flexsp.bucketing import MOST_TOKEN_ERROR, bucket, bucketed
from sppo_jax.flex.flexsp.compositions import compositions, fluid_times, least_work_ns
from sppo_jax.flex.flexsp.costs import TeamCosts
from sppo_jax.flex.flexsp.team_plan import TeamPlan, make_plan

# Rows of one filling times documents: one filling takes a few milliseconds.
FILL_BUDGET = 6000
NUM_TARGETS = 4
NUM_ROUNDS = 2
NUM_IMPROVED = 4
NUM_STEPS = 60
NUM_COUNTS_PLANNED = 2
# Targets are tried while the best filling is slower than the estimate by more than one part in this.
CLOSE = 500
_NEVER = 1 << 61
_BEYOND_TARGET = float(1 << 52)


def plan_teams(lengths: np.ndarray, costs: TeamCosts, *, num_buckets: int | None = None) -> TeamPlan | None:
    """Plans one microbatch.

    Args:
        lengths: tokens of each document, int64 [documents], at least one.
        costs: times and limits.
        num_buckets: plan as if each document were as long as its bucket, as FlexSP does (16); None plans with the
            documents' own lengths. The time of the plan is that of the own lengths.

    Returns:
        The plan, or None if no plan was found that keeps the limits on tokens.
    """
    order = np.argsort(-lengths, kind="stable")
    lengths_K = lengths[order] if num_buckets is None else bucketed(lengths[order], num_buckets)
    times_KD = costs.times_KD(lengths_K)
    best = None
    for place_K, degree_G in _fillings(lengths_K, times_KD, costs):
        place_K = improve(place_K, lengths_K, times_KD, degree_G, costs)
        degrees = np.array(costs.degrees)[degree_G]
        plan = make_plan(lengths, costs, degrees, [order[place_K == team] for team in range(len(degrees))])
        best = plan if best is None or plan.time_ns < best.time_ns else best
    return best


def _fillings(lengths_K: np.ndarray, times_KD: np.ndarray, costs: TeamCosts) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns the fastest fillings: the team of each document [K] and the degree index of each team [G]."""
    counts_CD, tokens_D = compositions(costs.num_devices, costs.degrees), costs.tokens_D()
    fluid_C = fluid_times(counts_CD, lengths_K, times_KD, costs)
    rank = np.argsort(fluid_C, kind="stable")
    num_rows = max(NUM_TARGETS, FILL_BUDGET // len(lengths_K))
    degree_CG = _degree_indices(counts_CD[rank[:num_rows]])
    low = high = int(fluid_C[rank[0]])
    most = 2 * low
    kept: list[tuple[int, np.ndarray, np.ndarray]] = []
    for round_number in range(1 + NUM_ROUNDS):
        # The first round has the target 0, which no team meets: each document goes where it ends first.
        targets = [low + (high - low) * (2 * part + 1) // (2 * NUM_TARGETS) for part in range(NUM_TARGETS)]
        targets = targets if round_number else [0]
        rows_CG = np.tile(degree_CG[: num_rows // len(targets)], (len(targets), 1))
        target_C = np.repeat(targets, len(rows_CG) // len(targets))
        place_KC, time_C = _fill(lengths_K, times_KD, rows_CG, tokens_D, target_C)
        for row in np.argsort(time_C, kind="stable")[:NUM_IMPROVED].tolist():
            if time_C[row] < _NEVER:
                kept.append((int(time_C[row]), place_KC[:, row], rows_CG[row]))
        high = min([most, *(time for time, _, _ in kept)])
        if high <= low + low // CLOSE:
            break
    kept.sort(key=lambda filling: filling[0])
    return [(place_K, degree_G) for _, place_K, degree_G in kept[:NUM_IMPROVED]]


def _degree_indices(counts_CD: np.ndarray) -> np.ndarray:
    """Returns the degree of each team by its index, largest first, [C, G]; -1 fills up rows with fewer teams."""
    rows = [np.repeat(np.arange(len(counts))[::-1], counts[::-1]) for counts in counts_CD]
    found = np.full((len(rows), max(map(len, rows))), -1, np.int64)
    for row, indices in enumerate(rows):
        found[row, : len(indices)] = indices
    return found


def _fill(
    lengths_K: np.ndarray, times_KD: np.ndarray, degree_CG: np.ndarray, tokens_D: np.ndarray, target_C: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Fills all rows at once, see step 2 above.

    Returns:
        The team of each document, int64 [K, C], and the nanoseconds of each row, int64 [C]; at least `_NEVER` where a
        document fits nowhere.
    """
    rooms_CG = np.where(degree_CG >= 0, tokens_D[degree_CG], -1)
    share_CG = 1.0 / np.maximum(rooms_CG, 1)
    loads_CG = np.zeros_like(rooms_CG)
    place_KC = np.zeros((len(lengths_K), len(degree_CG)), np.int64)
    rows = np.arange(len(degree_CG))
    for number, (length, times_D) in enumerate(zip(lengths_K.tolist(), times_KD, strict=True)):
        after_CG = loads_CG + times_D[degree_CG]
        left_CG = rooms_CG - length
        key_CG = np.where(after_CG <= target_C[:, None], left_CG * share_CG, after_CG + _BEYOND_TARGET)
        key_CG[left_CG < 0] = np.inf
        team_C = key_CG.argmin(axis=1)
        fits_C = left_CG[rows, team_C] >= 0
        loads_CG[rows, team_C] = np.where(fits_C, after_CG[rows, team_C], _NEVER)
        rooms_CG[rows, team_C] = left_CG[rows, team_C]
        place_KC[number] = team_C
    return place_KC, loads_CG.max(axis=1)


def improve(
    place_K: np.ndarray, lengths_K: np.ndarray, times_KD: np.ndarray, degree_G: np.ndarray, costs: TeamCosts
) -> np.ndarray:
    """Moves documents out of the slowest team, or swaps them, at most `NUM_STEPS` times.

    Args:
        place_K: team of each document.
        lengths_K: tokens.
        times_KD: see `TeamCosts.times_KD`.
        degree_G: index of each team's degree; -1 where there is no team.
        costs: the costs.

    Returns:
        The team of each document afterwards, int64 [K]; never slower.
    """
    num = len(degree_G)
    place_K = place_K.copy()
    times_KG = np.where(degree_G >= 0, times_KD[:, degree_G], _NEVER)
    rooms_G = np.where(degree_G >= 0, costs.tokens_D()[degree_G], -1)
    rooms_G = rooms_G - np.bincount(place_K, weights=lengths_K, minlength=num).astype(np.int64)
    own_K = times_KG[np.arange(len(place_K)), place_K]
    loads_G = np.zeros(num, np.int64)
    np.add.at(loads_G, place_K, own_K)
    state = _State(place_K, lengths_K, times_KG, rooms_G, own_K, loads_G)
    for _ in range(NUM_STEPS):
        if not (state.move() or state.swap()):
            break
    return state.place_K


@dataclass(kw_only=False)
class _State:
    """Where documents are, and what each team takes."""

    place_K: np.ndarray
    lengths_K: np.ndarray
    times_KG: np.ndarray
    rooms_G: np.ndarray
    own_K: np.ndarray
    loads_G: np.ndarray

    def move(self) -> bool:
        """Moves the document out of the slowest team after which the two teams end first; returns whether it did."""
        slow = int(self.loads_G.argmax())
        (inside,) = np.nonzero(self.place_K == slow)
        left = self.loads_G[slow] - self.own_K[inside]
        ends = np.maximum(self.loads_G + self.times_KG[inside], left[:, None])
        ends[self.lengths_K[inside][:, None] > self.rooms_G] = _NEVER
        ends[:, slow] = _NEVER
        best = int(ends.argmin())
        if ends.flat[best] >= self.loads_G[slow]:
            return False
        self._put(int(inside[best // ends.shape[1]]), best % ends.shape[1])
        return True

    def swap(self) -> bool:
        """Swaps a document of the slowest team so that the two teams end first; returns whether it did."""
        slow = int(self.loads_G.argmax())
        (inside,), (others,) = np.nonzero(self.place_K == slow), np.nonzero(self.place_K != slow)
        if not len(others):
            return False
        teams = self.place_K[others]
        here = self.loads_G[slow] - self.own_K[inside][:, None] + self.times_KG[others, slow]
        there = (self.loads_G[teams] - self.own_K[others]) + self.times_KG[inside][:, teams]
        ends = np.maximum(here, there)
        grows = self.lengths_K[inside][:, None] - self.lengths_K[others]
        ends[(grows > self.rooms_G[teams]) | (-grows > self.rooms_G[slow])] = _NEVER
        best = int(ends.argmin())
        if ends.flat[best] >= self.loads_G[slow]:
            return False
        first, second = int(inside[best // len(others)]), int(others[best % len(others)])
        team = int(self.place_K[second])
        self._put(first, team)
        self._put(second, slow)
        return True

    def _put(self, number: int, team: int) -> None:
        before = self.place_K[number]
        self.rooms_G[before] += self.lengths_K[number]
        self.loads_G[before] -= self.own_K[number]
        self.place_K[number], self.own_K[number] = team, self.times_KG[number, team]
        self.rooms_G[team] -= self.lengths_K[number]
        self.loads_G[team] += self.own_K[number]


@dataclass(frozen=True, kw_only=True)
class _Option:
    """A number of microbatches.

    Args:
        microbatches: the documents of each.
        estimates: nanoseconds of each with divisible documents.
        token_error: the largest share of tokens that the buckets add to one of them.
    """

    microbatches: list[np.ndarray]
    estimates: list[int]
    token_error: float

    @property
    def total_ns(self) -> int:
        """Nanoseconds of all microbatches."""
        return sum(self.estimates)


def plan_batch(
    lengths: np.ndarray,
    costs: TeamCosts,
    *,
    num_buckets: int | None = None,
    most_token_error: float = MOST_TOKEN_ERROR,
) -> tuple[list[np.ndarray], list[TeamPlan]]:
    """Plans a global batch: microbatches by the blaster, for the number of microbatches that is fastest.

    FlexSP plans M_min .. M_min + 4 microbatches. Here these numbers are sorted by the time with divisible documents.
    Numbers are planned in this order until `NUM_COUNTS_PLANNED` are planned, or the estimate is no faster than a plan.
    A number is passed over if the buckets of one of its microbatches add too many tokens. Where all numbers are, or the
    others have no plan, the number with the smallest error that has a plan is taken. More microbatches are tried only
    if none of these numbers has a plan.

    Args:
        lengths: tokens of each document, int64 [documents], at least one.
        costs: times and limits.
        num_buckets: see `plan_teams`.
        most_token_error: the largest share of tokens that the buckets of a microbatch may add.

    Returns:
        The documents of each microbatch (indices into `lengths`) and their plans, whose documents are indices into the
        microbatch.

    Raises:
        ValueError: if a document is longer than the whole cluster holds.
    """
    if lengths.max() > costs.cluster_tokens:
        raise ValueError(
            f"a document must have at most {costs.cluster_tokens} tokens, which all devices together hold, got "
            f"{lengths.max()}; drop the document or use more devices"
        )
    counts = microbatch_counts(lengths, costs.cluster_tokens)
    options = _options(lengths, costs, counts, num_buckets, most_token_error)
    options.sort(key=lambda option: (max(option.token_error, most_token_error), option.total_ns))
    best: tuple[int, list[np.ndarray], list[TeamPlan]] | None = None
    num_planned = 0
    for option in options:
        passed_over = option.token_error > most_token_error
        if best and (passed_over or option.total_ns >= best[0] or num_planned == NUM_COUNTS_PLANNED):
            break
        plans = _plan_all(lengths, costs, option, best[0] if best else _NEVER, num_buckets)
        num_planned += 1
        if plans is not None:
            best = (sum(plan.time_ns for plan in plans), option.microbatches, plans)
    return best[1:] if best else _more_microbatches(lengths, costs, counts.stop)


def _options(
    lengths: np.ndarray, costs: TeamCosts, counts: range, num_buckets: int | None, most_token_error: float
) -> list[_Option]:
    """Returns the microbatches of each number, with the time that they would take and what their buckets add."""
    work_ns = least_work_ns(costs.times_KD(lengths), costs)
    options: list[_Option] = []
    fastest_ns = _NEVER
    for count, microbatches in zip(counts, blast(lengths, counts), strict=True):
        error = max(bucket(lengths[own], num_buckets).token_error for own in microbatches) if num_buckets else 0.0
        estimates = [work_ns // count + costs.fixed_ns] * count
        # The work alone is estimate enough where buckets add too much, or where an estimate that was made is shorter.
        if error <= most_token_error and sum(estimates) < fastest_ns:
            estimates = [estimate_ns(lengths[own], costs) for own in microbatches]
            fastest_ns = min(fastest_ns, sum(estimates))
        options.append(_Option(microbatches=microbatches, estimates=estimates, token_error=error))
    return options


def _more_microbatches(lengths: np.ndarray, costs: TeamCosts, least: int) -> tuple[list[np.ndarray], list[TeamPlan]]:
    """Plans the first number of microbatches that has a plan; as many as documents always have one."""
    for count in range(least, len(lengths) + 1):
        (microbatches,) = blast(lengths, [count])
        option = _Option(microbatches=microbatches, estimates=[0] * count, token_error=0.0)
        plans = _plan_all(lengths, costs, option, _NEVER, None)
        if plans is not None:
            return microbatches, plans
    raise AssertionError("a document that fits into the cluster has a plan of its own")


def estimate_ns(lengths: np.ndarray, costs: TeamCosts) -> int:
    """Returns the time of a microbatch with divisible documents, the best composition being taken."""
    lengths_K = -np.sort(-lengths)
    counts_CD = compositions(costs.num_devices, costs.degrees)
    return int(fluid_times(counts_CD, lengths_K, costs.times_KD(lengths_K), costs).min()) + costs.fixed_ns


def _plan_all(
    lengths: np.ndarray, costs: TeamCosts, option: _Option, limit_ns: int, num_buckets: int | None
) -> list[TeamPlan] | None:
    """Plans microbatches; None if one has no plan, or once all together cannot be faster than the limit."""
    plans, left_ns, spent_ns = [], option.total_ns, 0
    for own, estimate in zip(option.microbatches, option.estimates, strict=True):
        plan = plan_teams(lengths[own], costs, num_buckets=num_buckets)
        if plan is None:
            return None
        plans.append(plan)
        left_ns -= estimate
        spent_ns += plan.time_ns
        if spent_ns + left_ns >= limit_ns:
            return None
    return plans
