"""The memory model against the compiled plans of results/fit.json, and the numbers that are fitted on them."""

import pytest

from bench import fit_numbers
from sppo_jax.predict.fitted import NUMBERS, TOLD, Numbers

# The most that the median and the worst error may be: what they were with twelve fitted numbers.
LIMITS = {"counted in": (0.0116, 0.0479), "held out": (0.013, 0.0507), "TPUs": (0.024, 0.0695)}


@pytest.fixture(scope="module")
def rows():
    return fit_numbers.rows()


@pytest.mark.parametrize("group", LIMITS)
def test_compiled_bytes_are_predicted(rows, group):
    errors = [row.error() for row in rows if row.group == group]
    median, worst = fit_numbers.summary(errors)
    assert len(errors) >= 6 and median <= LIMITS[group][0] and worst <= LIMITS[group][1]


def test_the_fitted_numbers_are_those_that_fit_best(rows):
    assert fit_numbers.fitted(rows) == NUMBERS
    assert len(Numbers._fields) <= 6
    for name, told in TOLD.items():
        plans, error = fit_numbers.told(rows, name)
        assert (plans, round(error, 3)) == told and plans >= 3
