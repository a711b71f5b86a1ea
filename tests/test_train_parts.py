"""Optimizer, evaluation, metrics, progress and run directory, each by itself."""

import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from sppo_jax.config import MetricsConfig, OptimizerConfig, TrainConfig
from sppo_jax.config.reference import sentences
from sppo_jax.evaluation.validate import evaluate, position_edges
from sppo_jax.models.leaves import is_matrix
from sppo_jax.pipeline.api import TokenScores
from sppo_jax.train.metrics.memory_peak import peak_memory
from sppo_jax.train.metrics.meter import peak_flops_per_s
from sppo_jax.train.metrics.record import Progress
from sppo_jax.train.step import make_optimizer, make_schedule

STEP = {"step": 5, "loss": 2.5, "tokens_per_s": 1234.5, "step_s": 0.25, "mfu": None, "hbm_peak_bytes": None}
STEP |= {"places_per_s": 1240.0, "learning_rate": 1e-4}


@pytest.mark.parametrize(("warmup", "steps"), [(0, 1), (0, 10), (1, 10), (4, 10), (10, 10)])
def test_the_learning_rate_rises_to_its_peak_and_falls_to_its_floor(warmup, steps):
    schedule = make_schedule(OptimizerConfig(lr=1.0, warmup_steps=warmup, min_lr_ratio=0.1), steps)
    rates = np.array([float(schedule(step)) for step in range(steps + 1)])
    np.testing.assert_allclose(rates[:warmup], (1 + np.arange(warmup)) / max(warmup, 1), rtol=1e-6)
    cosine = 0.1 + 0.9 * (1 + np.cos(np.pi * np.arange(steps - warmup) / max(steps - warmup, 1))) / 2
    np.testing.assert_allclose(rates[warmup:steps], cosine, rtol=1e-5)
    if warmup < steps:
        np.testing.assert_allclose(rates[steps], 0.1, rtol=1e-5)


SPANS = [(0, 1), (0, 10), (1, 10), (4, 10), (10, 10)]


@pytest.mark.parametrize(("warmup", "steps"), SPANS)
def test_a_warm_up_from_zero_gives_the_rates_of_transformers_and_optax(warmup, steps):
    config = OptimizerConfig(lr=0.01, warmup_steps=warmup, warmup="from_zero", min_lr_ratio=0.1)
    schedule = make_schedule(config, steps)
    rates = [float(schedule(step)) for step in range(steps)]
    # The formula of transformers' get_cosine_with_min_lr_schedule_with_warmup.
    ramp = np.arange(warmup) / max(warmup, 1)
    progress = (np.arange(warmup, steps) - warmup) / max(steps - warmup, 1)
    decay = 0.1 + 0.9 * 0.5 * (1 + np.cos(np.pi * progress))
    np.testing.assert_allclose(rates, 0.01 * np.concatenate([ramp, decay]), rtol=1e-6)
    if warmup < steps:
        theirs = optax.warmup_cosine_decay_schedule(0.0, 0.01, warmup, steps, 0.001)
        np.testing.assert_allclose(rates, [float(theirs(step)) for step in range(steps)], rtol=1e-6)
    assert warmup == 0 or rates[0] == 0.0


def test_the_minimum_would_come_one_step_after_the_last_and_the_page_says_so():
    config = OptimizerConfig(lr=0.01, warmup_steps=4, min_lr_ratio=0.1)
    last = float(make_schedule(config, 10)(9))
    assert last == pytest.approx(0.01 * (0.1 + 0.45 * (1 + np.cos(np.pi * 5 / 6)))) and last > 1.6 * 0.001
    assert float(make_schedule(config, 10)(10)) == pytest.approx(0.001)
    texts = sentences(OptimizerConfig)
    assert "would come at step n, one step after the last one" in texts["min_lr_ratio"]
    assert "learning rate of the last step" not in texts["min_lr_ratio"]
    assert "would end one step after the last one" in sentences(TrainConfig)["steps"]


def params():
    def param(*shape):
        return nnx.Param(jnp.ones(shape))

    layers = {"up": param(2, 3, 4), "norm": {"scale": param(2, 3)}, "query_bias": param(2, 3, 4)}
    return nnx.State({"embedding": param(5, 3), "final_norm": {"scale": param(3)}, "layers": layers})


def test_only_matrices_decay():
    mask = nnx.to_pure_dict(jax.tree_util.tree_map_with_path(is_matrix, params()))
    assert mask == {
        "embedding": True,
        "final_norm": {"scale": False},
        "layers": {"up": True, "norm": {"scale": False}, "query_bias": False},
    }
    config = OptimizerConfig(lr=0.5, weight_decay=0.1)
    optimizer = make_optimizer(config, make_schedule(config, 10), params())
    zero = jax.tree.map(jnp.zeros_like, params())
    with jax.numpy_dtype_promotion("standard"):
        updates, _ = optimizer.update(zero, optimizer.init(params()), params())
    updates = nnx.to_pure_dict(updates)
    np.testing.assert_allclose(updates["layers"]["up"], -0.05, rtol=1e-6)
    assert not updates["layers"]["norm"]["scale"].any()


def test_validation_loss_by_position_is_the_mean_over_targets():
    generator = np.random.default_rng(0)
    batches = []
    for _ in range(3):
        positions = np.concatenate([np.arange(40), np.arange(24)])
        targets = generator.integers(-1, 3, (2, 64))
        batches.append({"targets": targets, "positions": np.stack([positions, np.arange(64)])})
    losses = [generator.random((2, 64)) for _ in batches]
    answers = iter(losses)
    found = evaluate(lambda params, batch: TokenScores(next(answers), None), None, batches, lambda batch: batch)

    targets = np.concatenate([batch["targets"] for batch in batches]) >= 0
    positions = np.concatenate([batch["positions"] for batch in batches])
    every = np.concatenate(losses)
    assert found.loss == pytest.approx(every[targets].mean())
    assert [(b.first, b.last) for b in found.buckets] == [(0, 3), (4, 7), (8, 15), (16, 31), (32, 63)]
    for bucket in found.buckets:
        inside = targets & (positions >= bucket.first) & (positions <= bucket.last)
        assert bucket.num_targets == inside.sum()
        assert bucket.loss == pytest.approx(every[inside].mean())
    assert json.loads(json.dumps(found.metrics()))["validation_loss"] == pytest.approx(found.loss)
    assert found.describe().count("\n") == 5 and found.gains == ()


def test_recall_is_the_share_of_hits_at_each_distance():
    generator = np.random.default_rng(0)
    batches, scores = [], []
    for _ in range(2):
        distances = generator.choice([0, 5, 9], (2, 16))
        targets = np.where(distances > 0, 1, -1)
        batches.append({"targets": targets, "positions": np.tile(np.arange(16), (2, 1)), "distances": distances})
        scores.append(TokenScores(np.ones((2, 16)), generator.random((2, 16)) < 0.5))
    answers = iter(scores)

    def place(batch):
        assert "distances" not in batch  # no part of what the model is given
        return batch

    found = evaluate(lambda params, batch: next(answers), None, batches, place)
    distances = np.concatenate([batch["distances"] for batch in batches])
    hits = np.concatenate([score.hits_BS for score in scores])
    assert [recall.distance for recall in found.recall] == [5, 9]
    for recall in found.recall:
        here = distances == recall.distance
        assert recall.num_targets == here.sum() and recall.accuracy == pytest.approx(hits[here].mean())
    assert json.loads(json.dumps(found.metrics()))["recall_by_distance"][1]["distance"] == 9
    assert "recall by distance" in found.describe()


def test_nothing_held_out_gives_no_validation():
    assert evaluate(None, None, [], None) is None


@pytest.mark.parametrize("length", [1, 2, 3, 7, 16, 4096, 2**20])
def test_position_buckets_cover_every_length(length):
    edges = position_edges(length)
    assert edges[0] == 0 and edges[-1] == length and len(edges) <= 13
    assert edges[1] == {4096: 32, 2**20: 512}.get(length, max(1, length // 16))
    batch = {"targets": np.zeros((1, length), int), "positions": np.arange(length)[None]}
    scores = TokenScores(np.ones((1, length)), None)
    found = evaluate(lambda params, batch: scores, None, [batch], lambda batch: batch)
    assert found.num_targets == sum(bucket.num_targets for bucket in found.buckets) == length


def test_peak_flops_are_as_configured_or_of_a_known_device():
    def device(platform, kind):
        return types.SimpleNamespace(platform=platform, device_kind=kind)

    auto = MetricsConfig()
    assert peak_flops_per_s(MetricsConfig(peak_flops=1e12), device("cpu", "cpu")) == 1e12
    assert peak_flops_per_s(auto, device("gpu", "NVIDIA H200")) == 989e12
    assert peak_flops_per_s(auto, device("gpu", "some card")) is None
    assert peak_flops_per_s(auto, device("cpu", "cpu")) is None


def test_peak_memory_is_known_for_the_host():
    memory = peak_memory()
    assert 10 * 2**20 < memory["host_peak_bytes"] < 2**42
    assert memory["hbm_peak_bytes"] is None or memory["hbm_peak_bytes"] > 0


def test_progress_is_plain_lines_off_a_terminal(capsys):
    progress = Progress(10)
    progress.log({**STEP, "token_accuracy": 0.456, "grad_norm": 1.234, "host_peak_bytes": 3 * 2**30})
    progress.say("between")
    progress.log({**STEP, "grad_norm": None, "places_per_s": 2469.0})
    progress.close()
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith(
        "step  5/10  loss 2.5000  accuracy 45.6%  norm 1.23  rate 1.00e-04  1,234 tokens/s  host 3.0 GiB  eta 00:0"
    )
    assert out[1] == "between"
    assert out[2].startswith(
        "step  5/10  loss 2.5000  norm not finite  rate 1.00e-04  1,234 tokens/s of 2,469 places/s  eta 00:0"
    )


def test_progress_is_a_bar_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    progress = Progress(10)
    progress.log(STEP)
    progress.log({**STEP, "step": 10, "places_per_s": 2469.0})
    progress.close()
    out = capsys.readouterr().out
    assert "\r" in out and "10/10" in out and "loss 2.5000, rate 1.00e-04, 1,234 tokens/s" in out
    assert "1,234 tokens/s of 2,469 places/s" in out
