"""The paper's heuristic: its rules hold where they can, its plans are valid, and the search is never slower."""

import pytest

from sppo_jax.config import config_from_dict
from sppo_jax.search.evaluate import memory_of, simulation_of
from sppo_jax.search.make import make_plan
from sppo_jax.search.search import search

# SPPO's Table 4: the lengths, in units of 1024 tokens, by model and cluster.
TABLE_4 = {
    ("gpt-7b", "a100-80g:4x8"): (512, 640, 768, 896, 1024),
    ("gpt-13b", "a100-80g:8x8"): (512, 640, 768, 1024, 1280),
    ("gpt-65b", "a100-80g:16x8"): (512, 600, 640, 768, 1024),
}
SETTINGS = [(model, cluster, length) for (model, cluster), lengths in TABLE_4.items() for length in lengths]


def config(model="gpt-7b", cluster="a100-80g:4x8", length=512, **groups):
    sequence = {"length": length * 1024, **groups.pop("sequence", {})}
    base = {"model": {"preset": model}, "train": {"steps": 1}, "hardware": {"cluster": cluster}}
    return config_from_dict({**base, "sequence": sequence, **groups})


# Of each model the shortest sequence, and of the largest model the longest.
IN_CI = [SETTINGS[0], SETTINGS[-1]]


@pytest.mark.parametrize(
    ("model", "cluster", "length"),
    [pytest.param(*case, marks=[pytest.mark.slow] * (case not in IN_CI)) for case in SETTINGS],
)
def test_the_search_is_never_slower_than_the_paper(model, cluster, length):
    found, paper = search(config(model, cluster, length)), search(config(model, cluster, length, planner="paper"))
    assert found.fits or not paper.fits
    if paper.fits:
        assert found.fastest_s <= paper.plan.predicted.step_s


@pytest.mark.parametrize(("model", "cluster", "length"), SETTINGS[::4])
def test_the_rules_of_the_paper_hold_where_they_can(model, cluster, length):
    asked = config(model, cluster, length, planner="paper")
    plan = make_plan(asked)
    assert plan.mesh.seq <= 8 and plan.mesh.data == 1
    assert 2048 <= plan.sequence_length / len(plan.chunk_lengths) <= 16384
    assert plan.stash.inputs == plan.stash.attention == "host" and max(plan.stash.alpha) > 0
    assert plan.reasons["planner"].startswith("the SPPO paper's heuristic")
    assert simulation_of(plan, asked).step_s <= plan.predicted.step_s
    assert memory_of(plan, asked).hbm_bytes == max(plan.predicted.hbm_bytes)


def test_the_paper_has_no_waves_unless_they_are_asked_for():
    several = dict(cluster="a100-80g:4x8", length=128, planner="paper", mesh={"data": 1})
    assert make_plan(config(**several, sequence={"per_pipeline": 4})).schedule.wave == 1
    assert make_plan(config(**several, sequence={"per_pipeline": 4}, schedule={"wave": 2})).schedule.wave == 2
    # With fewer chunks than stages only waves fill whole convoys of an interleaved schedule.
    short = dict(mesh={"pipe": 8, "seq": 4}, length=16, sequence={"per_pipeline": 16}, schedule={"interleave": 2})
    assert make_plan(config(**several | short)).schedule.wave == 1


def test_a_small_cluster_keeps_pipelines_inside_a_host():
    assert make_plan(config(cluster="a100-80g:1x8", length=128, planner="paper")).mesh.pipe <= 8


def test_pins_stay():
    plan = make_plan(
        config(
            mesh={"pipe": 8, "seq": 4},
            sequence={"chunks": 64, "balance": "equal"},
            stash={"rest": "recompute"},
            planner="paper",
        )
    )
    assert (plan.mesh.pipe, plan.mesh.seq) == (8, 4) and plan.chunk_lengths == (8192,) * 64
    assert plan.stash.rest == "recompute"


@pytest.mark.parametrize(("key", "place"), [("kv", "host"), ("kv", "rebuild"), ("waiting", "host")])
def test_places_that_the_paper_does_not_know_are_as_asked(key, place):
    plan = make_plan(config("llama3-8b", "h100:1x8", 128, stash={key: place}, planner="paper"))
    assert getattr(plan.stash, key) == place and plan.schedule.name == "breadth-first"


def test_what_does_not_fit_is_said():
    found = search(config("gpt-65b", "a100-80g:1x8", 512, planner="paper"))
    assert not found.fits and found.problem.startswith("no plan fits") and "\n" not in found.problem


def test_the_paper_itself_can_be_what_stops_it():
    found = search(config(length=2048, cluster="a100-80g:4x8", planner="paper"))
    assert not found.fits and found.stopped_by == "planner=paper"
