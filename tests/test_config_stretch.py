"""Sequences beyond the positions of a published model: a warning with the scaling that would do."""

import json
import warnings

import pytest
from hf_configs import PUBLISHED, SMALL

from sppo_jax.commands import command
from sppo_jax.config import config_from_dict
from sppo_jax.config.hf.families import FAMILIES
from sppo_jax.config.hf.language import language_config
from sppo_jax.config.hf.positions import PRESET_POSITIONS
from sppo_jax.config.presets import PRESETS
from sppo_jax.config.stretch import warn_beyond_length

YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=8192)


def told(folder, content, length, **rope):
    """Returns the warnings about a model's length."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(content))
    return told_of({"hf": str(folder)}, length, **rope)


def told_of(model, length, **rope):
    """Returns the warnings about the length of a model that is named."""
    model = {**model, **({"rope": rope} if rope else {})}
    config = config_from_dict({"model": model, "sequence": {"length": length}, "train": {"steps": 1}})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_beyond_length(config)
    return [str(warning.message) for warning in caught], config


@pytest.mark.parametrize(
    ("content", "length", "rope", "known", "change"),
    [
        (SMALL, 16384, {}, 8192, "model.rope.scaling=yarn model.rope.factor=2"),
        (SMALL, 8193, {}, 8192, "model.rope.scaling=yarn model.rope.factor=2"),
        (SMALL, 65536, {"scaling": "yarn", "factor": 4}, 32768, "model.rope.scaling=yarn model.rope.factor=8"),
        (SMALL, 65536, {"scaling": "linear", "factor": 4}, 32768, "model.rope.scaling=linear model.rope.factor=8"),
        ({**SMALL, "rope_scaling": YARN}, 131072, {}, 32768, "model.rope.scaling=yarn model.rope.factor=16"),
        (
            {**SMALL, "rope_scaling": {"type": "linear", "factor": 2.0}},
            16384,
            {},
            8192,
            "model.rope.scaling=linear model.rope.factor=4",
        ),
        (PUBLISHED["llama3.2-1b"], 262144, {}, 131072, "model.rope.scaling=llama3 model.rope.factor=64"),
        (PUBLISHED["llama2-7b"], 32768, {}, 4096, "model.rope.scaling=yarn model.rope.factor=8"),
        # Trained on 32,768 tokens, which its 40,960 positions do not say.
        (PUBLISHED["qwen3-8b"], 262144, {}, 40960, "model.rope.scaling=yarn model.rope.factor=8"),
        (
            PUBLISHED["qwen3-8b"],
            131073,
            {"scaling": "yarn", "factor": 4},
            131072,
            "model.rope.scaling=yarn model.rope.factor=5",
        ),
    ],
)
def test_sequences_beyond_the_positions_are_told_of(tmp_path, content, length, rope, known, change):
    (text,), _ = told(tmp_path / "hf", content, length, **rope)
    assert f"should be at most {known}, the positions of" in text and f"got {length}; set {change}" in text
    assert "\n" not in text
    changed = dict(part.split("=") for part in change.replace("model.rope.", "").split())
    assert told(tmp_path / "hf", content, length, **changed)[0] == []  # the factor that is named would do


@pytest.mark.parametrize(
    ("content", "length", "rope"),
    [
        (SMALL, 8192, {}),
        (SMALL, 32768, {"scaling": "yarn", "factor": 4}),
        (SMALL, 32768, {"theta": 8e6}),  # another way to longer sequences
        ({**SMALL, "rope_scaling": YARN, "max_position_embeddings": 8192}, 32768, {}),
        (PUBLISHED["llama3.2-1b"], 131072, {}),
        (PUBLISHED["qwen3-8b"], 40960, {}),
        (PUBLISHED["qwen3-8b"], 131072, {"scaling": "yarn", "factor": 4}),  # as its model card has it
        ({**SMALL, "model_type": "mistral", "architectures": None, "sliding_window": 64}, 10**6, {}),
    ],
)
def test_sequences_that_the_rotation_suits_are_not(tmp_path, content, length, rope):
    assert told(tmp_path / "hf", content, length, **rope)[0] == []


def test_presets_are_published_models_too():
    text = "; set model.rope.scaling=yarn model.rope.factor=8 model.rope.original_length=32768, or raise"
    ((line,), _) = told_of({"preset": "qwen3-8b"}, 262144)
    assert "at most 40960, the positions of preset qwen3-8b with" in line and text in line
    yarn = {"scaling": "yarn", "factor": 8, "original_length": 32768}
    assert told_of({"preset": "qwen3-8b"}, 262144, **yarn)[0] == []
    assert told_of({"preset": "llama3.1-8b"}, 131072)[0] == told_of({"preset": "gpt-7b"}, 131072)[0] == []


def test_positions_of_presets_are_those_of_their_folders():
    assert set(PRESETS) - set(PRESET_POSITIONS) == {
        name for name in PRESETS if name.startswith("gpt-") and "oss" not in name
    }
    for name, content in PUBLISHED.items():
        content = language_config(content)
        positions = content.get("max_position_embeddings") or FAMILIES[content["model_type"]].max_length
        assert PRESET_POSITIONS.get(name, (content["model_type"], positions)) == (content["model_type"], positions)


def test_a_base_is_raised_where_yarn_would_stretch_layers_with_a_window_too(tmp_path):
    layers = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2}
    content = {**PUBLISHED["qwen2.5-0.5b"], **layers, "num_hidden_layers": 4, "layer_types": None}
    (line,), _ = told(tmp_path / "hf", content, 131072)
    assert line.endswith("got 131072; set model.rope.theta=4.18e+06")
    assert told(tmp_path / "hf", content, 131072, theta=4.18e6)[0] == []


def test_a_run_without_its_folder_is_not(tmp_path):
    _, config = told(tmp_path / "hf", SMALL, 16384)
    (tmp_path / "hf" / "config.json").unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_beyond_length(config)


def test_commands_tell(tmp_path):
    told(tmp_path / "hf", SMALL, 8)
    path = tmp_path / "c.yaml"
    path.write_text(f"model: hf:{tmp_path / 'hf'}\nsequence: {{length: 32768}}\ntrain: {{steps: 1}}\n")
    args = command.config_parser("plan", "").parse_args([str(path)])
    with pytest.warns(UserWarning, match="model.rope.factor=4"):
        command.load(args)
