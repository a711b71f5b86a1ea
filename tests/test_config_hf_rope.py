"""Rotary settings of a config.json: read from every place and in every spelling, refused where places disagree."""

import copy
import json
from dataclasses import fields, replace

import pytest
import transformers
from hf_configs import SMALL

from sppo_jax.config import ConfigError, ModelConfig, config_from_dict
from sppo_jax.config.hf.families import shape_from_hf
from sppo_jax.config.hf.rope import rope_from_hf, rope_to_hf
from sppo_jax.config.rope import RopeConfig

YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=2048)
PLAIN = {key: value for key, value in SMALL.items() if key != "rope_theta"}
BOTH = dict(
    layer_types=["full_attention", "sliding_attention"] * 2,
    model_type="qwen3",
    architectures=None,
    use_sliding_window=True,
    sliding_window=8,
)


def rope_of(**settings):
    return ModelConfig(**shape_from_hf({**PLAIN, **settings})).rope


@pytest.mark.parametrize(
    "settings",
    [
        dict(rope_theta=7e5, rope_scaling=YARN),
        dict(rope_parameters={**YARN, "rope_theta": 7e5}),
        dict(rope_parameters={**YARN, "rope_theta": 7e5}, rope_scaling=YARN, rope_theta=700_000),
        dict(rope_scaling={**YARN, "rope_theta": 7e5, "type": "yarn"}, rope_parameters={}),
        dict(rope_parameters={"rope_theta": 7e5, "type": "yarn", "factor": 4}, original_max_position_embeddings=2048),
        dict(rope_parameters={"full_attention": {**YARN, "rope_theta": 7e5}}),
        dict(rope_parameters={"full_attention": YARN, "sliding_attention": YARN}, rope_theta=7e5),
        dict(rope_parameters={"full_attention": YARN, "rope_theta": 7e5}),
        dict(rope_parameters={"full_attention": {**YARN, "rope_theta": 7e5}, "sliding_attention": {"rope_theta": 1e4}},
             layer_types=["full_attention"] * 4),
        dict(rope_theta=7e5, rope_scaling=YARN, rope_parameters=None, partial_rotary_factor=1),
        dict(rope_type="yarn", rope_theta=7e5, rope_scaling=YARN),
    ],
)  # fmt: skip
def test_every_place_and_spelling_gives_the_same_rotation(settings):
    expected = RopeConfig(theta=7e5, scaling="yarn", factor=4.0, original_length=2048)
    got = rope_of(**settings)
    assert {spec.name: getattr(got, spec.name) for spec in fields(got)} == {
        spec.name: getattr(expected, spec.name) for spec in fields(expected)
    }


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("rope_type", dict(rope_parameters={"rope_type": "default", "rope_theta": 7e5}, rope_scaling=YARN)),
        ("rope_type", dict(rope_parameters={"rope_theta": 7e5}, rope_scaling=YARN)),
        ("rope_type", dict(rope_parameters=YARN, rope_scaling={"factor": 4.0})),
        ("rope_type", dict(rope_scaling={**YARN, "type": "linear"})),
        ("rope_type", dict(rope_type="yarn", rope_parameters={"rope_theta": 7e5})),
        ("rope_theta", dict(rope_theta=1e4, rope_parameters={"rope_type": "default", "rope_theta": 7e5})),
        ("rope_theta", dict(rope_theta=1e4, rope_scaling={**YARN, "rope_theta": 7e5})),
        ("rope_theta", dict(rope_parameters={"full_attention": {"rope_theta": 1e6}}, rope_theta=1e4)),
        (
            "rope_theta",
            dict(rope_parameters={"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}),
        ),
        ("rope_type", dict(rope_parameters={"full_attention": YARN, "sliding_attention": {"rope_theta": 1e4}}, **BOTH)),
        ("factor", dict(rope_parameters=YARN, rope_scaling={**YARN, "factor": 8.0})),
        ("original_max_position_embeddings", dict(rope_scaling=YARN, original_max_position_embeddings=4096)),
        ("beta_fast", dict(rope_scaling={**YARN, "beta_fast": 16}, rope_parameters={**YARN, "beta_fast": 32})),
        ("partial_rotary_factor", dict(partial_rotary_factor=1, rope_parameters={"partial_rotary_factor": 0.5})),
        ("truncate", dict(rope_scaling={**YARN, "truncate": True}, rope_parameters={**YARN, "truncate": False})),
    ],
)
def test_places_that_disagree_are_refused_by_name(tmp_path, name, settings):
    (tmp_path / "config.json").write_text(json.dumps({**PLAIN, **settings}))
    with pytest.raises(ConfigError, match=f"the rotary setting {name} must be the same in every place, got") as error:
        config_from_dict({"model": f"hf:{tmp_path}", "sequence": {"length": 64}, "train": {"steps": 1}})
    assert "\n" not in str(error.value) and " in rope_" in str(error.value)


LINEAR = {"rope_type": "linear", "factor": 8.0}
BY_TYPE = [
    dict(),
    dict(rope_theta=7e5),
    dict(rope_theta=7e5, rope_scaling=LINEAR),
    dict(rope_theta=7e5, rope_scaling=YARN),
    dict(rope_parameters={"full_attention": LINEAR}, rope_theta=7e5),
    dict(rope_parameters={"full_attention": LINEAR, "sliding_attention": {"rope_type": "default", "rope_theta": 5e4}}),
    dict(rope_parameters={"sliding_attention": LINEAR}),
]


@pytest.mark.parametrize("family", ["gemma3_text", "olmo3"])
@pytest.mark.parametrize("settings", [*BY_TYPE, dict(rope_theta=7e5, rope_local_base_freq=3e4)])
def test_rotations_by_layer_type_are_those_of_transformers(family, settings):
    """OLMo 3's windowed layers have a base of 500000 there, whatever `rope_theta` says."""
    if family == "olmo3":
        settings = {key: value for key, value in settings.items() if key != "rope_local_base_freq"}
    base = {key: value for key, value in PLAIN.items() if key != "architectures"} | {"head_dim": 16}
    base |= dict(layer_types=["sliding_attention", "full_attention"] * 2, model_type=family)
    model = ModelConfig(**shape_from_hf({**base, **settings}))
    kinds = {"sliding_attention": model.of_type("local").rope, "full_attention": model.rope}
    theirs = transformers.AutoConfig.for_model(**copy.deepcopy({**base, **settings})).rope_parameters
    for name, rope in kinds.items():
        scaling = {"none": "default"}.get(rope.scaling, rope.scaling)
        assert (rope.theta, scaling) == (theirs[name]["rope_theta"], theirs[name]["rope_type"])
        assert rope.factor == theirs[name].get("factor", 1.0)
        if rope.scaling == "yarn":
            assert rope.original_length == theirs[name]["original_max_position_embeddings"]


@pytest.mark.parametrize("kind", [{}, {"type": "default"}, {"rope_type": "default"}])
@pytest.mark.parametrize("place", ["rope_parameters", "rope_scaling"])
def test_a_factor_without_a_kind_of_scaling_is_refused(place, kind):
    with pytest.raises(ValueError, match="the rotary setting factor must be 1, got 4"):
        rope_from_hf({place: {**kind, "factor": 4.0}}, 64)
    assert rope_from_hf({place: {**kind, "factor": 1.0}}, 64)["scaling"] == "none"


@pytest.mark.parametrize("place", ["rope_parameters", "rope_scaling"])
def test_a_ramp_between_any_two_frequencies_is_read_and_written_and_left_out_where_it_is_rounded(place):
    rope = rope_of(**{place: {**YARN, "truncate": False}})
    assert not rope.truncate and rope_of(**{place: YARN}) == replace(rope, truncate=True)
    written = rope_to_hf(rope)
    assert written["rope_scaling"]["truncate"] is written["rope_parameters"]["truncate"] is False
    assert "truncate" not in rope_to_hf(replace(rope, truncate=True))["rope_scaling"]


@pytest.mark.parametrize("place", ["rope_parameters", "rope_scaling"])
def test_layers_without_a_rotation_are_refused(place):
    with pytest.raises(ValueError, match=f"{place}.full_attention must give rotary settings, got None"):
        rope_of(**{place: {"full_attention": None, "sliding_attention": {"rope_theta": 1e4}}}, **BOTH)


@pytest.mark.parametrize("where", ["top", "group", "layers"])
def test_a_rotation_of_a_part_of_a_head_is_refused_wherever_it_stands(where):
    part = {"partial_rotary_factor": 0.5}
    settings = {"top": part, "group": {"rope_scaling": part}, "layers": {"rope_parameters": {"full_attention": part}}}
    with pytest.raises(ValueError, match="partial_rotary_factor must be 1, got 0.5"):
        rope_of(**settings[where])
