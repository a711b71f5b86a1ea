"""A lower bound on the time of any plan of a microbatch: whole teams, divisible documents.

A plan that ends by C has n_d teams of each degree d, and puts each document on one degree. So these hold, where x_kd
is 1 if document k is on degree d, and t_kd is its time there:

    sum_d x_kd = 1;    sum_k x_kd t_kd <= n_d (C - b1);    sum_k x_kd s_k <= n_d d cap;    sum_d d n_d <= N
    x_kd = 0 where t_kd > C - b1 or s_k > d cap

The bound lets x_kd be any share and keeps n_d whole. C is bisected; the least C that is not refuted is the bound.
"""

from __future__ import annotations

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from sppo_jax.flex.flexsp.compositions import compositions, fluid_times
from sppo_jax.flex.flexsp.costs import TeamCosts

TOLERANCE = 1e-3
_INFEASIBLE = 2


def lower_bound_ns(lengths: np.ndarray, costs: TeamCosts, upper_ns: int, tolerance: float = TOLERANCE) -> int:
    """Returns nanoseconds that no plan of a microbatch can beat, within the solver's tolerance of 1e-6.

    Args:
        lengths: tokens of each document, int64 [documents], at least one.
        costs: times and limits.
        upper_ns: the time of a plan that exists; the bound is at most this.
        tolerance: share of the bound at which bisection ends; the bound returned is the end that was refuted.
    """
    values, counts = np.unique(lengths, return_counts=True)
    times = costs.times_KD(values)
    degrees = np.array(costs.degrees)
    area = int((times * degrees).min(axis=1) @ counts) // costs.num_devices
    possible = np.where(values[:, None] <= costs.tokens_D(), times, np.iinfo(np.int64).max)
    low, high = max(area, int(possible.min(axis=1).max())), upper_ns - costs.fixed_ns
    # The estimate for divisible documents is no bound, but close: the first two trials are beside it.
    longest = lengths[np.argsort(-lengths, kind="stable")]
    counts_CD = compositions(costs.num_devices, costs.degrees)
    guess = int(fluid_times(counts_CD, longest, costs.times_KD(longest), costs).min())
    trials = [guess * 998 // 1000, guess * 1002 // 1000]
    while high - low > tolerance * (low + costs.fixed_ns):
        middle = trials.pop() if trials else (low + high) // 2
        if not low < middle < high:
            continue
        if _refuted(values, counts, times, costs, middle):
            low = middle
        else:
            high = middle
    return low + costs.fixed_ns


def _refuted(values: np.ndarray, counts: np.ndarray, times: np.ndarray, costs: TeamCosts, limit_ns: int) -> bool:
    """Returns whether no plan, even with divisible documents, ends within the limit (fixed time not counted)."""
    num_degrees = len(costs.degrees)
    value, degree = np.nonzero((times <= limit_ns) & (values[:, None] <= costs.tokens_D()))
    share = np.arange(len(value))
    teams = len(value) + np.arange(num_degrees)
    time = times[value, degree] / limit_ns * counts[value]
    tokens = values[value] / costs.tokens_D()[degree] * counts[value]
    # Rows: each length is placed; the time of each degree; its tokens; devices.
    row_of = [value, len(values) + degree, len(values) + num_degrees + degree]
    row_of += [len(values) + np.arange(num_degrees), len(values) + num_degrees + np.arange(num_degrees)]
    row_of += [np.full(num_degrees, len(values) + 2 * num_degrees)]
    columns = [share, share, share, teams, teams, teams]
    entries = [np.ones(len(value)), time, tokens, -np.ones(num_degrees), -np.ones(num_degrees), np.array(costs.degrees)]
    num_rows = len(values) + 2 * num_degrees + 1
    matrix = coo_array(
        (np.concatenate(entries), (np.concatenate(row_of), np.concatenate(columns))),
        shape=(num_rows, len(value) + num_degrees),
    )
    least, most = np.full(num_rows, -np.inf), np.zeros(num_rows)
    least[: len(values)] = most[: len(values)] = 1
    most[-1] = costs.num_devices
    found = milp(
        np.zeros(len(value) + num_degrees),
        constraints=LinearConstraint(matrix.tocsr(), least, most),
        integrality=np.repeat([0, 1], [len(value), num_degrees]),
        bounds=Bounds(0, np.repeat([1.0, costs.num_devices], [len(value), num_degrees])),
    )
    return found.status == _INFEASIBLE
