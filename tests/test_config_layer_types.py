"""Patterns of layers, and what their kinds replace."""

import pytest

from sppo_jax.config import DeltaConfig, config_from_dict
from sppo_jax.config.layer_types import parse_layers
from sppo_jax.config.load import to_dict
from sppo_jax.config.section import ConfigError

MODEL = dict(vocab_size=24, hidden_size=16, num_heads=2, mlp_size=32)
LOCAL = dict(num_heads=4, head_dim=6, rope={"theta": 100})


def model_of(**settings):
    return config_from_dict({"model": MODEL | settings, "sequence": {"length": 64}, "train": {"steps": 1}}).model


@pytest.mark.parametrize(
    ("pattern", "kinds"),
    [
        ("a", "a"),
        (" 2 x a , b", "aab"),
        ("2x(2xa,b),a", "aabaaba"),
        ("2x(a,2x(b,c))", "abcbcabcbc"),
        ("(a),(b)", "ab"),
    ],
)
def test_a_pattern_names_each_layer(pattern, kinds):
    assert parse_layers(pattern) == tuple(kinds)


@pytest.mark.parametrize(
    "pattern", ["", " ", "a,", ",a", "2x", "(a", "a)", "0xa", "2x2xa", "a b", "10001xa", "2a", "a-b"]
)
def test_what_is_no_pattern_is_refused(pattern):
    with pytest.raises(ConfigError, match="model.layers must be names of layer types"):
        parse_layers(pattern)


def test_a_kind_is_the_model_with_other_settings():
    model = model_of(layers="2x(2xlocal,full)", layer_types={"local": LOCAL}, qk_norm=True)
    local = model.of_type("local")
    assert model.num_layers == local.num_layers == 6
    assert (local.num_heads, local.num_kv_heads, local.head_dim, local.rope.theta) == (4, 2, 6, 100)
    assert local.qk_norm and local.rope.scaling == model.rope.scaling
    assert model.of_type("full") == model_of(num_layers=6, qk_norm=True)
    assert model.counts(3) == [(local, 2), (model.of_type("full"), 1)]


def test_a_config_with_kinds_is_read_back():
    settings = {"model": MODEL | dict(layers="3xlocal,full", layer_types={"local": LOCAL}), "sequence": {"length": 64}}
    config = config_from_dict(settings | {"train": {"steps": 1}})
    again = config_from_dict(to_dict(config))
    assert again == config and hash(again) == hash(config)


def test_the_kind_delta_needs_no_entry_and_follows_the_heads_of_the_model():
    model = model_of(layers="2x(delta,full)", num_heads=4, num_kv_heads=2)
    delta = model.of_type("delta")
    assert (model.mixer, delta.mixer, model.of_type("full").mixer) == ("attention", "delta", "attention")
    assert delta.delta == DeltaConfig(value_heads=4, key_heads=2, key_size=4, value_size=4, taps=4)
    assert model.delta == DeltaConfig() and model.stacks == {"delta": ("delta",), "full": ("full",)}
    assert model.shared_heads == (4, 2) and model.attention_types == [model.of_type("full")]
    own = model_of(
        layers="3xdelta,full", delta={"value_size": 6}, layer_types={"delta": {"delta": {"taps": 2}, "mlp_size": 9}}
    )
    assert own.of_type("delta").delta == DeltaConfig(value_heads=2, key_heads=2, key_size=8, value_size=6, taps=2)
    assert own.of_type("delta").mlp_size == 9
    other = model_of(
        layers="2x(linear,full)",
        layer_types={
            "linear": {"mixer": "delta"},
        },
    )
    assert other.of_type("linear").delta.value_heads == 2
    whole = model_of(num_layers=2, mixer="delta", sliding_window=8)
    assert whole.of_type("full") == whole and whole.delta.value_heads == 2
    assert whole.shared_heads == (2, 2) and whole.shared_window(64) == 0


def test_layers_of_one_kind_are_the_model_itself():
    model = model_of(num_layers=4)
    assert model.counts(2) == [(model, 2)] and model.of_type("full") == model


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(layers="3xfull", num_layers=4), "must name model.num_layers=4 layers, got 3"),
        (dict(layers="2xother"), "got other; use one of full, delta, or add model.layer_types.other"),
        (dict(layers="2xfull", layer_types={"local": LOCAL}), "got local, which no layer has"),
        (dict(num_layers=2, layer_types={"local": LOCAL}), "must have model.layers"),
        (
            dict(layers="2xlocal", layer_types={"local": {"num_heads": 3, "num_kv_heads": 2}}),
            "model.layer_types.local: model.num_heads",
        ),
        (
            dict(layers="2xlocal", layer_types={"local": {"window": 3}}),
            "model.layer_types.NAME.window is not a setting",
        ),
        (
            dict(layers="2xlocal", layer_types={"local": {"rope": {"base": 3}}}),
            "model.layer_types.local: model.rope.base is not",
        ),
        (
            dict(layers="2xkda,full"),
            "types of model.layer_types, full or delta, got kda; use one of full, delta, or add",
        ),
        (
            dict(layers="2xmamba,full", layer_types={"mamba": {"mixer": "mamba"}}),
            "model.layer_types.NAME.mixer must be attention | delta, or null, got 'mamba'",
        ),
        (
            dict(layers="2xdelta", delta={"value_heads": 3, "key_heads": 2}),
            "model.layer_types.delta: model.delta.value_heads must be a multiple of model.delta.key_heads, got 3 and 2",
        ),
        (dict(num_layers=2, delta={"taps": 0}), "model.delta.taps must be at least 1, got 0"),
        (dict(layers="2xlocal", layer_types={"local": 3}), "a section of settings, got"),
        (dict(num_layers=2, norms="none"), "model.norms must be before | behind | both, got 'none'"),
        (
            dict(num_layers=2, qk_norm_over_heads=True),
            "model.qk_norm_over_heads must have model.qk_norm=true, got true",
        ),
        (dict(num_layers=2, embedding_scale=0), "model.embedding_scale must be above 0, got 0.0; use 1"),
        (dict(num_layers=2, query_scale=-1), "model.query_scale must be above 0, or null, got -1.0; use null for none"),
        (dict(num_layers=2, logit_cap=-1), "model.logit_cap must be above 0, or null, got -1.0; use null for none"),
        (
            dict(layers="2xlocal", qk_norm=True, qk_norm_over_heads=True, layer_types={"local": {"qk_norm": False}}),
            "model.layer_types.local: model.qk_norm_over_heads must have",
        ),
    ],
)
def test_what_does_not_fit_together_is_refused_in_a_line(settings, message):
    with pytest.raises(ConfigError) as error:
        model_of(**settings)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_counts_of_a_group_are_shares_of_all_layers():
    """Kinds of one shape are rounded to whole layers, of other shapes each share is whole."""
    kinds = {"local": {"sliding_window": 8}, "wide": {"mlp_size": 9}}
    model = model_of(layers="2x(2xlocal,full,3xwide)", layer_types=kinds)
    assert model.stacks == {"local+full": ("local", "full"), "wide": ("wide",)}
    for num_layers, counts in {12: (4, 2, 6), 6: (2, 1, 3), 4: (1, 1, 2), 2: (0, 1, 1)}.items():
        assert tuple(count for _, count in model.counts(num_layers)) == counts
