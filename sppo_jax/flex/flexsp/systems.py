"""Systems of FlexSP's paper in simulation: a static degree, the best degree of each batch, and FlexSP.

All systems pay the costs of `costs.py`.

Baselines. Packing follows the released code: best-fit decreasing of the whole batch into teams of one degree that are
filled to 90% of their tokens (or to the longest document); teams run in microbatches of N / degree. Departures: teams
that run together are alike in time (the released code keeps the order of packing), and the documents of the last
microbatch are dealt longest first to the team that ends first (the released code evens tokens). Both make a baseline
faster. Neither touches DeepSpeed on Wikipedia: at degree 64 a microbatch is one team.

FlexSP. Teams come from the fast planner, with lengths in 16 buckets as in the released code, which takes SCIP's plan
after ten seconds. Departure: the planner passes over numbers of microbatches whose buckets add more than 2.3% of tokens
(`solver.py`), the most that the paper states; "unbounded" does not, like the released code. "own" plans with the
documents' own lengths.

Megatron has no released constants and is not simulated.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np

from sppo_jax.flex.flexsp.bucketing import MOST_TOKEN_ERROR
from sppo_jax.flex.flexsp.costs import TeamCosts
from sppo_jax.flex.flexsp.solver import plan_batch

PADDING = 128
FILL = 0.9
NUM_BUCKETS = 16
System = Literal["static", "batch", "flexsp", "unbounded", "own"]


def batch_ns(system: System, lengths: np.ndarray, costs: TeamCosts, *, static_degree: int) -> int:
    """Returns the nanoseconds of a step.

    Args:
        system: "static" has one degree for all batches, "batch" the best degree of each batch (FlexSP's ablation
            BatchAda), "flexsp" teams of many degrees planned with bucketed lengths, "unbounded" the same whatever
            the buckets add, "own" teams planned with the documents' own lengths.
        lengths: tokens of each document of the batch, int64 [documents].
        costs: times and limits.
        static_degree: the degree of "static".

    Raises:
        ValueError: if no degree has teams that hold the longest document.
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
            f"a team must hold the longest document, got {lengths.max()} tokens for teams of "
            f"{max(degrees) * costs.device_tokens}; drop the document or use a larger degree"
        )
    return min(times)


def one_degree_ns(lengths: np.ndarray, costs: TeamCosts, degree: int) -> int | None:
    """Returns the nanoseconds of a step whose teams all have one degree; None if a document does not fit."""
    most = degree * costs.device_tokens
    if lengths.max() > most:
        return None
    times_K = costs.times_KD(lengths)[:, costs.degrees.index(degree)]
    teams = _best_fit(lengths, max(int(most * FILL), int(lengths.max())))
    teams.sort(key=lambda team: -int(times_K[team].sum()))
    at_once = costs.num_devices // degree
    microbatches = [teams[first : first + at_once] for first in range(0, len(teams), at_once)]
    dealt = _dealt_ns(np.concatenate(microbatches[-1]), at_once, lengths, times_K, most)
    slowest = [int(max(times_K[team].sum() for team in microbatch)) for microbatch in microbatches]
    slowest[-1] = min(slowest[-1], dealt)
    return sum(slowest) + len(slowest) * costs.fixed_ns


def _best_fit(lengths: np.ndarray, most: int) -> list[list[int]]:
    """Packs documents, longest first, each into the fullest team that holds it."""
    teams: list[list[int]] = []
    rooms = np.zeros(len(lengths), np.int64)
    for number in np.argsort(-lengths, kind="stable").tolist():
        left = rooms[: len(teams)] - lengths[number]
        if len(teams) and left.max() >= 0:
            team = int(np.where(left >= 0, left, most + 1).argmin())
        else:
            team = len(teams)
            teams.append([])
            rooms[team] = most
        teams[team].append(number)
        rooms[team] -= lengths[number]
    return teams


def _dealt_ns(numbers: np.ndarray, at_once: int, lengths: np.ndarray, times_K: np.ndarray, most: int) -> int:
    """Returns the time of the slowest team if documents go, longest first, to the team that ends first."""
    loads, rooms = np.zeros(at_once, np.int64), np.full(at_once, most)
    never = np.iinfo(np.int64).max
    for number in numbers[np.argsort(-lengths[numbers], kind="stable")].tolist():
        if rooms.max() < lengths[number]:
            return never
        team = int(np.where(rooms >= lengths[number], loads, never).argmin())
        loads[team] += times_K[number]
        rooms[team] -= lengths[number]
    return int(loads.max())
