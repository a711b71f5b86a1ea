"""Systems of FlexSP's paper in simulation: a static degree, the best degree of each batch, and FlexSP; published gains.

All systems pay the costs of `costs.py`; nothing is fitted to the published gains.

Documents. For Wikipedia they are those that the authors' released scripts simulate for the same cells: the released
lengths in their order, padded to 128, longer ones dropped, 512 a batch, batches 3 to 42 (`start_iter` and `iter_num` of
`solver.py` and `scripts/solver_all.sh`). The scripts read a list called `wikipedia_1`, which was not released; we use
the only released list, `wikipedia`. The lengths of the other corpora are not published, and are guesses here.

Baselines. Packing follows the released code: best-fit decreasing of the whole batch into groups of one degree that are
filled to 90% of their tokens (or to the longest document); groups run in microbatches of N / degree. Departures: groups
that run together are alike in time (the released code keeps the order of packing), and the documents of the last
microbatch are dealt longest first to the group that ends first (the released code evens tokens). Both make a baseline
faster. Neither touches DeepSpeed on Wikipedia: at degree 64 a microbatch is one group.

FlexSP. Groups come from the fast planner, with lengths in 16 buckets as in the released code, which takes SCIP's plan
after ten seconds. Departure: the planner passes over numbers of microbatches whose buckets add more than 2.3% of tokens
(`solver.py`), the most that the paper states; "unbounded" does not, like the released code. "own" plans with the
documents' own lengths.

Megatron has no released constants and is not simulated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from sppo_jax.flex.flexsp.bucketing import MOST_TOKEN_ERROR
from sppo_jax.flex.flexsp.costs import MEMORY_LIMIT_GB, MODELS, GroupCosts, flexsp_costs
from sppo_jax.flex.flexsp.solver import plan_batch
from sppo_jax.flex.lengths import corpora, padded, stratified_lengths, wikipedia_documents

BATCH_SIZE = 512
PADDING = 128
FILL = 0.9
NUM_BUCKETS = 16
# The authors' simulation of the published figure: its first batch (counted from 0) and its number of batches.
FIRST_BATCH, NUM_RELEASED = 3, 40
System = Literal["static", "batch", "flexsp", "unbounded", "own"]


@dataclass(frozen=True, kw_only=True)
class PublishedCell:
    """A cell of FlexSP's main result: 64 A100-40GB, 512 documents a step; gains as printed in the figure.

    Args:
        model: key of `MODELS`.
        max_kilotokens: longest document in thousands of tokens.
        corpus: name in `lengths.corpora`.
        over_deepspeed: FlexSP's speed over DeepSpeed's.
        over_megatron: FlexSP's speed over Megatron's.
    """

    model: str
    max_kilotokens: int
    corpus: str
    over_deepspeed: float
    over_megatron: float

    @property
    def judged(self) -> bool:
        """Whether the corpus is published, so that the simulation can be judged by the cell."""
        return self.corpus == "wikipedia"

    @property
    def static_degree(self) -> int:
        """DeepSpeed's degree in the released code."""
        return 64 if self.corpus == "wikipedia" or self.max_kilotokens > 192 else 32


_GAINS = {
    ("7b", 192): ((1.45, 1.43), (1.50, 1.66), (1.72, 1.98)),
    ("13b", 192): ((1.40, 1.38), (1.35, 1.55), (1.59, 1.79)),
    ("30b", 192): ((1.44, 1.44), (1.54, 1.58), (1.64, 1.95)),
    ("7b", 384): ((1.26, 1.47), (1.42, 1.77), (1.46, 1.77)),
    ("13b", 384): ((1.29, 1.63), (1.37, 1.70), (1.43, 1.77)),
    ("30b", 384): ((1.22, 1.40), (1.33, 1.60), (1.53, 1.85)),
}
PUBLISHED = tuple(
    PublishedCell(
        model=model,
        max_kilotokens=max_kilotokens,
        corpus=corpus,
        over_deepspeed=over_deepspeed,
        over_megatron=over_megatron,
    )
    for (model, max_kilotokens), gains in _GAINS.items()
    for corpus, (over_deepspeed, over_megatron) in zip(
        ("github-assumed", "commoncrawl-assumed", "wikipedia"), gains, strict=True
    )
)


def released_batches(max_kilotokens: int, *, first: int = FIRST_BATCH, count: int = NUM_RELEASED) -> list[np.ndarray]:
    """Returns batches of 512 of Wikipedia's released lengths in their order, padded to 128; longer ones are dropped.

    Args:
        max_kilotokens: longest document in thousands of tokens, padding counted.
        first: the first batch, counted from 0; the default is that of the authors' simulation.
        count: number of batches, at most 50 - `first`.
    """
    lengths = padded(wikipedia_documents(), PADDING)
    kept = lengths[lengths <= max_kilotokens * 1000 - PADDING]
    return list(kept[first * BATCH_SIZE : (first + count) * BATCH_SIZE].reshape(count, BATCH_SIZE))


def sample_batches(corpus: str, max_kilotokens: int, num_batches: int) -> list[np.ndarray]:
    """Returns batches of 512 lengths padded to 128; longer documents are dropped, as in the released code.

    The lengths are stratified: each of equal shares of the distribution gives one document of one batch. A few batches
    so hold the rare longest documents, which decide the time of a batch, as often as the distribution does.

    Args:
        corpus: name in `lengths.corpora`.
        max_kilotokens: longest document in thousands of tokens, padding counted.
        num_batches: number of batches.
    """
    longest = (max_kilotokens * 1000 - PADDING) // PADDING * PADDING
    lengths = stratified_lengths(corpora()[corpus], count=num_batches * BATCH_SIZE, seed=0, longest=longest)
    return list(padded(lengths, PADDING).reshape(num_batches, BATCH_SIZE))


def batch_ns(system: System, lengths: np.ndarray, costs: GroupCosts, *, static_degree: int) -> int:
    """Returns the nanoseconds of a step.

    Args:
        system: "static" has one degree for all batches, "batch" the best degree of each batch (FlexSP's ablation
            BatchAda), "flexsp" groups of many degrees planned with bucketed lengths, "unbounded" the same whatever
            the buckets add, "own" groups planned with the documents' own lengths.
        lengths: tokens of each document of the batch, int64 [documents].
        costs: times and limits.
        static_degree: the degree of "static".

    Raises:
        ValueError: if no degree has groups that hold the longest document.
    """
    if system in ("flexsp", "unbounded", "own"):
        num_buckets = None if system == "own" else NUM_BUCKETS
        most = math.inf if system == "unbounded" else MOST_TOKEN_ERROR
        _, plans = plan_batch(lengths, costs, num_buckets=num_buckets, most_token_error=most)
        return sum(plan.time_ns for plan in plans)
    degrees = (static_degree,) if system == "static" else costs.degrees
    times = [time for degree in degrees if (time := one_degree_ns(lengths, costs, degree)) is not None]
    if not times:
        raise ValueError(
            f"a group must hold the longest document, got {lengths.max()} tokens for groups of "
            f"{max(degrees) * costs.device_tokens}; drop the document or use a larger degree"
        )
    return min(times)


def one_degree_ns(lengths: np.ndarray, costs: GroupCosts, degree: int) -> int | None:
    """Returns the nanoseconds of a step whose groups all have one degree; None if a document does not fit."""
    most = degree * costs.device_tokens
    if lengths.max() > most:
        return None
    times_K = costs.times_KD(lengths)[:, costs.degrees.index(degree)]
    groups = _best_fit(lengths, max(int(most * FILL), int(lengths.max())))
    groups.sort(key=lambda group: -int(times_K[group].sum()))
    at_once = costs.num_devices // degree
    microbatches = [groups[first : first + at_once] for first in range(0, len(groups), at_once)]
    dealt = _dealt_ns(np.concatenate(microbatches[-1]), at_once, lengths, times_K, most)
    slowest = [int(max(times_K[group].sum() for group in microbatch)) for microbatch in microbatches]
    slowest[-1] = min(slowest[-1], dealt)
    return sum(slowest) + len(slowest) * costs.fixed_ns


def _best_fit(lengths: np.ndarray, most: int) -> list[list[int]]:
    """Packs documents, longest first, each into the fullest group that holds it."""
    groups: list[list[int]] = []
    rooms = np.zeros(len(lengths), np.int64)
    for number in np.argsort(-lengths, kind="stable").tolist():
        left = rooms[: len(groups)] - lengths[number]
        if len(groups) and left.max() >= 0:
            group = int(np.where(left >= 0, left, most + 1).argmin())
        else:
            group = len(groups)
            groups.append([])
            rooms[group] = most
        groups[group].append(number)
        rooms[group] -= lengths[number]
    return groups


def _dealt_ns(numbers: np.ndarray, at_once: int, lengths: np.ndarray, times_K: np.ndarray, most: int) -> int:
    """Returns the time of the slowest group if documents go, longest first, to the group that ends first."""
    loads, rooms = np.zeros(at_once, np.int64), np.full(at_once, most)
    never = np.iinfo(np.int64).max
    for number in numbers[np.argsort(-lengths[numbers], kind="stable")].tolist():
        if rooms.max() < lengths[number]:
            return never
        group = int(np.where(rooms >= lengths[number], loads, never).argmin())
        loads[group] += times_K[number]
        rooms[group] -= lengths[number]
    return int(loads.max())


def simulate_cell(
    cell: PublishedCell,
    batches: Sequence[np.ndarray],
    systems: Sequence[System],
    *,
    memory_limit_gb: float = MEMORY_LIMIT_GB,
) -> dict[System, float]:
    """Returns simulated seconds a step of each system, the mean over batches.

    Args:
        cell: model, longest document and static degree.
        batches: lengths of the documents of each batch, int64 [documents] each.
        systems: systems to simulate.
        memory_limit_gb: see `flexsp_costs`.
    """
    costs = flexsp_costs(
        MODELS[cell.model], num_devices=64, max_kilotokens=cell.max_kilotokens, memory_limit_gb=memory_limit_gb
    )
    return {
        system: sum(batch_ns(system, lengths, costs, static_degree=cell.static_degree) for lengths in batches)
        / len(batches)
        / 1e9
        for system in systems
    }
