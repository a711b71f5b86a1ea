"""Imported and exported models against transformers: logits, every gradient, and every bit of the weights."""

import logging
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import chex
import jax
import numpy as np
import pytest
import torch
import transformers
from exactness import TINY, dense_step, quick_jit, relative_errors, small_plan
from flax import nnx
from hf_models import MODELS, SIZES, YARN, balance_loss, float64_transformers, make_model
from safetensors.numpy import load_file
from safetensors.torch import save_file
from transformers import modeling_rope_utils

from sppo_jax.config import ModelConfig
from sppo_jax.config.hf.families import read_shape
from sppo_jax.config.hf.rope import rope_from_hf
from sppo_jax.config.rope import RopeConfig
from sppo_jax.models import Decoder, from_hf, load_hf_params, to_hf
from sppo_jax.models.hf.folder import TensorFolder
from sppo_jax.models.rotary import rotary_frequencies
from sppo_jax.pipeline.api import value_and_grad
from sppo_jax.pipeline.params.layout import make_mesh
from sppo_jax.pipeline.params.storage import param_shardings

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
logging.getLogger("torch").setLevel(logging.ERROR)

# One worker makes the models that all of these look at.
pytestmark = pytest.mark.xdist_group("models_hf")
GEMMA3 = dict(qk_norm=True, norms="both", unit_norm=True, mlp="geglu")
WITH_ROUTERS = ("qwen3-moe", "qwen3-moe-mixed", "gpt-oss", "qwen3-next", "qwen3-next-mixed", "qwen3.5-moe")
HAS_ROUTERS = dict.fromkeys(WITH_ROUTERS, dict(output_router_logits=True))
LENGTH = 48  # beyond the 16 tokens that the scaled ones were "trained" on


class Reference(NamedTuple):
    """A model in float64 on disk, and what transformers computes with it.

    Gradients are those of the tokens' loss, and of the loss that balances experts where there are some: the mean over
    sequences, each sequence by itself.
    """

    name: str
    folder: Path
    tokens: np.ndarray
    logits: np.ndarray
    loss: float
    grads: Path  # a folder like that of the weights


# Others of their families are in CI.
SLOW = (
    "llama",
    "qwen2-window",
    "qwen3-next-mixed",
    "mistral",
    "qwen3-moe-mixed",
    "qwen3.5-moe",
    "qwen3-tied",
    "qwen3-windows",
    "mistral-window",
)


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in MODELS]
)
def reference(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    weights, grads = folder / "weights", folder / "grads"
    tokens = np.random.default_rng(3).integers(0, 61, (2, LENGTH)).astype(np.int32)
    with float64_transformers():
        model = make_model(request.param)
        out = model(torch.tensor(tokens, dtype=torch.long), **HAS_ROUTERS.get(request.param, {}))
        logits = out.logits
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].reshape(-1, 61), torch.tensor(tokens[:, 1:]).ravel().long()
        )
        (loss + (balance_loss(model, out) if "router_logits" in out else 0)).backward()
    assert logits.dtype == torch.float64
    model.save_pretrained(weights)
    grads.mkdir()
    save_file({name: p.grad for name, p in model.named_parameters()}, grads / "model.safetensors")
    (grads / "config.json").write_text((weights / "config.json").read_text())
    return Reference(request.param, weights, tokens, logits.detach().numpy(), loss.item(), grads)


def next_token_batch(tokens):
    """Makes the batch in which every token but the last of a row has the next one as its target."""
    rows, length = tokens.shape
    targets = np.concatenate([tokens[:, 1:], np.full((rows, 1), -1)], axis=1).astype(np.int32)
    positions = np.tile(np.arange(length, dtype=np.int32), (rows, 1))
    return dict(tokens=tokens, targets=targets, positions=positions, document_ids=np.zeros_like(tokens))


def test_logits_loss_and_every_gradient_are_those_of_transformers(x64, reference):
    model = from_hf(reference.folder, dtype="float64")
    params = nnx.state(model, nnx.Param)
    np.testing.assert_allclose(quick_jit(lambda x: model(x))(reference.tokens), reference.logits, rtol=0, atol=1e-9)
    loss, grads = dense_step(model)(params, next_token_batch(reference.tokens))
    assert float(loss) == pytest.approx(reference.loss, rel=1e-9)
    errors = relative_errors(grads, load_hf_params(reference.grads, params))
    assert max(errors.values()) < 1e-9, errors


def test_export_of_an_import_is_the_same_bits_and_loads_in_transformers(x64, reference, tmp_path):
    to_hf(from_hf(reference.folder, dtype="float64"), tmp_path / "out", like=reference.folder)
    before, after = (load_file(path / "model.safetensors") for path in (reference.folder, tmp_path / "out"))
    assert {name: x.tobytes() for name, x in before.items()} == {name: x.tobytes() for name, x in after.items()}
    assert read_shape(tmp_path / "out") == read_shape(reference.folder)
    with float64_transformers(), torch.no_grad():
        model = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "out", dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
        )
        kind = MODELS[reference.name][0].__name__.replace("TextConfig", "Config")
        assert type(model).__name__ == kind.replace("Config", "ForCausalLM")
        logits = model(torch.tensor(reference.tokens, dtype=torch.long)).logits.numpy()
    np.testing.assert_array_equal(logits, reference.logits)


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize("head_dim", [12, 64])
def test_frequencies_of_yarn_are_those_of_transformers(head_dim, truncate):
    scaling = YARN | dict(rope_theta=15e4, original_max_position_embeddings=4096, truncate=truncate)
    with float64_transformers():
        config = transformers.LlamaConfig(**SIZES | dict(head_dim=head_dim, rope_parameters=scaling))
        want, amplitude = modeling_rope_utils.ROPE_INIT_FUNCTIONS["yarn"](config)
    got = rotary_frequencies(RopeConfig(**rope_from_hf({"rope_parameters": scaling}, 64)), head_dim)
    np.testing.assert_allclose(got[0], want.numpy(), rtol=1e-13)
    assert want.dtype == torch.float64 and got[1] == amplitude
    other = RopeConfig(**rope_from_hf({"rope_parameters": scaling | {"truncate": not truncate}}, 64))
    assert abs(rotary_frequencies(other, head_dim)[0] / want.numpy() - 1).max() > 0.1


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """A Qwen2 model in bfloat16, in several files; 4 layers."""
    folder = tmp_path_factory.mktemp("sharded") / "weights"
    make_model("qwen2-yarn", num_hidden_layers=4).to(torch.bfloat16).save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


def read_tensors(folder):
    return {name: x.tobytes() for file in folder.glob("*.safetensors") for name, x in load_file(file).items()}


def test_bfloat16_shards_come_back_the_same(sharded, tmp_path, monkeypatch):
    model = from_hf(sharded)
    assert model.embedding[...].dtype == np.float32
    monkeypatch.setattr("sppo_jax.models.hf.write.SHARD_BYTES", 20_000)
    to_hf(model, tmp_path / "shards", dtype="bfloat16")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    to_hf(nnx.state(model, nnx.Param), tmp_path / "one", config=model.config, dtype="bfloat16")
    assert read_tensors(tmp_path / "shards") == read_tensors(tmp_path / "one") == read_tensors(sharded)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "shards")
    assert again.dtype == torch.bfloat16 and type(again).__name__ == "Qwen2ForCausalLM"


def test_float16_is_read_and_refused_where_it_cannot_hold_a_value(tmp_path):
    torch_model = make_model("qwen3-tied").to(torch.float16)
    torch_model.save_pretrained(tmp_path / "in")
    model = from_hf(tmp_path / "in")
    to_hf(model, tmp_path / "out", dtype="float16")
    assert read_tensors(tmp_path / "out") == read_tensors(tmp_path / "in")
    model.embedding[...] = model.embedding[...].at[0, 0].set(1e6)
    with pytest.raises(
        ValueError, match="float16 must hold every value, got larger values in model.embed_tokens.weight"
    ):
        to_hf(model, tmp_path / "large", dtype="float16")
    assert not (tmp_path / "large").exists() and not list(tmp_path.glob(".large*"))


def test_weights_land_on_the_mesh_piece_by_piece_and_train_there(sharded, monkeypatch, tmp_path):
    plan = small_plan((16, 16), mesh=(1, 2, 2))
    mesh = make_mesh(plan)
    dense = from_hf(sharded, dtype="float32")
    params = nnx.state(dense, nnx.Param)
    shardings = param_shardings(plan, params, mesh)
    reads = []
    read = TensorFolder.read
    monkeypatch.setattr(
        TensorFolder, "read", lambda self, name, part: reads.append((name, part)) or read(self, name, part)
    )
    model = from_hf(sharded, dtype="float32", shardings=shardings)
    placed = nnx.state(model, nnx.Param)
    assert jax.tree.map(lambda x: x.sharding, placed) == shardings
    chex.assert_trees_all_equal(placed, params)

    # No tensor is read whole for a part of it: each of the two seq members reads its half, of its stage's layers only.
    halves = [part for name, part in reads if name == "model.layers.3.self_attn.q_proj.weight"]
    assert sorted((cut.start, cut.stop) for part in halves for cut in part) == [(0, 16), (0, 32), (0, 32), (16, 32)]

    batch = next_token_batch(np.random.default_rng(0).integers(0, 61, (1, 32)).astype(np.int32))
    loss, grads = quick_jit(value_and_grad(plan, model, mesh))(placed, batch)
    want_loss, want = dense_step(dense)(params, batch)
    np.testing.assert_allclose(loss, want_loss, rtol=1e-5)
    assert max(relative_errors(grads, want).values()) < 1e-4

    to_hf(model, tmp_path / "out", dtype="bfloat16")
    assert read_tensors(tmp_path / "out") == read_tensors(sharded)


def test_settings_of_the_import_stretch_the_rotation(sharded):
    model = from_hf(sharded, rope={"factor": 8.0, "beta_fast": 16.0}, kernel="blockwise")
    rope = model.config.rope
    assert (rope.scaling, rope.factor, rope.beta_fast, rope.original_length) == ("yarn", 8.0, 16.0, 16)


def test_what_does_not_fit_the_weights_is_refused_before_any_is_read(sharded, monkeypatch):
    shapes = nnx.state(nnx.eval_shape(lambda: Decoder(ModelConfig(**{**TINY, "qkv_bias": True}), rngs=nnx.Rngs(0))))
    with pytest.raises(
        ValueError,
        match=r"embedding must be \(61, 32\), got \(53, 24\); set model: hf:.* to take the shape from the folder",
    ):
        load_hf_params(sharded, shapes)
    with pytest.raises(ValueError, match="64-bit mode, got the mode off"):
        from_hf(sharded, dtype="float64")
    with pytest.raises(ValueError, match="model.hidden_size must be 32, as in the weights of"):
        from_hf(sharded, hidden_size=64)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ValueError, match=r"run pip install safetensors"):
        from_hf(sharded)


def test_a_window_is_exported(tmp_path):
    make_model("mistral", sliding_window=16).save_pretrained(tmp_path / "window")
    to_hf(from_hf(tmp_path / "window"), tmp_path / "out")
    assert transformers.AutoConfig.from_pretrained(tmp_path / "out").sliding_window == 16


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(mlp="gelu"), "model.mlp=swiglu, got gelu"),
        (dict(qkv_bias=True, qk_norm=True), "those of a family (none; or qkv_bias; or qk_norm; or "),
        (dict(qkv_bias=True, qk_norm=True), "), got qkv_bias, qk_norm; export only"),
        (dict(qk_norm=True, norms="behind"), "got qk_norm, norms=behind; export only"),
        (dict(embedding_scale=2.0), "of type llama must have model.embedding_scale=1, got 2; export only"),
        (dict(query_scale=0.5), "of type llama must have model.query_scale=null, got 0.5"),
        (dict(logit_cap=30), "of type llama must have model.logit_cap=null, got 30"),
        (dict(mlp="geglu"), "of type llama must have model.mlp=swiglu, got geglu"),
        (GEMMA3 | dict(mlp="swiglu"), "of type gemma3_text must have model.mlp=geglu, got swiglu"),
        (GEMMA3, "of type gemma3_text must have model.embedding_scale=2.82843, got 1"),
        (GEMMA3 | dict(embedding_scale=8**0.5, query_scale=0.3), "must have model.query_scale=0.301511, got 0.3;"),
        (dict(sinks=True), "got sinks; export only models of such a family"),
    ],
)
def test_a_model_that_no_family_has_is_refused(tmp_path, changes, words):
    config = ModelConfig(vocab_size=8, hidden_size=8, num_layers=1, num_heads=1, mlp_size=8, **changes)
    with pytest.raises(ValueError, match=re.escape(words)):
        to_hf(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(params=0))), tmp_path / "out")


def test_parameters_of_another_shape_and_a_folder_in_use_are_refused(sharded, tmp_path):
    model = from_hf(sharded)
    with pytest.raises(ValueError, match=r"layers/attention_norm/scale must be \(3, 32\), got \(4, 32\)"):
        to_hf(nnx.state(model, nnx.Param), tmp_path / "out", config=replace(model.config, num_layers=3))
    with pytest.raises(ValueError, match="must be given the config of the model"):
        to_hf(nnx.state(model, nnx.Param), tmp_path / "out")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes").write_text("mine")
    with pytest.raises(ValueError, match="must be new or empty"):
        to_hf(model, tmp_path / "full")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full"]
