"""Sequences beyond the positions of an imported model: a warning with the scaling that would do."""

import json
import warnings

import pytest
from hf_configs import PUBLISHED, SMALL

from sppo_jax.commands import command
from sppo_jax.config import config_from_dict
from sppo_jax.config.hf_length import warn_beyond_length

YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=8192)


def told(folder, content, length, **rope):
    """Returns the warnings about a model's length."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(content))
    model = {"hf": str(folder), **({"rope": rope} if rope else {})}
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
    ],
)
def test_sequences_that_the_rotation_suits_are_not(tmp_path, content, length, rope):
    assert told(tmp_path / "hf", content, length, **rope)[0] == []


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
