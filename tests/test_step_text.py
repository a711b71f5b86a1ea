"""Training steps are the programs that they were: their lowered texts have the digits of step_text.json.

A change that means to change programs writes the file again, and says which programs and why.
"""

import jax
import pytest

from bench.step_text import NUM_QUICK, PROGRAMS, digits_of, known


def check(name):
    of_version = known().get(jax.__version__)
    if not of_version or name not in of_version:
        pytest.skip(f"step_text.json has no digits of {name} for jax {jax.__version__}")
    assert digits_of(name) == of_version[name], "another program; see python -m bench.step_text --help"


@pytest.mark.parametrize("name", list(PROGRAMS)[:NUM_QUICK])
def test_a_step_is_the_program_that_it_was(name):
    check(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(PROGRAMS)[NUM_QUICK:])
def test_more_steps_are_the_programs_that_they_were(name):
    check(name)


def test_the_jax_of_ci_is_in_the_file():
    assert set(known()["0.10.2"]) == set(PROGRAMS)
