"""Keys of a config.json that another key switches: on, off and absent, an import trains what transformers trains."""

import json
import warnings

import numpy as np
import pytest
import torch
import transformers
from exactness import quick_jit
from flax import nnx
from hf_configs import PUBLISHED
from hf_models import MODELS, float64_transformers, make_model

from sppo_jax.config import ConfigError, ModelConfig, config_from_dict, load_config, to_yaml
from sppo_jax.config.hf.experts import BALANCE_OFF
from sppo_jax.config.hf.families import shape_from_hf
from sppo_jax.config.to_hf import shape_to_hf
from sppo_jax.models import apply_preset, from_hf, load_hf_params
from sppo_jax.models.dense import dense_losses

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

pytestmark = pytest.mark.xdist_group("hf_switches")
LENGTH, VOCABULARY = 24, 61
ABSENT = object()
SLIDES, FULL = "sliding_attention", "full_attention"


def balance(switch):
    return {"router_aux_loss_coef": 0.7, "output_router_logits": switch}


def window(switch, **others):
    return {"sliding_window": 9, "use_sliding_window": switch, "layer_types": ABSENT} | others


def rotated(share):
    return {"rope_parameters": ABSENT, "rope_theta": 1e4, "partial_rotary_factor": share}


# Of each switch a model of `hf_models`, and the keys that are changed: on, off and absent.
SWITCHES = {
    "balance of qwen3_moe": ("qwen3-moe", balance(True), balance(False), balance(ABSENT)),
    "balance of gpt_oss": ("gpt-oss", balance(True), balance(False), balance(ABSENT)),
    "balance of qwen3_next": ("qwen3-next", balance(True), balance(False), balance(ABSENT)),
    "balance of qwen3_5_moe_text": ("qwen3.5-moe", balance(True), balance(False), balance(ABSENT)),
    "coefficient": (
        "qwen3-moe",
        *({"output_router_logits": True, "router_aux_loss_coef": value} for value in (0.3, 0.0, ABSENT)),
    ),
    "weights of qwen3_moe": ("qwen3-moe", *({"norm_topk_prob": value} for value in (True, False, ABSENT))),
    "weights of qwen3_next": ("qwen3-next", *({"norm_topk_prob": value} for value in (True, False, ABSENT))),
    "window of qwen2": ("qwen2-yarn", *(window(value, max_window_layers=0) for value in (True, False, ABSENT))),
    "window of qwen3": ("qwen3-tied", *(window(value, max_window_layers=1) for value in (True, False, ABSENT))),
    "first layer with a window": (
        "qwen3-tied",
        *(window(True, max_window_layers=value) for value in (1, 2, ABSENT)),
    ),
    "window of qwen3_moe": ("qwen3-moe", *(window(value) for value in (True, False, ABSENT))),
    "layer types of qwen3": (
        "qwen3-tied",
        *(window(value, layer_types=[SLIDES, FULL]) for value in (True, False, ABSENT)),
    ),
    "window of mistral": ("mistral", *({"sliding_window": value} for value in (9, None, ABSENT))),
    "window of gpt_oss": ("gpt-oss", *({"layer_types": value} for value in ([SLIDES] * 3, [FULL] * 3, ABSENT))),
    "window of olmo3": ("olmo3", *({"layer_types": value} for value in ([SLIDES] * 4, [FULL] * 4, ABSENT))),
    "window of gemma3_text": ("gemma3", *({"layer_types": value} for value in ([SLIDES] * 4, [FULL] * 4, ABSENT))),
    "pattern of gemma3_text": (
        "gemma3",
        *({"layer_types": ABSENT, "sliding_window_pattern": value} for value in (2, 1, ABSENT)),
    ),
    "cap of gemma3_text": ("gemma3", *({"final_logit_softcapping": value} for value in (2.0, None, ABSENT))),
    "scale of gemma3_text": ("gemma3", *({"query_pre_attn_scalar": value} for value in (20, 12, ABSENT))),
    "rotation of smollm3": (
        "smollm3",
        *({"no_rope_layers": value, "no_rope_layer_interval": 2} for value in ([1, 0, 1, 1], [1] * 4, ABSENT)),
    ),
    "rotated share of qwen3_5_text": ("qwen3.5", rotated(0.5), rotated(1.0), rotated(ABSENT)),
    "rotation of gpt_oss": (
        "gpt-oss",
        {"rope_parameters": ABSENT, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "default"}},
        {"rope_parameters": ABSENT},
    ),
    "local base of gemma3_text": (
        "gemma3",
        *({"rope_parameters": ABSENT, "rope_local_base_freq": value} for value in (50.0, 1e6, ABSENT)),
    ),
    "local base of olmo3": (
        "olmo3",
        *({"rope_parameters": ABSENT, "rope_local_base_freq": value} for value in (50.0, 1e6, ABSENT)),
    ),
}
# In `make test`; the others are behind `slow`.
FAST = ("balance of gpt_oss", "layer types of qwen3")
# A head of which a quarter is an even number of elements, which this model rotates where the key is left out.
CHANGES = {"qwen3.5": {"head_dim": 16}}
# Keys that transformers does not read in a family change nothing.
UNREAD = ("local base of olmo3",)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Makes the folder of a model, once."""
    folders = {}

    def make(name):
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp("switches") / "weights"
            with float64_transformers():
                make_model(name, **CHANGES.get(name, {})).save_pretrained(folders[name])
        return folders[name]

    return make


def losses_of(folder, tokens, known):
    """Returns transformers' loss and ours, each None where the folder is refused; `known` are ours of other folders."""
    with float64_transformers():
        try:
            model = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
            )
            theirs = model(torch.tensor(tokens).long(), labels=torch.tensor(tokens).long()).loss.item()
        except (ValueError, TypeError):  # a window of no length
            theirs = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = from_hf(folder, dtype="float64")
    except ValueError:
        return theirs, None
    if repr(model.config) in known:
        return theirs, known[repr(model.config)]
    targets = np.concatenate([tokens[:, 1:], np.full((1, 1), -1, np.int32)], axis=1)
    positions = np.arange(LENGTH, dtype=np.int32)[None]
    batch = dict(tokens=tokens, targets=targets, positions=positions, document_ids=np.zeros_like(tokens))
    ours = quick_jit(lambda params: sum(dense_losses(model, params, batch)))(nnx.state(model, nnx.Param))
    return theirs, known.setdefault(repr(model.config), float(ours))


def edit(folder, content, changes):
    changed = {key: value for key, value in (content | changes).items() if value is not ABSENT}
    (folder / "config.json").write_text(json.dumps(changed))


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in SWITCHES]
)
def test_a_switch_on_off_and_absent_trains_what_transformers_trains(x64, made, name):
    model, *values = SWITCHES[name]
    folder = made(model)
    content = json.loads((folder / "config.json").read_text())
    tokens = np.random.default_rng(3).integers(0, VOCABULARY, (1, LENGTH)).astype(np.int32)
    found, known = [], {}
    try:
        for changes in values:
            edit(folder, content, changes)
            theirs, ours = losses_of(folder, tokens, known)
            assert ours == (theirs if theirs is None else pytest.approx(theirs, rel=1e-9)), changes
            found.append(ours)
    finally:
        edit(folder, content, {})
    assert found[0] is not None and (len(set(found)) > 1) == (name not in UNREAD)


MOE = PUBLISHED["qwen3-30b-a3b"]


@pytest.fixture
def folder(tmp_path):
    """A folder that has a coefficient and does not switch the loss on."""
    (tmp_path / "moe").mkdir()
    (tmp_path / "moe" / "config.json").write_text(json.dumps(MOE | {"router_aux_loss_coef": 0.9}))
    return tmp_path / "moe"


REST = {"sequence": {"length": 64}, "train": {"steps": 1}}


def config_of(folder, **experts):
    model = {"hf": str(folder)} | ({"experts": experts} if experts else {})
    return config_from_dict({"model": model, **REST})


def said(folder, **experts):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        config_of(folder, **experts)
    return [str(warning.message) for warning in found]


def test_an_import_says_that_the_balance_is_off_unless_the_config_or_the_folder_decides(folder, tmp_path):
    assert (
        said(folder) == [BALANCE_OFF] == ["balance off, as the folder has it; model.experts.balance=0.001 turns it on"]
    )
    assert said(folder, z=0.1) == [BALANCE_OFF]
    assert said(folder, balance=0.0) == said(folder, balance=0.001) == []
    run = tmp_path / "config.yaml"
    run.write_text(to_yaml(config_of(folder)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_config(run).model.experts.balance == 0  # a run's own config is no import
    (folder / "config.json").write_text(json.dumps(MOE | {"output_router_logits": True}))
    assert said(folder) == []
    with pytest.raises(ConfigError, match="model.experts must be a section of settings, got 3"):
        config_from_dict({"model": {"hf": str(folder), "experts": 3}, **REST})


def test_weights_are_read_without_a_word_about_the_balance(made):
    folder = made("qwen3-moe")
    content = json.loads((folder / "config.json").read_text())
    edit(folder, content, balance(False))
    try:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            model = from_hf(folder, experts={"balance": 0.1})
            load_hf_params(folder, nnx.state(model, nnx.Param))
        assert not [warning for warning in found if "balance" in str(warning.message)]
    finally:
        edit(folder, content, {})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(model_type="qwen3", layer_types=[SLIDES] * 48), "use_sliding_window must be true in a qwen3 whose layer"),
        (dict(model_type="qwen2", layer_types=[SLIDES] * 48, use_sliding_window=False), "sliding_attention, got False"),
        (dict(model_type="smollm3", layer_types=[SLIDES] * 48, sliding_window=9), "must be true in a smollm3 whose"),
        (
            dict(model_type="qwen3", layer_types=[SLIDES] * 48, use_sliding_window=True, sliding_window=None),
            "sliding_window must be at least 1 in a qwen3, got 0; correct the key",
        ),
        (
            dict(layer_types=[SLIDES] * 48, use_sliding_window=False),
            "layer_types must be full_attention for every layer of a qwen3_moe with this sliding_window, got sliding_",
        ),
        (
            dict(model_type="qwen3_5_text", head_dim=12),
            "partial_rotary_factor must rotate an even number of elements of a head, got 3 of 12",
        ),
        (dict(model_type="mistral", layer_types=[FULL] * 48, sliding_window=9), "which transformers does not read; re"),
    ],
)
def test_a_key_against_its_switch_is_refused_in_a_line(folder, changes, words):
    (folder / "config.json").write_text(json.dumps(MOE | {"architectures": None, "head_dim": 128} | changes))
    with pytest.raises(ConfigError) as error:
        config_of(folder)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_layer_types_that_say_what_the_window_says_are_read(folder):
    for changes, window in (
        (dict(layer_types=[SLIDES] * 48, use_sliding_window=True, sliding_window=64), 64),
        (dict(layer_types=[FULL] * 48, use_sliding_window=False, sliding_window=64), None),
    ):
        (folder / "config.json").write_text(json.dumps(MOE | changes))
        assert config_of(folder, balance=0.0).model.sliding_window == window


def test_every_family_with_experts_is_among_the_switches():
    of_balance = {name for name in SWITCHES if name.startswith("balance of ")}
    with_experts = {kind.model_type for kind, fields in MODELS.values() if "router_aux_loss_coef" in fields}
    assert of_balance == {f"balance of {name}" for name in with_experts}


@pytest.mark.parametrize("fraction", [0.25, 0.5, 1.0])
def test_a_rotated_share_is_exported_where_its_absence_is_another_share(fraction):
    model = ModelConfig(**apply_preset("qwen3.5-0.8b") | {"rope": {"fraction": fraction}})
    content = shape_to_hf(model, like={}, length=0, dtype="float32")
    assert ModelConfig(**shape_from_hf(content)).rope.fraction == fraction
    theirs = transformers.Qwen3_5TextConfig(**content)
    assert theirs.rope_parameters["partial_rotary_factor"] == fraction
