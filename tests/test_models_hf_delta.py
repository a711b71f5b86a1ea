"""Folders with the gated delta rule: packed documents, both forms of experts, folders that see, what is refused."""

import json

import chex
import jax
import numpy as np
import pytest
import torch
import transformers
from exactness import dense_step, quick_jit, relative_errors
from flax import nnx
from hf_models import DELTA, SIZES, float64_transformers, make_model
from safetensors.numpy import load_file
from safetensors.torch import save_file

from sppo_jax.config import ModelConfig
from sppo_jax.config.hf.families import read_shape, shape_from_hf
from sppo_jax.config.presets import apply_preset
from sppo_jax.config.to_hf import shape_to_hf
from sppo_jax.models import from_hf, load_hf_params, num_params, to_hf

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
pytestmark = pytest.mark.xdist_group("models_hf_delta")
# Documents that begin within the convolution's taps, and one that goes over a block.
LENGTHS = (5, 1, 2, 3, 66, 4)


def read_bits(folder):
    return {
        name: (x.shape, x.tobytes()) for file in folder.glob("*.safetensors") for name, x in load_file(file).items()
    }


def test_packed_documents_are_those_of_transformers_one_by_one(x64, tmp_path):
    """Its fallback lets documents leak into each other, so each is a call."""
    rng = np.random.default_rng(5)
    tokens = rng.integers(0, 61, sum(LENGTHS)).astype(np.int32)
    documents = np.repeat(np.arange(len(LENGTHS), dtype=np.int32), LENGTHS)
    positions = np.concatenate([np.arange(length, dtype=np.int32) for length in LENGTHS])
    inside = np.append(documents[1:] == documents[:-1], False)
    targets = np.where(inside, np.roll(tokens, -1), -1).astype(np.int32)
    with float64_transformers():
        theirs = make_model("qwen3.5", num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
        total = 0.0
        for document in range(len(LENGTHS)):
            own = torch.tensor(tokens[documents == document]).long()
            if len(own) > 1:
                logits = theirs(own[None]).logits[0]
                total = total + torch.nn.functional.cross_entropy(logits[:-1], own[1:], reduction="sum")
        loss = total / int(inside.sum())
        loss.backward()
    theirs.save_pretrained(tmp_path / "weights")
    (tmp_path / "grads").mkdir()
    save_file({name: p.grad for name, p in theirs.named_parameters()}, tmp_path / "grads" / "model.safetensors")
    (tmp_path / "grads" / "config.json").write_text((tmp_path / "weights" / "config.json").read_text())
    model = from_hf(tmp_path / "weights", dtype="float64")
    params = nnx.state(model, nnx.Param)
    row = dict(tokens=tokens, targets=targets, positions=positions, document_ids=documents)
    got, grads = dense_step(model)(params, {name: value[None] for name, value in row.items()})
    assert float(got) == pytest.approx(loss.item(), rel=1e-12)
    errors = relative_errors(grads, load_hf_params(tmp_path / "grads", params))
    assert max(errors.values()) < 1e-9, errors


@pytest.mark.parametrize("name", ["qwen3-next", "qwen3.5-moe"])
def test_experts_in_one_tensor_a_layer_or_an_expert_are_written_as_they_were_read(name, tmp_path):
    """The hub has one tensor a layer in Qwen3.5's folders; transformers writes one an expert."""
    model = make_model(name)
    model.save_pretrained(tmp_path / "separate")
    fused = tmp_path / "fused"
    fused.mkdir()
    save_file({name: p.detach() for name, p in model.named_parameters()}, fused / "model.safetensors")
    (fused / "config.json").write_text(json.dumps(model.config.to_dict() | {"dtype": "float32"}))
    assert sum(name.endswith("experts.gate_up_proj") for name in read_bits(fused)) == 2
    models = [from_hf(folder, dtype="float32") for folder in (fused, tmp_path / "separate")]
    chex.assert_trees_all_equal(*(nnx.state(model, nnx.Param) for model in models))
    for folder in (fused, tmp_path / "separate"):
        to_hf(models[0], tmp_path / f"{folder.name} again", like=folder)
        assert read_bits(tmp_path / f"{folder.name} again") == read_bits(folder)
        assert read_shape(tmp_path / f"{folder.name} again") == read_shape(folder)
    joined = [key for key in read_bits(fused) if "in_proj_qkvz" in key]
    assert len(joined) == (name == "qwen3-next")


VISION = dict(
    depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=32, num_position_embeddings=16,
    patch_size=4,
)  # fmt: skip


def test_the_language_model_of_a_folder_that_sees_is_imported_and_the_rest_named(x64, tmp_path):
    tokens = np.random.default_rng(3).integers(0, 50, (2, 24)).astype(np.int32)
    config = transformers.Qwen3_5Config(
        text_config={**SIZES, **DELTA}, vision_config=VISION, image_token_id=60, video_token_id=59,
        vision_start_token_id=58, vision_end_token_id=57, attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(7)
    with float64_transformers(), torch.no_grad():
        theirs = transformers.Qwen3_5ForConditionalGeneration(config).eval()
        for parameter in theirs.parameters():
            parameter.normal_(0, 0.3)
        logits = theirs(torch.tensor(tokens, dtype=torch.long)).logits.numpy()
    folder, out = tmp_path / "in", tmp_path / "out"
    theirs.save_pretrained(folder)
    tensors = {name: torch.tensor(x) for name, x in load_file(folder / "model.safetensors").items()}
    # As published: a layer that predicts the token after the next, which transformers drops.
    save_file(
        tensors | {"mtp.fc.weight": torch.zeros(3, 3), "mtp.norm.weight": torch.zeros(3)}, folder / "model.safetensors"
    )
    with pytest.warns(UserWarning, match=r"has mtp \(2 tensors\) and visual \(\d+ tensors\), left out here") as said:
        model = from_hf(folder, dtype="float64")
    assert len(said) == 1 and "\n" not in str(said[0].message)
    np.testing.assert_allclose(quick_jit(lambda x: model(x))(tokens), logits, rtol=0, atol=1e-9)
    to_hf(model, out, like=folder)
    text = {
        name.replace("model.language_model.", "model."): (tuple(x.shape), x.numpy().tobytes())
        for name, x in tensors.items()
        if not name.startswith("model.visual.")
    }
    drafts = {"mtp.fc.weight": (3, 3), "mtp.norm.weight": (3,)}
    zeros = {name: (shape, torch.zeros(shape).numpy().tobytes()) for name, shape in drafts.items()}
    assert read_bits(out) == text | zeros
    config = transformers.AutoConfig.from_pretrained(out)
    assert (config.model_type, config.architectures) == ("qwen3_5_text", ["Qwen3_5ForCausalLM"])


@pytest.mark.parametrize(
    "name", ["qwen3.5-0.8b", "qwen3.5-4b", "qwen3.5-9b", "qwen3.5-27b", "qwen3.6-35b-a3b", "qwen3-next-80b-a3b"]
)
def test_presets_have_the_parameters_of_transformers(name):
    model = ModelConfig(**apply_preset(name))
    like = {"model_type": "qwen3_next"} if "next" in name else {}
    content = shape_to_hf(model, like=like, length=0, dtype="bfloat16")
    content.pop("architectures")
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(content.pop("model_type"), **content)
        )
    assert sum(p.numel() for p in theirs.parameters()) == num_params(model)


SMALL = dict(
    model_type="qwen3_next", vocab_size=61, hidden_size=32, num_hidden_layers=4, num_attention_heads=4,
    intermediate_size=40, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8,
    shared_expert_intermediate_size=8, norm_topk_prob=True,
)  # fmt: skip


def test_keys_that_are_left_out_have_the_values_of_transformers():
    got = ModelConfig(**shape_from_hf(SMALL))
    assert got.layers == "3xdelta,full" and got.rope.fraction == 0.25 and got.head_dim == 256
    theirs = transformers.Qwen3NextConfig(**{k: v for k, v in SMALL.items() if k != "model_type"})
    delta = got.of_type("delta").delta
    assert (delta.value_heads, delta.key_heads, delta.taps) == (
        theirs.linear_num_value_heads, theirs.linear_num_key_heads, theirs.linear_conv_kernel_dim,
    )  # fmt: skip
    assert (delta.value_size, delta.key_size) == (theirs.linear_value_head_dim, theirs.linear_key_head_dim)
    assert got.num_kv_heads == theirs.num_key_value_heads
    assert theirs.rope_parameters["partial_rotary_factor"] == 0.25
    assert [kind == "linear_attention" for kind in theirs.layer_types] == [True, True, True, False]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(attn_output_gate=False), "attn_output_gate must be true in a qwen3_next, got False"),
        (
            dict(model_type="qwen3_5_moe_text", mlp_only_layers=[1]),
            r"mlp_only_layers must be \[\] in a qwen3_5_moe_text, got \[1\]",
        ),
        (
            dict(model_type="qwen3_5_moe_text", decoder_sparse_step=2),
            "decoder_sparse_step must be 1 in a qwen3_5_moe_text, got 2",
        ),
        (
            dict(layer_types=["linear_attention", "kda", "linear_attention", "full_attention"]),
            "layer_types must be full_attention or linear_attention, got 'kda'",
        ),
        (dict(layer_types=["linear_attention"]), "layer_types must have a name for each of the 4 layers, got 1"),
        (dict(model_type="kimi_linear"), "got 'kimi_linear', whose linear layers are KDA"),
        (dict(model_type="nemotron_h"), "got 'nemotron_h', whose linear layers are Mamba"),
        (dict(model_type="olmo_hybrid"), "got 'olmo_hybrid', whose gated delta rule writes twice as much as here"),
    ],
)
def test_what_is_not_supported_is_refused_in_a_line(changes, message):
    with pytest.raises(ValueError, match=message) as error:
        shape_from_hf(SMALL | changes)
    assert "\n" not in str(error.value)


HYBRID = dict(vocab_size=61, hidden_size=32, num_layers=4, num_heads=4, mlp_size=40, layers="3xdelta,full")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            dict(),
            "and with the gated delta rule must have, of .*output_gate, qk_norm, unit_norm.*got none",
        ),
        (dict(layer_types={"delta": {"mlp_size": 9}}), r"mixer=delta, or one sliding_window\), got delta, full"),
        (
            dict(layers="2x(delta,local)", layer_types={"local": {"sliding_window": 8}}, qk_norm=True),
            r"mixer=delta, or one sliding_window\), got delta, local",
        ),
        (
            dict(layers=None, rope={"fraction": 0.5}),
            "of type llama must have model.rope.fraction=1, got 0.5; export only",
        ),
    ],
)
def test_what_no_family_has_is_refused_in_a_line(changes, message):
    model = ModelConfig(**{**HYBRID, **changes})
    with pytest.raises(ValueError, match=message) as error:
        shape_to_hf(model, like={}, length=0, dtype="float32")
    assert "\n" not in str(error.value)


def test_sizes_of_the_rule_are_those_of_the_weights(tmp_path):
    make_model("qwen3.5").save_pretrained(tmp_path / "in")
    with pytest.raises(ValueError, match=r"model.delta.taps must be 4, as in the weights of .*, got 3; remove"):
        from_hf(tmp_path / "in", delta={"taps": 3})
    assert from_hf(tmp_path / "in", delta={"taps": 4}).config.delta.value_heads == 6
    assert jax.tree.leaves(nnx.state(from_hf(tmp_path / "in"), nnx.Param))
