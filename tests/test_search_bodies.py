"""Chunks of equal cost have at most three times the bodies of ticks of equal chunks, and lose little by it."""

from dataclasses import replace

import pytest

from sppo_jax.config import config_from_dict
from sppo_jax.plan.plan import Plan
from sppo_jax.program.fold import num_segments
from sppo_jax.program.program import lower
from sppo_jax.rules import MOST_SHAPES
from sppo_jax.schedule.shapes import tick_shapes
from sppo_jax.search.bodies import MOST_TIMES, bodies_of, with_fewer_bodies
from sppo_jax.search.evaluate import Choice, evaluate, plan_of
from sppo_jax.search.layouts import layouts
from sppo_jax.search.request import read_request
from sppo_jax.search.search import search

ASKED = {
    "model": {"preset": "gpt-13b"},
    "sequence": {"length": 2**19},
    "train": {"steps": 1},
    "hardware": {"cluster": "a100-80g:8x8"},
    "mesh": {"data": 1, "pipe": 8, "seq": 8},
    "schedule": {"name": "sppo", "interleave": 5},
}


@pytest.fixture(scope="module")
def found():
    return search(config_from_dict(ASKED))


def choice_of(plan: Plan, **changes) -> Choice:
    layout = next(iter(layouts(read_request(config_from_dict(ASKED)))))
    stash = plan.stash
    values = dict(
        layout=layout,
        chunk_lengths=plan.chunk_lengths,
        schedule="sppo",
        places=(stash.inputs, stash.attention, stash.rest),
        alpha="hidden",
        kv_grad_dtype=stash.kv_grad_dtype,
        shapes=plan.schedule.shapes,
    )
    return Choice(**{**values, **changes})


def test_the_count_is_that_of_the_lowered_program(found):
    for lengths, shapes in ((found.plan.chunk_lengths, found.plan.schedule.shapes), ((16384,) * 32, ())):
        outcome = evaluate(choice_of(found.plan, chunk_lengths=lengths, shapes=shapes))
        ring = outcome.choice.layout.costs(outcome.choice.places).ring
        assert bodies_of(outcome) == num_segments(lower(plan_of(outcome, {}), ring.shape).items)


def test_a_plan_of_equal_cost_has_three_times_the_bodies_of_equal_chunks_at_most(found):
    plan = found.plan
    few = bodies_of(evaluate(choice_of(plan)))
    equal = bodies_of(evaluate(choice_of(plan, chunk_lengths=(16384,) * 32, shapes=())))
    every = evaluate(choice_of(plan, shapes=tick_shapes(plan.chunk_lengths, 8 * 16, MOST_SHAPES)))
    # With all shapes it would have more: the limit is what leaves one out.
    assert few <= MOST_TIMES * equal < bodies_of(every)
    assert len(plan.schedule.shapes) < MOST_SHAPES == len(every.choice.shapes)
    assert plan.predicted.step_s <= every.step_s * 1.001
    assert "tick shapes keep the compiled tick bodies within 3 times" in plan.reasons["chunks"]


def test_shapes_are_left_out_one_by_one_and_only_where_there_are_too_many_bodies(found):
    every = evaluate(choice_of(found.plan, shapes=tick_shapes(found.plan.chunk_lengths, 8 * 16, MOST_SHAPES)))
    few = with_fewer_bodies(every)
    assert few.choice == replace(every.choice, shapes=found.plan.schedule.shapes)
    assert with_fewer_bodies(few) is few
