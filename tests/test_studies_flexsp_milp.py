"""HiGHS's program: its optimum is that of trying everything; its limit is a number of nodes."""

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

from sppo_jax.flex.flexsp.compositions import compositions
from sppo_jax.flex.flexsp.costs import MODELS, flexsp_costs
from sppo_jax.flex.flexsp.team_plan import problem
from studies.flexsp_cells import part_of_cluster
from studies.flexsp_milp import solve_teams

COSTS = part_of_cluster(flexsp_costs(MODELS["7b"]), 8)
# The fixed time would hide differences.
COSTS = replace(COSTS, fixed_ms=1.0)


def best_of_all(lengths, costs):
    """Tries every composition and every place of every document."""
    best = None
    times = costs.times_KD(lengths)
    for counts in compositions(costs.num_devices, costs.degrees):
        teams = np.repeat(np.arange(len(counts)), counts)
        for places in itertools.product(range(len(teams)), repeat=len(lengths)):
            places = np.array(places)
            tokens = np.bincount(places, weights=lengths, minlength=len(teams))
            if (tokens > costs.tokens_D()[teams]).any():
                continue
            time = max(times[places == team, degree].sum() for team, degree in enumerate(teams))
            best = time if best is None else min(best, time)
    return None if best is None else int(best) + costs.fixed_ns


@pytest.mark.parametrize("seed", range(8))
def test_the_optimum_is_that_of_trying_everything(seed):
    numbers = random.Random(seed)
    lengths = np.array([int(500 * 25 ** numbers.random()) for _ in range(3 + seed % 3)])
    found, best = solve_teams(lengths, COSTS, node_limit=5000, gap=1e-6), best_of_all(lengths, COSTS)
    assert found.proven and problem(found.plan, lengths, COSTS) == ""
    assert found.plan.time_ns == pytest.approx(best, rel=2e-6)
    assert found.bound_ns <= found.plan.time_ns * (1 + 1e-6)


def test_where_documents_do_not_fit_there_is_no_plan():
    lengths = np.full(3, 3 * COSTS.device_tokens)
    assert best_of_all(lengths, COSTS) is None
    assert solve_teams(lengths, COSTS, node_limit=100).plan is None


def test_buckets_keep_every_document_and_cost_little():
    numbers = random.Random(1)
    lengths = np.array([200 + int(3000 * numbers.random()) for _ in range(12)])
    whole, bucketed = (solve_teams(lengths, COSTS, node_limit=300, num_buckets=number) for number in (None, 4))
    assert problem(bucketed.plan, lengths, COSTS) == ""
    assert bucketed.plan.time_ns >= whole.bound_ns
    assert bucketed.plan.time_ns <= 1.3 * whole.plan.time_ns


def test_the_same_number_of_nodes_gives_the_same_plan():
    numbers = random.Random(2)
    lengths = np.array([200 + int(6000 * numbers.random()) for _ in range(12)])
    first, second = (solve_teams(lengths, COSTS, node_limit=40, gap=0) for _ in range(2))
    assert first == second and first.plan is not None and not first.proven
