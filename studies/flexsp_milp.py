"""FlexSP's mixed-integer program for one microbatch, solved by HiGHS.

Candidate teams p of degree d_p (N / d of each degree); m_p is 1 if team p is used; a_qp documents of length q are in
team p, out of c_q. FlexSP has the same program and solves it with SCIP:

    minimise C;    b1 + sum_q a_qp t_q(d_p) <= C;    sum_q a_qp s_q <= d_p cap m_p;    sum_p a_qp = c_q
    sum_p d_p m_p <= N;    a_qp <= c_q m_p

Teams of equal degree are alike, so the program asks that the first of two alike has the higher time, which leaves one
of many equal plans. The search ends after a number of nodes, never after a time, so its result is reproducible.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, OptimizeResult, milp
from scipy.sparse import coo_array, csr_array

from sppo_jax.flex.flexsp.bucketing import bucket
from sppo_jax.flex.flexsp.costs import TeamCosts
from sppo_jax.flex.flexsp.team_plan import TeamPlan, make_plan

Triple = tuple[np.ndarray, np.ndarray, np.ndarray]
_OPTIMAL = 0


@dataclass(frozen=True, kw_only=True)
class MilpResult:
    """What HiGHS found.

    Args:
        plan: the best plan, with the times of the documents' own lengths; None if none was found.
        proven: whether no plan of the program (with bucketed lengths, if asked) is faster by more than the gap.
        bound_ns: HiGHS's own lower bound on C; with buckets it is no bound for the documents' own lengths.
    """

    plan: TeamPlan | None
    proven: bool
    bound_ns: int


def solve_teams(
    lengths: np.ndarray, costs: TeamCosts, *, node_limit: int, num_buckets: int | None = None, gap: float = 1e-4
) -> MilpResult:
    """Solves the program of a microbatch.

    Args:
        lengths: tokens of each document, int64 [documents], at least one.
        costs: times and limits.
        node_limit: nodes of the branch-and-bound tree after which HiGHS stops; 0 means the root alone.
        num_buckets: bucket the lengths as FlexSP does (16); None keeps each length.
        gap: share of C below which HiGHS calls a plan optimal.
    """
    found = bucket(lengths, num_buckets or len(lengths))
    values, counts = np.array(found.lengths), np.array(found.counts)
    program = _Program(values, counts, costs)
    result = program.solve(node_limit, gap)
    bound = getattr(result, "mip_dual_bound", None)
    bound_ns = 0 if bound is None or not np.isfinite(bound) else int(bound * program.unit_ns) + costs.fixed_ns
    if result.x is None:
        return MilpResult(plan=None, proven=False, bound_ns=bound_ns)
    number_QP = np.rint(program.numbers(result.x)).astype(np.int64)
    documents = _deal(lengths, counts, number_QP)
    plan = make_plan(lengths, costs, program.degree_of_P.tolist(), documents)
    return MilpResult(plan=plan, proven=result.status == _OPTIMAL, bound_ns=bound_ns)


def _deal(lengths: np.ndarray, counts: np.ndarray, number_QP: np.ndarray) -> list[list[int]]:
    """Gives each team its number of documents of each bucket; buckets are runs of the documents by length."""
    order = np.argsort(lengths, kind="stable")
    documents: list[list[int]] = [[] for _ in range(number_QP.shape[1])]
    begin = 0
    for count, numbers in zip(counts.tolist(), number_QP.tolist(), strict=True):
        own = order[begin : begin + count].tolist()
        begin += count
        for team, number in enumerate(numbers):
            documents[team] += own[:number]
            own = own[number:]
    return documents


class _Program:
    """Variables: a_qp (row by row), then m_p, then C without the fixed time, in units of `unit_ns`."""

    def __init__(self, values: np.ndarray, counts: np.ndarray, costs: TeamCosts) -> None:
        degrees = np.array(costs.degrees)[::-1]
        self.degree_of_P = np.repeat(degrees, costs.num_devices // degrees)
        index_of_P = np.searchsorted(np.array(costs.degrees), self.degree_of_P)
        self.values, self.counts, self.costs = values, counts, costs
        times_QP = costs.times_KD(values)[:, index_of_P].astype(np.float64)
        # About 1 for the fastest possible step, so that HiGHS's absolute tolerances are small shares of C.
        self.unit_ns = max(float((times_QP * self.degree_of_P).min(axis=1) @ counts) / costs.num_devices, 1.0)
        self.times_QP = times_QP / self.unit_ns
        self.shape = (len(values), len(self.degree_of_P))

    def numbers(self, x: np.ndarray) -> np.ndarray:
        """Returns a_qp, [buckets, teams]."""
        return x[: self.shape[0] * self.shape[1]].reshape(self.shape)

    def solve(self, node_limit: int, gap: float) -> OptimizeResult:
        """Runs HiGHS."""
        num_q, num_p = self.shape
        num = num_q * num_p
        fits = self.values[:, None] <= self.degree_of_P * self.costs.device_tokens
        upper = np.concatenate([(self.counts[:, None] * fits).ravel(), np.ones(num_p), [np.inf]])
        matrix, least, most = self._constraints()
        objective = np.zeros(num + num_p + 1)
        objective[-1] = 1
        return milp(
            objective,
            constraints=LinearConstraint(matrix, least, most),
            integrality=np.repeat([1, 0], [num + num_p, 1]),
            bounds=Bounds(0, upper),
            options={"node_limit": node_limit, "mip_rel_gap": gap},
        )

    def _constraints(self) -> tuple[csr_array, np.ndarray, np.ndarray]:
        num_q, num_p = self.shape
        num = num_q * num_p
        q, p = (part.ravel() for part in np.indices(self.shape))
        a, m, c = np.arange(num), num + np.arange(num_p), num + num_p
        times, tokens = self.times_QP.ravel(), self.values[q] / self.costs.device_tokens
        alike = np.flatnonzero(self.degree_of_P[:-1] == self.degree_of_P[1:])
        number = np.full(num_p, -1)
        number[alike] = np.arange(len(alike))
        first, second = number[p], np.concatenate([[-1], number])[p]
        ones, rows_p = np.ones(num_p), np.arange(num_p)
        blocks: list[tuple[list[Triple], int, float | np.ndarray, float | np.ndarray]] = [
            # (rows, columns, entries) by constraint; number of rows; least; most
            ([(q, a, np.ones(num))], num_q, self.counts, self.counts),
            ([(p, a, times), (rows_p, np.full(num_p, c), -ones)], num_p, -np.inf, 0),
            ([(p, a, tokens), (rows_p, m, -self.degree_of_P)], num_p, -np.inf, 0),
            ([(np.zeros(num_p, np.int64), m, self.degree_of_P)], 1, -np.inf, self.costs.num_devices),
            ([(a, a, np.ones(num)), (a, m[p], -self.counts[q])], num, -np.inf, 0),
            # Times of teams of equal degree decrease.
            (
                [
                    (second[second >= 0], a[second >= 0], times[second >= 0]),
                    (first[first >= 0], a[first >= 0], -times[first >= 0]),
                ],
                len(alike),
                -np.inf,
                0,
            ),
        ]
        rows, columns, entries, least, most, offset = [], [], [], [], [], 0
        for triples, count, low, high in blocks:
            for row, column, entry in triples:
                rows.append(row + offset)
                columns.append(column)
                entries.append(entry)
            least.append(np.broadcast_to(low, count).astype(np.float64))
            most.append(np.broadcast_to(high, count).astype(np.float64))
            offset += count
        matrix = coo_array(
            (np.concatenate(entries).astype(np.float64), (np.concatenate(rows), np.concatenate(columns))),
            shape=(offset, num + num_p + 1),
        )
        return matrix.tocsr(), np.concatenate(least), np.concatenate(most)
