"""Each mechanism has its part of a tick's spec, of the rows and of the state, all under one name."""

from dataclasses import fields

import pytest

from sppo_jax.pipeline.mechanism import Mechanism
from sppo_jax.pipeline.state import EvaluationState, TrainingState
from sppo_jax.program import tick_rows
from sppo_jax.program.program import Mechanisms, Program, TickSpec

HOOKS = {name for name in vars(Mechanism) if not name.startswith("_")}


@pytest.mark.parametrize("name", Mechanisms._fields)
def test_a_mechanism_has_its_part_of_all_that_a_tick_has(name):
    assert name in {field.name for field in fields(TickSpec)} & {field.name for field in fields(Program)}
    part = TrainingState.__annotations__[name]
    assert issubclass(part, Mechanism) and HOOKS & set(vars(part)), "a mechanism without hooks does nothing"
    # An evaluation has no backward, and stashes nothing.
    assert (name in EvaluationState._fields) == (name != "stash")


def test_fields_have_the_names_of_their_mechanisms():
    owners = {field.partition(".")[0] for field in tick_rows.FIELDS if "." in field}
    assert owners == set(Mechanisms._fields)
    assert {*tick_rows.HOST_ROWS, *tick_rows.FLAGS} <= set(tick_rows.FIELDS)
    assert len(set(tick_rows.FIELDS)) == len(tick_rows.FIELDS)
