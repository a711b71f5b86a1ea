"""What is special to a Gemma 3: a language model within a multimodal one, scales, and keys that may be left out."""

import json

import pytest
from hf_configs import PUBLISHED, SMALL

from sppo_jax.config import ConfigError, ModelConfig, config_from_dict
from sppo_jax.config.hf.families import read_shape, shape_from_hf
from sppo_jax.config.hf.language import language_config
from sppo_jax.config.to_hf import shape_to_hf

MULTIMODAL = PUBLISHED["gemma-3-27b"]
TEXT = {**SMALL, "model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "head_dim": 16}


def model_of(**changes):
    return ModelConfig(**shape_from_hf({**TEXT, **changes}))


def test_a_multimodal_config_is_that_of_its_language_model():
    found = language_config(MULTIMODAL)
    assert (found["model_type"], found["architectures"]) == ("gemma3_text", ["Gemma3ForCausalLM"])
    assert found["eos_token_id"] == [1, 106] and found["sliding_window"] == 1024
    assert not [key for key in found if "vision" in key or "image" in key]
    assert language_config(TEXT) == TEXT


def test_what_is_left_out_is_as_in_transformers():
    """As google/gemma-3-4b-pt is published."""
    text = dict(hidden_size=2560, intermediate_size=10240, num_hidden_layers=34, sliding_window=1024)
    model = ModelConfig(**shape_from_hf(language_config({"model_type": "gemma3", "text_config": text})))
    assert (model.vocab_size, model.num_heads, model.num_kv_heads, model.head_dim) == (262208, 8, 4, 256)
    assert (model.layers, model.tied_embeddings, model.query_scale) == ("5x(5xlocal,full),4xlocal", True, None)
    assert (model.rope.theta, model.of_type("local").rope.theta) == (1e6, 1e4)
    assert (model.norm_eps, model.rope.original_length) == (1e-6, 131072)


def test_scales_and_a_cap_are_read_and_written():
    model = model_of(query_pre_attn_scalar=168, final_logit_softcapping=30.0)
    assert (model.embedding_scale, model.query_scale, model.logit_cap) == (8.0, 168**-0.5, 30.0)
    content = shape_to_hf(model, like={}, length=0, dtype="float32")
    assert (content["query_pre_attn_scalar"], content["final_logit_softcapping"]) == (168, 30.0)
    assert ModelConfig(**shape_from_hf(content)) == model
    # A scale that is one over the root of the head size is that of other models.
    assert model_of(query_pre_attn_scalar=16).query_scale is None


@pytest.mark.parametrize(
    ("changes", "layers", "window", "theta"),
    [
        (dict(sliding_window_pattern=2), "2x(local,full)", None, 7e5),
        (dict(sliding_window_pattern=6), None, 4096, 2e4),
        (dict(layer_types=["full_attention"] * 4, sliding_window=None), None, None, 7e5),
    ],
)
def test_windowed_layers_have_a_rotation_of_their_own(changes, layers, window, theta):
    model = model_of(rope_theta=7e5, rope_local_base_freq=2e4, **changes)
    assert (model.layers, model.sliding_window, model.rope.theta) == (layers, window, theta)
    if layers:
        assert (model.of_type("local").rope.theta, model.of_type("local").sliding_window) == (2e4, 4096)
    again = ModelConfig(**shape_from_hf(shape_to_hf(model, like={}, length=0, dtype="float32")))
    assert again == model


@pytest.mark.parametrize("name", ["gemma-3-27b", "olmo-3-7b"])
def test_a_longer_rotation_is_that_of_layers_without_a_window(name):
    settings = {"preset": name, "rope": {"scaling": "yarn", "factor": 16, "original_length": 8192}}
    model = config_from_dict({"model": settings, "sequence": {"length": 64}, "train": {"steps": 1}}).model
    assert (model.rope.scaling, model.rope.factor) == ("yarn", 16)
    local = model.of_type("local").rope
    assert (local.scaling, local.factor) == ("none", 1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(attn_logit_softcapping=50.0), "attn_logit_softcapping must be null, got 50.0; choose another model"),
        (dict(use_bidirectional_attention=True), "use_bidirectional_attention must be false, got True"),
        (dict(hidden_activation="gelu"), "hidden_activation must be gelu_pytorch_tanh, got 'gelu'"),
        (dict(sliding_window=None), "sliding_window must be at least 1 in a gemma3_text, got 0"),
        (dict(rope_parameters={"rope_theta": 1e5}), "in a gemma3_text, got rope_theta for all layers"),
        (dict(architectures=["Gemma3ForSequenceClassification"]), "must be a language model (Gemma3ForCausalLM)"),
        (dict(sliding_window_pattern=0), "must hold values of the right types"),
        (dict(query_pre_attn_scalar=0), "must hold values of the right types"),
        (dict(model_type="olmo3", architectures=None, sliding_window=0), "at least 1 in a olmo3, got 0"),
    ],
)
def test_what_cannot_be_represented_is_refused_by_name(tmp_path, changes, words):
    (tmp_path / "config.json").write_text(json.dumps({**TEXT, **changes}))
    with pytest.raises(ConfigError) as error:
        config_from_dict({"model": f"hf:{tmp_path}", "sequence": {"length": 64}, "train": {"steps": 1}})
    assert words in str(error.value) and "\n" not in str(error.value)


def test_places_that_disagree_about_the_head_are_refused(tmp_path):
    text = {**MULTIMODAL["text_config"], "tie_word_embeddings": False}
    for top in (True, False):
        (tmp_path / "config.json").write_text(json.dumps(MULTIMODAL | dict(tie_word_embeddings=top, text_config=text)))
        if top:
            with pytest.raises(ValueError, match="must be the same in every place, got True and in text_config False"):
                read_shape(tmp_path)
        else:
            assert not read_shape(tmp_path)["tied_embeddings"]


def test_a_cap_that_transformers_does_not_read_is_refused():
    with pytest.raises(ValueError, match="final_logit_softcapping must be null in a gemma3, got 30.0, which"):
        language_config(MULTIMODAL | dict(text_config=MULTIMODAL["text_config"] | dict(final_logit_softcapping=30.0)))
