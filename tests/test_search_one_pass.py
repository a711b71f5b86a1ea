"""Queries travel in every tick of a breadth-first ring where that costs nothing and makes a program smaller."""

from dataclasses import replace

from sppo_jax.config import config_from_dict
from sppo_jax.search.evaluate import memory_of, simulation_of
from sppo_jax.search.search import TIE, search

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
    for sequence in ({"kind": "ulysses"}, {"kind": "ring", "ring_pass": "kv"}):
        plan = search(config_of(2**20, **sequence)).plan
        assert plan.ring_pass == sequence.get("ring_pass", "auto")
        assert "queries travel" not in plan.reasons["sequence_kind"]
