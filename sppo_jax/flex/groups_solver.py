"""The fast planner: groups and their documents for one microbatch, in milliseconds, without a solver.

1. Every composition of the cluster gets the time that it would take with divisible documents (`compositions.py`).
2. The best compositions are filled: the longest document first, each into the group that then ends first.
3. In the best of these, documents move out of the slowest group, or swap with others, until nothing gets faster.

Times are whole nanoseconds and ties go to the lowest index, so every machine finds the same plan.

Suffixes: C compositions, D degrees, G groups of a composition, K documents (longest first).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sppo_jax.flex.blaster import blast, microbatch_counts
from sppo_jax.flex.compositions import compositions, fluid_times
from sppo_jax.flex.flexsp_costs import GroupCosts
from sppo_jax.flex.groups_plan import GroupPlan, make_plan

NUM_FILLED = 16
NUM_IMPROVED = 4
NUM_STEPS = 60
_NEVER = 1 << 61


def plan_groups(lengths: np.ndarray, costs: GroupCosts) -> GroupPlan | None:
    """Plans one microbatch.

    Args:
        lengths: tokens of each document, int64 [documents], at least one.
        costs: times and limits.

    Returns:
        The plan, or None if no plan was found that keeps the limits on tokens.
    """
    order = np.argsort(-lengths, kind="stable")
    lengths_K = lengths[order]
    times_KD = costs.times_KD(lengths_K)
    counts_CD = compositions(costs.num_devices, costs.degrees)
    rank = np.argsort(fluid_times(counts_CD, lengths_K, times_KD, costs), kind="stable")[:NUM_FILLED]
    degree_CG = _degree_indices(counts_CD[rank])
    place_KC, loads_CG = _fill(lengths_K, times_KD, degree_CG, costs.tokens_D())
    best = None
    for row in np.argsort(loads_CG.max(axis=1), kind="stable")[:NUM_IMPROVED].tolist():
        if loads_CG[row].max() >= _NEVER:
            break
        place_K = improve(place_KC[:, row], lengths_K, times_KD, degree_CG[row], costs)
        degrees = np.array(costs.degrees)[degree_CG[row]]
        plan = make_plan(lengths, costs, degrees, [order[place_K == group] for group in range(len(degrees))])
        best = plan if best is None or plan.time_ns < best.time_ns else best
    return best


def _degree_indices(counts_CD: np.ndarray) -> np.ndarray:
    """Returns the degree of each group by its index, largest first, [C, G]; -1 fills up rows with fewer groups."""
    rows = [np.repeat(np.arange(len(counts))[::-1], counts[::-1]) for counts in counts_CD]
    found = np.full((len(rows), max(map(len, rows))), -1, np.int64)
    for row, indices in enumerate(rows):
        found[row, : len(indices)] = indices
    return found


def _fill(
    lengths_K: np.ndarray, times_KD: np.ndarray, degree_CG: np.ndarray, tokens_D: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Puts each document into the group that ends first with it, in all compositions at once.

    Returns:
        The group of each document, int64 [K, C], and the nanoseconds of each group, int64 [C, G]; at least `_NEVER`
        where a document fits nowhere.
    """
    rooms_CG = np.where(degree_CG >= 0, tokens_D[degree_CG], -1)
    loads_CG = np.zeros_like(rooms_CG)
    place_KC = np.zeros((len(lengths_K), len(degree_CG)), np.int64)
    rows = np.arange(len(degree_CG))
    for number, (length, times_D) in enumerate(zip(lengths_K.tolist(), times_KD, strict=True)):
        after_CG = loads_CG + times_D[degree_CG]
        after_CG[rooms_CG < length] = _NEVER
        group_C = after_CG.argmin(axis=1)
        loads_CG[rows, group_C] = after_CG[rows, group_C]
        rooms_CG[rows, group_C] -= length
        place_KC[number] = group_C
    return place_KC, loads_CG


def improve(
    place_K: np.ndarray, lengths_K: np.ndarray, times_KD: np.ndarray, degree_G: np.ndarray, costs: GroupCosts
) -> np.ndarray:
    """Moves documents out of the slowest group, or swaps them, at most `NUM_STEPS` times.

    Args:
        place_K: group of each document.
        lengths_K: tokens.
        times_KD: see `GroupCosts.times_KD`.
        degree_G: index of each group's degree; -1 where there is no group.
        costs: the costs.

    Returns:
        The group of each document afterwards, int64 [K]; never slower.
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
    """Where documents are, and what each group takes."""

    place_K: np.ndarray
    lengths_K: np.ndarray
    times_KG: np.ndarray
    rooms_G: np.ndarray
    own_K: np.ndarray
    loads_G: np.ndarray

    def move(self) -> bool:
        """Moves the document out of the slowest group after which the two groups end first; returns whether it did."""
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
        """Swaps a document of the slowest group so that the two groups end first; returns whether it did."""
        slow = int(self.loads_G.argmax())
        (inside,), (others,) = np.nonzero(self.place_K == slow), np.nonzero(self.place_K != slow)
        if not len(others):
            return False
        groups = self.place_K[others]
        here = self.loads_G[slow] - self.own_K[inside][:, None] + self.times_KG[others, slow]
        there = (self.loads_G[groups] - self.own_K[others]) + self.times_KG[inside][:, groups]
        ends = np.maximum(here, there)
        grows = self.lengths_K[inside][:, None] - self.lengths_K[others]
        ends[(grows > self.rooms_G[groups]) | (-grows > self.rooms_G[slow])] = _NEVER
        best = int(ends.argmin())
        if ends.flat[best] >= self.loads_G[slow]:
            return False
        first, second = int(inside[best // len(others)]), int(others[best % len(others)])
        group = int(self.place_K[second])
        self._put(first, group)
        self._put(second, slow)
        return True

    def _put(self, number: int, group: int) -> None:
        before = self.place_K[number]
        self.rooms_G[before] += self.lengths_K[number]
        self.loads_G[before] -= self.own_K[number]
        self.place_K[number], self.own_K[number] = group, self.times_KG[number, group]
        self.rooms_G[group] -= self.lengths_K[number]
        self.loads_G[group] += self.own_K[number]


def plan_batch(lengths: np.ndarray, costs: GroupCosts) -> tuple[list[np.ndarray], list[GroupPlan]]:
    """Plans a global batch: microbatches by the blaster, for the number of microbatches that is fastest.

    A number of microbatches is left out if the time with divisible documents already exceeds the best plan's time.

    Args:
        lengths: tokens of each document, int64 [documents], at least one.
        costs: times and limits.

    Returns:
        The documents of each microbatch (indices into `lengths`) and their plans, whose documents are indices into the
        microbatch.

    Raises:
        ValueError: if a document is longer than the whole cluster holds, or no plan was found.
    """
    if lengths.max() > costs.cluster_tokens:
        raise ValueError(
            f"a document must have at most {costs.cluster_tokens} tokens, which all devices together hold, got "
            f"{lengths.max()}; drop the document or use more devices"
        )
    best: tuple[int, list[np.ndarray], list[GroupPlan]] | None = None
    work_ns = int((costs.times_KD(lengths) * np.array(costs.degrees)).min(axis=1).sum()) // costs.num_devices
    for count in microbatch_counts(lengths, costs.cluster_tokens):
        if best and work_ns + count * costs.fixed_ns >= best[0]:
            break
        microbatches = blast(lengths, count)
        plans = [plan_groups(lengths[own], costs) for own in microbatches]
        kept = [plan for plan in plans if plan is not None]
        total_ns = sum(plan.time_ns for plan in kept)
        if len(kept) == len(plans) and (best is None or total_ns < best[0]):
            best = (total_ns, microbatches, kept)
    if best is None:
        raise ValueError(
            f"documents must fit into groups of at most {costs.device_tokens} tokens a device, and no such plan was "
            f"found for {len(lengths)} documents; use fewer documents"
        )
    return best[1], best[2]
