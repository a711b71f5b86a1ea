"""Recall beyond a chunk is learnt through the gradient that crosses chunks: cut, the same training stays at chance."""

import json
from pathlib import Path

import pytest

from bench import figures, recall
from sppo_jax.config import load_config
from sppo_jax.search.make import make_plan

CONFIG = Path(__file__).parents[1] / "configs" / "recall.yaml"
# Smaller in everything, of the same make: ring of 2, 2 stages, 4 chunks, every distance longer than a chunk and odd.
SMALL = [
    "sequence.length=80",
    "data.recall.distances=[21,41,61]",
    "data.recall.pairs=3",
    "data.recall.values=8",
    "model.vocab_size=11",
    "model.hidden_size=32",
    "model.mlp_size=64",
    "train.steps=160",
    "train.eval_every=0",
    "train.eval_sequences=512",
]


@pytest.mark.parametrize("overrides", [[], SMALL], ids=["as it stands", "small"])
def test_every_fact_lies_in_another_chunk_and_on_another_ring_member_than_its_question(overrides):
    config = load_config(CONFIG, overrides)
    plan = make_plan(config)
    assert (plan.ring, plan.mesh.pipe) == (2, 2) and len(plan.chunk_lengths) == 4
    distances = config.data.recall.distances
    assert min(distances) > max(plan.chunk_lengths)
    assert all(distance % plan.ring for distance in distances)
    # All facts in the first chunk, so that no question shares a chunk with one.
    assert config.sequence.length - max(distances) <= plan.chunk_lengths[0]


def train_both(overrides):
    config = load_config(CONFIG, overrides)
    runs = {name: recall.train(config, cut=name == recall.CUT, show=False) for name in (recall.WHOLE, recall.CUT)}
    return config, runs, *(points[-1] for points in runs.values())


def most_by_chance(config, num_answers):
    """Four standard errors above a guess."""
    chance = 1 / config.data.recall.values
    return chance + 4 * (chance * (1 - chance) / num_answers) ** 0.5


@pytest.mark.slow
def test_recall_is_learnt_through_gradients_of_later_chunks_alone(tmp_path, monkeypatch):
    config, runs, whole, cut = train_both(SMALL)
    assert whole["accuracy"] > 0.95
    assert cut["accuracy"] < most_by_chance(config, cut["num_answers"])
    monkeypatch.setattr(figures, "draw", figures.digest)
    recall.write_results(config, runs, tmp_path, "recall_cpu", tmp_path / "recall.svg")
    report = json.loads((tmp_path / "recall_cpu.json").read_text())
    assert report["chance"] == 1 / config.data.recall.values
    (panel,) = recall.picture(report)
    assert [series.name for series in panel.series] == [recall.WHOLE, recall.CUT, "chance"]
    assert [series.y[-1] for series in panel.series] == [whole["accuracy"], cut["accuracy"], report["chance"]]
    assert (tmp_path / "recall.svg").read_text() == figures.digest([panel])
    assert "| cut at chunks |" in (tmp_path / "recall_cpu.md").read_text()


@pytest.mark.slow
def test_recall_is_learnt_where_chunks_pass_one_group_of_layers_at_a_time():
    # One stage, for with two there would be four layers, which learn more slowly in either order.
    order = ["mesh.pipe=1", "train.devices=cpu:2", "schedule.name=breadth-first", "schedule.interleave=2"]
    settings = [*order, "schedule.wave=16", "stash.kv=rebuild", "mesh.weights=gathered"]
    config, _, whole, cut = train_both([*SMALL, *settings])
    assert whole["accuracy"] > 0.95
    assert cut["accuracy"] < most_by_chance(config, cut["num_answers"])


@pytest.mark.slow
def test_the_config_learns_every_distance_and_nothing_without_gradients_of_later_chunks():
    config, _, whole, cut = train_both([])
    assert min(recall["accuracy"] for recall in whole["recall_by_distance"]) >= 0.95
    assert cut["accuracy"] < most_by_chance(config, cut["num_answers"])
