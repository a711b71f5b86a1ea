"""The lower bound: below every plan, and close to proven optima."""

import itertools
import json
import time

import numpy as np
import pytest

from sppo_jax.flex.flexsp.bound import lower_bound_ns
from sppo_jax.flex.flexsp.costs import MODELS, flexsp_costs
from sppo_jax.flex.flexsp.solver import plan_teams
from studies import flexsp
from studies.flexsp_cells import part_of_cluster

COSTS = flexsp_costs(MODELS["7b"])
ROWS = json.loads(flexsp.RESULT.read_text(encoding="utf-8"))["optima"]["rows"]


def test_the_bound_is_below_proven_optima_and_close():
    cases = {number: (costs, lengths) for number, costs, lengths in itertools.islice(flexsp.small_cases(), 400)}
    gaps = []
    for row in ROWS[:40]:
        costs, lengths = cases[row["case"]]
        # The bound must not depend on a good upper limit to stay below the optimum.
        bound = lower_bound_ns(lengths, costs, 2 * row["optimum_ns"])
        assert bound <= row["optimum_ns"] * (1 + 1e-5)
        gaps.append(row["optimum_ns"] / bound - 1)
    assert np.mean(gaps) <= 0.05


def test_the_bound_is_exact_where_documents_are_alike():
    part = part_of_cluster(COSTS, 8)
    lengths = np.full(8, 4096)
    optimum = part.fixed_ns + 2 * int(part.times_KD(lengths)[0, 0])
    assert plan_teams(lengths, part).time_ns == optimum
    assert 0.999 * optimum <= lower_bound_ns(lengths, part, 2 * optimum) <= optimum


def test_the_longest_document_bounds_the_time():
    lengths = np.array([400_000])
    plan = plan_teams(lengths, COSTS)
    assert lower_bound_ns(lengths, COSTS, plan.time_ns) == plan.time_ns


@pytest.mark.slow
def test_the_bound_takes_under_a_tenth_of_a_second():
    """The only bound on time in these tests: ten times what it takes on 2 cores that are not busy."""
    lengths = flexsp.sample_batches("wikipedia", 192, 1)[0]
    upper = plan_teams(lengths[:256], COSTS).time_ns
    begin = time.process_time()
    lower_bound_ns(lengths[:256], COSTS, upper)
    assert time.process_time() - begin < 1.0
