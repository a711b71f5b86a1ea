"""The config reads YAML, refuses what is wrong in one line, and writes itself back."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from sppo_jax.config import ConfigError, SequenceConfig, config_from_dict, load_config, to_yaml

CONFIGS = Path(__file__).parent.parent / "configs"


def settings(**groups) -> dict:
    base = {
        "model": {"vocab_size": 257, "hidden_size": 64, "num_layers": 4, "num_heads": 4, "mlp_size": 192},
        "mesh": {"data": 1, "pipe": 1, "seq": 1},
        "sequence": {"length": 4096},
        "train": {"steps": 10},
    }
    return {key: {**base.get(key, {}), **groups.get(key, {})} for key in {**base, **groups}}


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(settings()))
    return path


def test_yaml_round_trip(path):
    config = load_config(path, ["sequence.chunks=[2048,1024,1024]", "stash.alpha=[0, 0.5]", "optimizer.lr=3e-3"])
    assert config.sequence.chunks == (2048, 1024, 1024)
    assert config.optimizer.lr == 3e-3
    assert config_from_dict(yaml.safe_load(to_yaml(config))) == config


def test_a_pattern_of_files_needs_no_quotes(path):
    assert load_config(path, ["data.source=*.txt"]).data.source == "*.txt"


@pytest.mark.parametrize("path", sorted(CONFIGS.rglob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_config_loads(path):
    config = load_config(path)
    assert config_from_dict(yaml.safe_load(to_yaml(config))) == config


def test_head_sizes_are_filled_in(path):
    assert load_config(path).model.head_dim == 16
    assert load_config(path, ["model.num_heads=8"]).model.num_kv_heads == 8


def test_a_preset_fills_what_is_not_given(path):
    from sppo_jax.config.presets import PRESETS

    name, shape = next(iter(PRESETS.items()))
    path.write_text(yaml.safe_dump({**settings(), "model": {"preset": name, "num_layers": 2}}))
    model = load_config(path).model
    assert (model.num_layers, model.hidden_size) == (2, shape["hidden_size"])
    path.write_text(yaml.safe_dump({**settings(), "model": {"preset": name[:-1]}}))
    with pytest.raises(ConfigError, match="did you mean"):
        load_config(path)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.hiden_size=3", "model.hiden_size is not a setting; the nearest setting is model.hidden_size"),
        ("sequenc.length=3", "sequenc is not a setting; the nearest setting is sequence"),
        ("model.rope.teta=3", "model.rope.teta is not a setting; the nearest setting is model.rope.theta"),
        (
            "sequence.split=rign",
            "sequence.split must be auto | ulysses | ring | hybrid, got 'rign'; did you mean ring?",
        ),
        ("train.steps=1.5", "train.steps must be a whole number, got 1.5"),
        ("train.steps=true", "train.steps must be a whole number, got True"),
        ("train=null", "train.steps must be given, got none; add it to the config"),
        ("model=3", "model must be a section of settings, got 3; write key: value lines under it"),
        ("steps", "an override must read section.key=value, got 'steps'; write e.g. train.steps=10"),
        ("mesh.pipe=0", "mesh.pipe must be at least 1, got 0; use"),
        ("optimizer.lr=.nan", "optimizer.lr must be a number, got .nan"),
        ("optimizer.lr=[", "settings must be YAML, got optimizer.lr=["),
        ("model.dropout=0.1", "model.dropout must be 0"),
        ("model.num_kv_heads=3", "model.num_heads must be a multiple of model.num_kv_heads, got 4 and 3"),
        ("model.hidden_size=66", "model.hidden_size must be a multiple of model.num_heads"),
        (
            "model.rope.scaling=yarn",
            "model.rope.original_length must be the length on which the model was trained, at least 1, where "
            "model.rope.scaling=yarn, got null; set the length",
        ),
        ("sequence.chunks=[1,2]", "sequence.chunks must add up to sequence.length=4096, got 3"),
        ("sequence.chunks=0", "sequence.chunks must be auto, a count or lengths of at least 1, got 0"),
        ("sequence.ulysses=2", "sequence.ulysses=2 must divide mesh.seq, got mesh.seq=1"),
        ("schedule.name=table", "schedule.table (a CSV file) must be given with schedule.name=table"),
        ("stash.alpha=1.5", "stash.alpha must be auto or in [0, 1], got 1.5"),
        ("train.devices=cpu:2", "train.devices must match mesh.data * mesh.pipe * mesh.seq = 1, got cpu:2"),
        ("mesh.pipe=many", "mesh.pipe must be auto, or a whole number, got 'many'"),
        ("schedule.interleave=0", "schedule.interleave must be at least 1, got 0; use"),
        ("sequence.per_step=-1", "sequence.per_step must be at least 1, got -1; use sequence.per_step=1 or more"),
        ("planner=serch", "planner must be search | paper, got 'serch'; did you mean search?"),
        ("train.devices=gpu", "train.devices must be auto or cpu:N, got gpu"),
        ("optimizer.warmup_steps=11", "optimizer.warmup_steps must be at most train.steps = 10, got 11"),
    ],
)
def test_wrong_settings_are_refused_in_one_line(path, override, message):
    with pytest.raises(ConfigError) as error:
        load_config(path, [override])
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (
            dict(mesh={"pipe": 3}, train={"devices": "cpu:8"}),
            "train.devices must be a multiple of mesh.pipe = 3",
        ),
        (
            dict(sequence={"per_step": 4}, mesh={"data": 3}),
            "mesh.data must divide sequence.per_step=4, got mesh.data=3",
        ),
        (
            dict(sequence={"per_step": 8, "per_pipeline": 2}, mesh={"data": 2}),
            "sequence.per_step must be mesh.data * sequence.per_pipeline = 4, got 8",
        ),
        (
            dict(sequence={"per_step": 3, "per_pipeline": 2}),
            "sequence.per_step must be a multiple of sequence.per_pipeline = 2, got 3",
        ),
    ],
)
def test_axes_that_do_not_go_together_are_refused(groups, message):
    with pytest.raises(ConfigError) as error:
        config_from_dict({**settings(**{"train": {}, "sequence": {}, **groups}), "mesh": groups.get("mesh", {})})
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("mesh", "sequence", "expected"),
    [
        ({}, {}, 1),
        ({}, {"per_pipeline": 3}, 3),
        ({"data": 2}, {"per_pipeline": 3}, 6),
        ({}, {"per_step": 12}, 12),
        ({"data": 4}, {"per_step": 12}, 12),
    ],
)
def test_sequences_of_a_step(mesh, sequence, expected):
    config = config_from_dict({**settings(sequence=sequence), "mesh": mesh})
    assert config.num_sequences == expected
    assert config.mesh.pinned == mesh


def test_the_same_checks_hold_for_a_dataclass_built_by_hand():
    with pytest.raises(ConfigError, match="sequence.split must be"):
        SequenceConfig(length=8, split="rign")


def test_a_missing_setting_and_a_missing_file_are_named(tmp_path):
    with pytest.raises(ConfigError, match="train.steps must be given"):
        config_from_dict({**settings(), "train": {}})
    with pytest.raises(ConfigError, match="a config must be a readable YAML file"):
        load_config(tmp_path / "none.yaml")


@given(st.text(max_size=20))
def test_any_override_gives_a_config_or_one_line(tmp_path_factory, text):
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_text(yaml.safe_dump(settings()))
    for override in (text, f"sequence.chunks={text}", f"data.source={text}"):
        try:
            load_config(path, [override])
        except ConfigError as error:
            assert "\n" not in str(error)


def test_the_config_imports_no_jax():
    code = "import sys, sppo_jax, sppo_jax.config, sppo_jax.config.presets; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
