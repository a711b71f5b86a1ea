"""What plans get behind the search: fewer bodies for chunks of equal cost, and queries on the ring in every tick."""

from dataclasses import replace

import pytest

from sppo_jax.config import config_from_dict
from sppo_jax.program.fold import num_segments
from sppo_jax.program.program import lower
from sppo_jax.rules import MOST_SHAPES
from sppo_jax.search.evaluate import evaluate, memory_of, plan_of, simulation_of
from sppo_jax.search.refine import MOST_TIMES, bodies_of, with_fewer_bodies
from sppo_jax.search.search import TIE, search
from sppo_jax.search.space.layouts import layouts
from sppo_jax.search.space.partitions import LONGEST, Candidate, Partition
from sppo_jax.search.space.request import read_request

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


def in_chunks(plan, most_shapes=MOST_SHAPES, num_chunks=0):
    """The plan in up to so many tick shapes, or in so many equal chunks."""
    partition = Partition(
        layout=next(iter(layouts(read_request(config_from_dict(ASKED))))),
        schedule="sppo",
        num_chunks=num_chunks or len(plan.chunk_lengths),
        balance="equal" if num_chunks else "cost",
        longest=0.0 if num_chunks else min(LONGEST),
        most_shapes=most_shapes,
    )
    stash = plan.stash
    places = (stash.inputs, stash.attention, stash.rest)
    return evaluate(Candidate(partition, places, "hidden", stash.kv_grad_dtype, "keep"))


def test_the_count_is_that_of_the_lowered_program(found):
    shapes = len(found.plan.schedule.shapes)
    for outcome in (in_chunks(found.plan, shapes), in_chunks(found.plan, num_chunks=32)):
        ring = outcome.candidate.layout.costs(outcome.candidate.places).ring
        assert bodies_of(outcome) == num_segments(lower(plan_of(outcome, {}), ring.shape).items)


def test_a_plan_of_equal_cost_has_three_times_the_bodies_of_equal_chunks_at_most(found):
    plan, every = found.plan, in_chunks(found.plan)
    few, equal = in_chunks(plan, len(plan.schedule.shapes)), in_chunks(plan, num_chunks=32)
    # With all shapes it would have more: the limit is what leaves one out.
    assert bodies_of(few) <= MOST_TIMES * bodies_of(equal) < bodies_of(every)
    assert len(plan.schedule.shapes) < MOST_SHAPES == len(every.candidate.partition.shapes)
    assert plan.predicted.step_s <= every.step_s * 1.001
    assert "tick shapes keep the compiled tick bodies within 3 times" in plan.reasons["chunks"]


def test_shapes_are_left_out_one_by_one_and_only_where_there_are_too_many_bodies(found):
    every = in_chunks(found.plan)
    few = with_fewer_bodies(every)
    plan = plan_of(few, {})
    assert (plan.schedule, plan.chunk_lengths) == (found.plan.schedule, found.plan.chunk_lengths)
    assert with_fewer_bodies(few) is few


PLAIN = {
    "model": {"preset": "llama3-8b", "compute_dtype": "bfloat16"},
    "schedule": {"name": "breadth-first"},
    "hardware": {"cluster": "h100:4x8"},
    "train": {"steps": 10},
}


def config_of(length, **sequence):
    return config_from_dict(PLAIN | {"sequence": {"length": length, **sequence}})


def test_queries_travel_in_every_tick_where_bodies_are_saved_and_the_step_is_a_tie():
    config = config_of(24 * 2**20)
    found = search(config)
    plan, why = found.plan, found.plan.reasons["sequence_kind"]
    assert plan.ring > 1 and plan.ring_pass == "q" and found.fits
    assert "the ring passes queries in every tick" in why and "and 14 tick bodies are compiled instead of 3" in why
    assert plan.predicted.step_s <= found.fastest_s * (1 + TIE)
    # What the plan predicts is what its own passes take.
    assert memory_of(plan, config) == found.memory
    assert simulation_of(plan, config).step_s > simulation_of(replace(plan, ring_pass="auto"), config).step_s


def test_what_is_asked_for_stays_and_so_does_a_plan_without_a_ring():
    for sequence in ({"split": "ulysses"}, {"split": "ring", "ring_pass": "kv"}):
        plan = search(config_of(2**20, **sequence)).plan
        assert plan.ring_pass == sequence.get("ring_pass", "auto")
        assert "queries travel" not in plan.reasons["sequence_kind"]
