"""The plan of an evaluation: against every candidate, against the program that runs, and on few devices."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from exactness import random_batch
from flax import nnx

from sppo_jax.config import MeshConfig, config_from_dict
from sppo_jax.hardware import parse_cluster, usable_bytes
from sppo_jax.models import build_model
from sppo_jax.pipeline.api import Step, evaluate
from sppo_jax.schedule.turns import slot_counts
from sppo_jax.search import evaluation
from sppo_jax.search.evaluation import for_evaluation, plan_evaluation
from sppo_jax.search.search import search

TINY = {"vocab_size": 96, "hidden_size": 32, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "mlp_size": 48}
WINDOWS = {**TINY, "layer_types": {"near": {"sliding_window": 8}, "far": {}}, "layers": "2x(near,far)"}


def config_of(model=TINY, length=64, **sections):
    return config_from_dict({"model": model, "sequence": {"length": length}, "train": {"steps": 1}} | sections)


def all_outcomes(config, cluster, num_wanted):
    """Yields the seconds of all rows, and the outcome, of every candidate that fits."""
    for candidate in evaluation._candidates(config, cluster):
        outcome = evaluation._outcome(candidate)
        if outcome.memory.hbm_bytes <= usable_bytes(cluster):
            yield -(-num_wanted // candidate.layout.mesh.data) * outcome.least_s, outcome


@pytest.mark.parametrize(("num_wanted", "hbm_bytes"), [(1, 80e9), (3, 6e9)])
def test_no_candidate_that_fits_is_faster_and_no_bound_is_above_its_seconds(num_wanted, hbm_bytes):
    config = for_evaluation(config_of({"preset": "llama3.2-1b"}, 32768, hardware={"hbm_bytes": hbm_bytes}))
    cluster = evaluation.resolve_cluster(config, parse_cluster("h100:1x4"))
    found = plan_evaluation(config, cluster, num_wanted)
    assert found.fits and found.memory.hbm_bytes <= usable_bytes(cluster)
    outcomes = list(all_outcomes(config, cluster, num_wanted))
    least_s = min(seconds for seconds, _ in outcomes)
    assert least_s <= found.evaluation_s <= least_s * 1.0051
    for seconds, outcome in outcomes:
        assert evaluation._bounded(outcome.candidate, num_wanted).least_s <= seconds * (1 + 1e-9)


def test_what_trains_on_no_two_devices_is_evaluated_on_two():
    config = config_of({"preset": "qwen3-8b"}, 262144, train={"steps": 1, "eval_sequences": 8})
    cluster = parse_cluster("h100:1x2")
    found = plan_evaluation(for_evaluation(config), cluster, 8)
    assert found.fits and not found.problem
    training = search(config, cluster)
    assert not training.fits or training.memory.host > 0
    assert found.evaluation_s < 8 * training.plan.predicted.step_s / 2


def test_where_none_fits_the_smallest_is_told():
    found = plan_evaluation(for_evaluation(config_of({"preset": "llama3-70b"}, 131072)), parse_cluster("h100:1x2"))
    assert not found.fits
    assert found.problem.startswith("the smallest evaluation must fit in") and "--cluster" in found.problem


def test_settings_of_training_are_not_taken_over():
    asked = config_of(
        mesh={"pipe": 4, "seq": 4},
        sequence={"length": 64, "per_step": 16, "chunks": 4},
        schedule={"name": "breadth-first"},
        stash={"inputs": "host"},
        optimizer={"place": "host"},
        hardware={"cluster": "h100:2x8"},
    )
    config = for_evaluation(asked)
    assert config == for_evaluation(config_of(hardware={"cluster": "h100:2x8"}))
    pinned = for_evaluation(asked, MeshConfig(pipe=2, seq=2))
    assert plan_evaluation(pinned, parse_cluster("h100:1x4")).plan.mesh == replace(
        plan_evaluation(config, parse_cluster("h100:1x4")).plan.mesh, data=1, pipe=2, seq=2
    )


def drawn(model, cluster, *, few):
    config = for_evaluation(config_of(model, 1024, hardware={"cluster": cluster}))
    found = list(evaluation._candidates(config, parse_cluster(cluster)))
    return config, found[:: max(1, len(found) // few)]


@pytest.mark.parametrize("model", [TINY, WINDOWS], ids=["plain", "windows"])
def test_a_program_has_the_slots_that_memory_counts(model):
    config, candidates = drawn(model, "cpu:1x4", few=6)
    for candidate in candidates:
        plan = evaluation.plan_of(evaluation._outcome(candidate), {})
        step = Step(plan, build_model(config, abstract=True), None, train=False)
        program = step.program
        assert program.prefixes.num_slots == 1
        if plan.weights == "gathered" and len(plan.chunk_lengths) >= plan.mesh.pipe:
            assert program.weights.num_slots == slot_counts(plan.mesh.pipe, plan.schedule.interleave, "keep")[0]
        held = evaluation.predict_forward_memory(plan.outline(), candidate.layout.shape, plan.stash)
        assert held.hbm["kv"] == sum(2 * np.prod(shape) * 4 for shape in step._cache_shapes())


@pytest.mark.parametrize("schedule", ["sppo", "breadth-first"])
def test_a_plan_of_an_evaluation_scores_like_that_of_a_step(x64, schedule):
    config, candidates = drawn(WINDOWS, "cpu:1x4", few=10**6)
    config = replace(config, model=replace(config.model, compute_dtype="float64"))
    candidate = next(
        one
        for one in candidates
        if one.partition.schedule == schedule and one.partition.num_chunks > 1 and one.layout.mesh.seq == 4
    )
    model = build_model(config)
    batch = random_batch(np.random.default_rng(0), 1, 1024, 96)
    losses = []
    alone = evaluation.plan_of(evaluation._outcome(drawn(WINDOWS, "cpu:1x1", few=1)[1][0]), {})
    for plan in (evaluation.plan_of(evaluation._outcome(candidate), {}), alone):
        losses.append(jax.device_get(evaluate(plan, model)(nnx.state(model, nnx.Param), batch).losses_BS))
    assert np.abs(losses[0]).max() > 1
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-9, atol=1e-12)
