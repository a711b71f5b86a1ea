"""config.json files as they are published, both ways, and as `model: hf:PATH` in a config; no weights, no jax."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import yaml
from hf_configs import PUBLISHED, SMALL
from hypothesis import given, settings
from hypothesis import strategies as st

from sppo_jax.config import ConfigError, ModelConfig, config_from_dict, load_config, to_yaml
from sppo_jax.config.hf.families import FAMILIES, read_shape, shape_from_hf
from sppo_jax.config.hf.language import language_config
from sppo_jax.config.load import to_dict
from sppo_jax.config.rope import RopeConfig
from sppo_jax.config.to_hf import shape_to_hf
from sppo_jax.models import PRESETS, apply_preset


def without_length(model):
    """Removes the length from an unscaled rotation: presets do not give the length, and nothing reads it."""
    rope = replace(model.rope, original_length=None) if model.rope.scaling == "none" else model.rope
    return replace(model, preset=None, rope=rope)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_the_preset_of_its_name(name):
    got, preset = ModelConfig(**shape_from_hf(language_config(PUBLISHED[name]))), ModelConfig(**apply_preset(name))
    if preset.experts.count:
        # As published, transformers adds no loss that balances experts; presets are for training, and add it.
        assert (got.experts.balance, preset.experts.balance) == (0.0, 0.001)
        got = replace(got, experts=replace(got.experts, balance=0.001))
    assert without_length(got) == without_length(preset)


# Of presets whose names do not begin like their types.
OWN_TYPES = {
    "gpt-oss-20b": "gpt_oss", "gemma-3-27b": "gemma3_text", "olmo-3-7b": "olmo3", "qwen3.5-0.8b": "qwen3_5_text",
    "qwen3.5-4b": "qwen3_5_text", "qwen3.5-9b": "qwen3_5_text", "qwen3.5-27b": "qwen3_5_text",
    "qwen3.6-35b-a3b": "qwen3_5_moe_text", "qwen3-next-80b-a3b": "qwen3_next",
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in PRESETS if name == "gpt-oss-20b" or name[:4] != "gpt-"])
def test_every_preset_survives_the_way_there_and_back(name):
    model = ModelConfig(**apply_preset(name))
    # Two families have the same shapes with experts.
    like = {"model_type": "qwen3_next"} if "next" in name else {}
    content = json.loads(json.dumps(shape_to_hf(model, like=like, length=0, dtype="bfloat16")))
    family = name.partition("-")[0].replace("2.5", "2") + ("_moe" if model.experts.count else "")
    assert content["model_type"] in OWN_TYPES.get(name, family) or name.startswith("mistral")
    for leave_out in ([], ["rope_parameters"], ["rope_theta", "rope_scaling"]):  # each place alone is enough
        kept = {key: value for key, value in content.items() if key not in leave_out}
        assert without_length(ModelConfig(**shape_from_hf(kept))) == without_length(model)


def test_lengths_of_a_scaling_are_found_where_they_may_stand():
    yarn = {"type": "yarn", "beta_slow": 2}
    for changes, factor, original in (
        (dict(rope_scaling={**yarn, "factor": 4.0, "original_max_position_embeddings": 1024}), 4.0, 1024),
        (dict(rope_scaling={**yarn, "factor": 4.0}), 4.0, 8192),  # as transformers: the length of the model
        (dict(rope_scaling={**yarn, "factor": None}, original_max_position_embeddings=2048), 4.0, 2048),
    ):
        rope = ModelConfig(**shape_from_hf({**SMALL, **changes})).rope
        assert (rope.scaling, rope.factor, rope.original_length, rope.beta_slow) == ("yarn", factor, original, 2.0)


def test_what_the_origin_says_beside_the_shape_is_kept():
    model = ModelConfig(**shape_from_hf(SMALL))
    content = shape_to_hf(model, like={**SMALL, "dtype": "bfloat16", "rope_theta": 7}, length=16384, dtype="float32")
    assert (content["bos_token_id"], content["rope_theta"], content["torch_dtype"]) == (5, 500000.0, "float32")
    assert content["max_position_embeddings"] == 16384 and "dtype" not in content
    mistral = shape_to_hf(model, like={"model_type": "mistral"}, length=0, dtype="float32")
    assert (mistral["model_type"], mistral["sliding_window"]) == ("mistral", None)


MOE = PUBLISHED["qwen3-30b-a3b"]


def test_experts_are_read_from_their_keys_and_written_back():
    changed = {**MOE, "norm_topk_prob": False, "router_aux_loss_coef": 0.02, "num_experts_per_tok": 4}
    changed["output_router_logits"] = True
    del changed["num_experts"]
    model = ModelConfig(**shape_from_hf({**changed, "num_local_experts": 64}))
    experts = model.experts
    assert (experts.count, experts.chosen, experts.size, experts.normalized, experts.balance) == (
        64,
        4,
        768,
        False,
        0.02,
    )
    assert model.mlp_size is None  # no layer has a plain MLP
    content = shape_to_hf(model, like=changed, length=0, dtype="float32")
    assert "num_local_experts" not in content and content["num_experts"] == 64
    assert {
        key: content[key] for key in changed if key in content and key not in ("rope_scaling", "max_window_layers")
    } == {key: changed[key] for key in changed if key in content and key not in ("rope_scaling", "max_window_layers")}
    # Without an origin; Megatron's form has another coefficient, which stays the origin's.
    alone = shape_to_hf(model, like={}, length=0, dtype="float32")
    assert (alone["model_type"], alone["intermediate_size"], alone["mlp_only_layers"]) == ("qwen3_moe", 4 * 768, [])
    layer = replace(model, experts=replace(experts, balance_form="layer", balance=0.5))
    for like, is_on in ((changed, True), (changed | {"output_router_logits": False}, False)):
        written = shape_to_hf(layer, like=like, length=0, dtype="float32")
        assert (written["router_aux_loss_coef"], written["output_router_logits"]) == (0.02, is_on)
    # A dense model made like one with experts says nothing of experts.
    dense = shape_to_hf(ModelConfig(**apply_preset("qwen3-0.6b")), like=MOE, length=0, dtype="float32")
    assert dense["model_type"] == "qwen3" and not [key for key in dense if "expert" in key or "moe" in key]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(experts=dict(scores="sigmoid")), "model.experts.scores=softmax, got sigmoid"),
        (dict(experts=dict(bias=True)), "model.experts.bias=false, got true"),
        (dict(experts=dict(shared_size=8)), "model.experts.shared_size=null, got 8"),
        (dict(experts=dict(choice_bias=True)), "model.experts.choice_bias=false, got true"),
        (
            dict(qk_norm=False),
            "those of a family (qk_norm; or qkv_bias, output_bias, sinks), got none; export only models of such a",
        ),
    ],
)
def test_experts_that_no_family_has_are_refused(changes, words):
    model = apply_preset("qwen3-30b-a3b")
    model |= changes | {"experts": model["experts"] | changes.get("experts", {})}
    with pytest.raises(ValueError) as error:
        shape_to_hf(ModelConfig(**model), like={}, length=0, dtype="float32")
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        (dict(model_type="mistral", sliding_window=4096), 4096),
        (dict(model_type="mistral", sliding_window=None), None),
        (dict(model_type="mistral"), 4096),  # the family's, where the key is left out
        (dict(model_type="qwen2", use_sliding_window=False, sliding_window=32768), None),
        (dict(model_type="qwen2", use_sliding_window=True, sliding_window=64, max_window_layers=4), None),
        (dict(model_type="qwen3", head_dim=16, use_sliding_window=True, sliding_window=64, max_window_layers=0), 64),
        (
            dict(model_type="qwen2", use_sliding_window=True, sliding_window=64, layer_types=["sliding_attention"] * 4),
            64,
        ),
        (dict(model_type="qwen2", sliding_window=64, layer_types=["full_attention"] * 4), None),
        (dict(model_type="llama", sliding_window=64), None),
        ({**MOE, "use_sliding_window": True, "sliding_window": 64}, 64),
        ({**MOE, "use_sliding_window": False, "sliding_window": 64}, None),
    ],
)
def test_the_sliding_window_is_that_of_all_layers(changes, window):
    model = ModelConfig(**shape_from_hf({**SMALL, "architectures": None, **changes}))
    assert model.sliding_window == window
    content = shape_to_hf(model, like={}, length=0, dtype="float32")
    assert ModelConfig(**shape_from_hf(content)).sliding_window == window


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        (dict(model_type="qwen3", head_dim=16, use_sliding_window=True, max_window_layers=3), "3xfull,local"),
        (
            dict(model_type="qwen2", use_sliding_window=True, layer_types=["full_attention", "sliding_attention"] * 2),
            "2x(full,local)",
        ),
    ],
)
def test_a_window_of_some_layers_is_a_kind_of_layer(changes, layers):
    model = ModelConfig(**shape_from_hf({**SMALL, "architectures": None, "sliding_window": 64, **changes}))
    assert (model.layers, model.sliding_window, model.of_type("local").sliding_window) == (layers, None, 64)
    content = shape_to_hf(model, like={}, length=0, dtype="float32")
    assert content["model_type"] == changes["model_type"] and content["layer_types"].count("sliding_attention") < 4
    again = ModelConfig(**shape_from_hf(content))
    assert (again.type_names, again.of_type("local")) == (model.type_names, model.of_type("local"))


GPT_OSS = PUBLISHED["gpt-oss-20b"]


def test_keys_that_a_gpt_oss_folder_leaves_out_are_those_of_its_family():
    """Of the sizes all must be there; of the rest the defaults are the released model's."""
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
             "num_local_experts", "num_experts_per_tok")  # fmt: skip
    bare = ModelConfig(**shape_from_hf({"model_type": "gpt_oss"} | {name: GPT_OSS[name] for name in sizes}))
    whole = ModelConfig(**shape_from_hf(GPT_OSS))
    assert bare == whole
    # A section of rotary settings replaces all of the family's. Without one, `rope_theta` replaces only the base.
    for changes, rope in (
        (dict(rope_scaling=None, rope_theta=1e6), replace(whole.rope, theta=1e6)),
        (dict(rope_scaling=dict(rope_type="linear", factor=2.0)), RopeConfig(
            theta=150000.0, scaling="linear", factor=2.0, original_length=131072)),
        (dict(rope_scaling=None, rope_parameters=dict(rope_type="default")), RopeConfig(
            theta=150000.0, original_length=131072)),
    ):  # fmt: skip
        assert ModelConfig(**shape_from_hf(GPT_OSS | changes)).rope == rope


@pytest.mark.parametrize(
    ("changes", "pattern", "window"),
    [
        (dict(num_hidden_layers=5, layer_types=None), "2x(local,full),local", None),
        (dict(num_hidden_layers=3, layer_types=["full_attention"] * 2 + ["sliding_attention"]), "2xfull,local", None),
        (dict(num_hidden_layers=2, layer_types=["sliding_attention"] * 2), None, 128),
        (dict(num_hidden_layers=2, layer_types=["full_attention"] * 2), None, None),
    ],
)
def test_windows_of_gpt_oss_are_read_and_written_for_each_layer(changes, pattern, window):
    model = ModelConfig(**shape_from_hf(GPT_OSS | changes))
    assert (model.layers, model.sliding_window, model.mlp_size) == (pattern, window, None)
    content = shape_to_hf(model, like=GPT_OSS | changes, length=0, dtype="bfloat16")
    assert len(content["layer_types"]) == changes["num_hidden_layers"] and content["sliding_window"] == 128
    assert (content["attention_bias"], content["num_local_experts"], content["swiglu_limit"]) == (True, 32, 7.0)
    assert not {"experts_per_token", "num_experts", "moe_intermediate_size", "use_sliding_window"} & set(content)
    assert ModelConfig(**shape_from_hf(content)) == model


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(swiglu_limit=6.0), "swiglu_limit must be 7, got 6.0; choose a model with this value"),
        (dict(swiglu_limit=None), "swiglu_limit must be 7, got None"),
        (dict(swiglu_alpha=1.0), "swiglu_alpha must be 1.702, got 1.0"),
        (dict(attention_bias=False), "attention_bias must be true in a gpt_oss, got False; choose a model with these"),
        (dict(layer_types=["chunked_attention"] * 24), "layer_types must be full_attention or sliding_attention, got"),
        (dict(layer_types=["full_attention"]), "layer_types must have a name for each of the 24 layers, got 1"),
        (dict(num_experts=16), "num_experts and num_local_experts must be equal, got 16 and 32"),
        (dict(num_local_experts=0), "num_experts must be at least 1, got 0"),
        (dict(num_local_experts=2), "model.experts.chosen must be at most 2"),
        (
            dict(quantization_config=dict(quant_method="mxfp4")),
            "got quant_method='mxfp4'; write a bfloat16 folder with transformers: from_pretrained(FOLDER, "
            'dtype="bfloat16", quantization_config=Mxfp4Config(dequantize=True)) and save_pretrained(NEW_FOLDER)',
        ),
    ],
)
def test_a_gpt_oss_folder_that_cannot_be_represented_is_refused_by_name(tmp_path, changes, words):
    (tmp_path / "config.json").write_text(json.dumps(GPT_OSS | changes))
    with pytest.raises(ConfigError) as error:
        config_from_dict({"model": f"hf:{tmp_path}", "sequence": {"length": 64}, "train": {"steps": 1}})
    assert words in str(error.value) and "\n" not in str(error.value)


def test_a_layer_type_for_each_layer_is_needed():
    with pytest.raises(ValueError, match="layer_types must have a name for each of the 4 layers, got 2; correct the"):
        shape_from_hf({**SMALL, "architectures": None, "model_type": "qwen2", "layer_types": ["full_attention"] * 2})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            dict(model_type="gpt2"),
            f"model_type must be one of {', '.join(FAMILIES)}, got 'gpt2'; choose a model of such a type",
        ),
        (dict(model_type=None), "model_type must be one of"),
        (dict(model_type="llama4_text"), "got 'llama4_text', whose attention stays within chunks of tokens; choose a"),
        (dict(model_type="gemma4"), "got 'gemma4', whose heads have 512 elements and whose layers share keys and v"),
        (dict(model_type="gemma2"), "got 'gemma2', whose attention has soft caps; choose a model of such a type"),
        (dict(architectures=["LlamaForSequenceClassification"]), "must be a language model (LlamaForCausalLM), got"),
        (dict(attention_bias=True), "attention_bias must be false, got True"),
        (dict(mlp_bias=True), "mlp_bias must be false, got True"),
        (dict(hidden_act="gelu"), "hidden_act must be silu, got 'gelu'"),
        (dict(attention_dropout=0.1), "attention_dropout must be 0, got 0.1"),
        (
            dict(quantization_config=dict(quant_method="fp8")),
            "quantization_config must be absent, got quant_method='fp8'",
        ),
        (dict(rope_scaling=dict(type="dynamic", factor=2.0)), "got rope_type='dynamic'"),
        (dict(rope_parameters=dict(rope_type="longrope")), "got rope_type='longrope'"),
        (dict(partial_rotary_factor=0.5), "partial_rotary_factor must be 1, got 0.5"),
        (
            dict(rope_scaling=dict(type="yarn", factor=4.0, attention_factor=1.0)),
            "attention_factor must be 1.13863, got 1",
        ),
        (dict(rope_scaling=dict(type="yarn", factor=4.0, mscale=1.0, mscale_all_dim=1.0)), "attention_factor must be"),
        (dict(layer_types=["chunked_attention"] * 4, model_type="qwen3", architectures=None), "'chunked_attention'"),
        (dict(hidden_size=None), "must hold values of the right types"),
        (dict(hidden_size=-64), "model.hidden_size must be at least 1, got -64"),
        (
            dict(num_attention_heads=3, num_key_value_heads=2),
            "model.num_heads must be a multiple of model.num_kv_heads",
        ),
    ],
)
def test_what_cannot_be_represented_is_refused_by_name(tmp_path, changes, words):
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, **changes}))
    with pytest.raises(ConfigError) as error:
        config_from_dict({"model": f"hf:{tmp_path}", "sequence": {"length": 64}, "train": {"steps": 1}})
    assert words in str(error.value) and "\n" not in str(error.value)


def test_folders_without_a_readable_config_are_refused(tmp_path):
    for text, words in (
        ("{", "must be JSON"),
        ("[]", "must hold a JSON object"),
        ('{"model_type": "llama"}', "must have the key"),
    ):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=words):
            read_shape(tmp_path)
    with pytest.raises(ValueError, match="must be a local folder with config.json, got .*none .* hf:OWNER/NAME"):
        read_shape(tmp_path / "none")


EXPERT_KEYS = ("num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob",
               "router_aux_loss_coef", "decoder_sparse_step", "mlp_only_layers")  # fmt: skip
ANYTHING = st.sampled_from([None, 0, -1, 3, 2.5, 1e300, "4", "yarn", [], ["x"], {}, {"type": "yarn"}, True])


@settings(max_examples=300)
@given(
    name=st.sampled_from([*PUBLISHED["qwen2.5-0.5b"], "rope_scaling", "layer_types", *EXPERT_KEYS]),
    value=ANYTHING,
    inner=ANYTHING,
)
def test_anything_in_a_config_gives_a_model_or_one_line(tmp_path_factory, name, value, inner):
    folder = tmp_path_factory.getbasetemp() / "any"
    folder.mkdir(exist_ok=True)
    base = MOE if name in EXPERT_KEYS else PUBLISHED["qwen2.5-0.5b"]
    base = base | {"rope_scaling": {"type": "yarn", "factor": inner, "beta_fast": inner}}
    (folder / "config.json").write_text(json.dumps(base | {name: value}))
    try:
        config_from_dict({"model": f"hf:{folder}", "sequence": {"length": 64}, "train": {"steps": 1}})
    except ConfigError as error:
        assert "\n" not in str(error)


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SMALL))
    return folder


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "config.yaml"
    base = {"model": {"vocab_size": 257, "hidden_size": 8, "num_layers": 2, "num_heads": 2, "mlp_size": 8}}
    path.write_text(yaml.safe_dump({**base, "sequence": {"length": 4096}, "train": {"steps": 10}}))
    return path


def test_a_config_takes_the_shape_and_stretches_the_rotation(path, folder):
    changes = ["model.rope.scaling=yarn", "model.rope.factor=4", "model.kernel=blockwise"]
    model = load_config(path, [f"model=hf:{folder}", *changes]).model
    assert (model.hidden_size, model.vocab_size, model.norm_eps, model.hf) == (64, 300, 1e-5, str(folder))
    rope = model.rope
    assert (rope.theta, rope.scaling, rope.factor, rope.original_length) == (500000.0, "yarn", 4.0, 8192)
    path.write_text(f"model: hf:{folder}\nsequence: {{length: 64}}\ntrain: {{steps: 1}}\n")
    assert load_config(path, changes).model == model
    path.write_text(f"model: {{hf: {folder}, rope: {{scaling: yarn, factor: 4}}, kernel: blockwise}}\n"
                    "sequence: {length: 64}\ntrain: {steps: 1}\n")  # fmt: skip
    assert load_config(path).model == model


def test_a_resolved_config_loads_when_the_folder_is_gone(path, folder):
    config = load_config(path, [f"model=hf:{folder}"])
    path.write_text(to_yaml(config))
    (folder / "config.json").unlink()
    assert load_config(path) == config
    with pytest.raises(ConfigError, match="model.hf: a Hugging Face model must be a local folder"):
        load_config(path, [f"model=hf:{folder}"])


def test_a_resolved_config_from_before_some_settings_needs_no_folder(path, folder):
    config = load_config(path, [f"model=hf:{folder}"])
    (folder / "config.json").unlink()
    settings = to_dict(config)
    for name in ("sinks", "layers", "layer_types", "output_bias"):
        del settings["model"][name]
    for name in ("fraction", "truncate"):
        del settings["model"]["rope"][name]
    assert config_from_dict(settings) == config


def test_settings_against_the_weights_are_refused(path, folder):
    for change, words in (
        (
            [f"model.hf={folder}"],
            "model.vocab_size must be 300, as in the weights of .*, got 257; remove model.vocab_size",
        ),
        ([f"model=hf:{folder}", "model.num_layers=2"], "model.num_layers must be 4"),
        ([f"model=hf:{folder}", "model.preset=llama3-8b"], "must have either preset or hf, got both"),
        (["model.hf=3"], "model.hf: a Hugging Face model must be a local folder with config.json, got .*/3 "),
        (["model.hf=''"], "model.hf must be the folder of a Hugging Face model, got ''"),
        ([f"model={folder}"], "model must be a section of settings, got"),
    ):
        with pytest.raises(ConfigError, match=words):
            load_config(path, change)


def test_experts_of_a_folder_may_be_balanced_otherwise_and_not_be_others(path, folder):
    (folder / "config.json").write_text(json.dumps(MOE))
    free = ["balance=0.5", "balance_form=layer", "balance_over=batch", "z=0.1", "chosen=4", "normalized=false"]
    hf = f"model=hf:{folder}"
    config = load_config(path, [hf, *(f"model.experts.{setting}" for setting in free)])
    assert (config.model.experts.balance, config.model.experts.chosen, config.model.experts.size) == (0.5, 4, 768)
    for name, value in dict(
        count=64, size=64, mlp="geglu", bias="true", shared_size=8, scores="sigmoid", scaling=2.0, choice_bias="true",
        expert_groups=4,
    ).items():  # fmt: skip
        with pytest.raises(
            ConfigError, match=rf"model.experts.{name} must be .*, as in the weights of .*; remove model"
        ):
            load_config(path, [hf, f"model.experts.{name}={value}"])
    # A run's own config loads when the folder is gone.
    path.write_text(to_yaml(config))
    (folder / "config.json").write_text(json.dumps(SMALL))
    assert load_config(path) == config
    with pytest.raises(ConfigError, match="model.experts.count must be 0, as in the weights of .*, got 8"):
        load_config(path, [hf, "model.experts.count=8"])


def test_a_run_from_before_there_were_experts_loads_without_its_folder(path, folder):
    settings = yaml.safe_load(to_yaml(load_config(path, [f"model=hf:{folder}"])))
    del settings["model"]["experts"]
    path.write_text(yaml.safe_dump(settings))
    (folder / "config.json").unlink()
    assert load_config(path).model.experts.count == 0


def test_a_window_is_that_of_the_folder_until_it_is_lifted(path, folder):
    (folder / "config.json").write_text(
        json.dumps({**SMALL, "model_type": "mistral", "architectures": None, "sliding_window": 1024})
    )
    model = load_config(path, [f"model=hf:{folder}"]).model
    assert (model.sliding_window, model.window_within(4096), model.window_within(1024)) == (1024, 1024, 0)
    assert load_config(path, [f"model=hf:{folder}", "model.sliding_window=null"]).model.sliding_window is None


def test_planning_for_a_hugging_face_model_imports_no_jax(path, folder):
    code = (
        "import sys; from sppo_jax.cli import main; "
        f"code = main(['plan', {str(path)!r}, 'model=hf:{folder}', 'hardware.cluster=a100-80g:1x2']); "
        "sys.exit(code or ('jax' in sys.modules) or ('safetensors' in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("llama, 4,096 tokens")
