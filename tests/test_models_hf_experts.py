"""Hugging Face folders of models with experts: both forms of tensors, parts of them, padding, and bits written back."""

import json
from pathlib import Path
from typing import NamedTuple

import chex
import jax
import numpy as np
import pytest
import torch
from exactness import quick_jit, relative_errors
from flax import nnx
from hf_models import balance_loss, float64_transformers, make_model
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import load_file
from safetensors.torch import save_file

from sppo_jax.config.hf.families import read_shape
from sppo_jax.models import from_hf, load_hf_params, to_hf
from sppo_jax.models.dense import dense_losses
from sppo_jax.models.hf.folder import TensorFolder

pytestmark = pytest.mark.xdist_group("models_hf_experts")
LENGTH, PADDING = 24, 9


class Folders(NamedTuple):
    """A model with one tensor an expert, as transformers writes it, and with one a layer, as it holds it."""

    separate: Path
    fused: Path
    model: torch.nn.Module


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    place = tmp_path_factory.mktemp("experts")
    with float64_transformers():
        model = make_model("qwen3-moe", num_experts_per_tok=3, norm_topk_prob=False)
    model.save_pretrained(place / "separate")
    write_fused(place / "fused", model, {name: p.detach() for name, p in model.named_parameters()})
    return Folders(place / "separate", place / "fused", model)


def write_fused(folder, model, tensors):
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    # Published folders name the experts otherwise than transformers 5.24 does.
    config = model.config.to_dict() | {"dtype": "float64"}
    config["num_experts"] = config.pop("num_local_experts")
    (folder / "config.json").write_text(json.dumps(config))


def read_bits(folder):
    files = sorted(folder.glob("*.safetensors"))
    return {name: (x.shape, x.tobytes()) for file in files for name, x in load_file(file).items()}


def test_both_forms_are_read_alike_and_written_as_they_were_read(x64, folders, tmp_path, monkeypatch):
    monkeypatch.setattr("sppo_jax.models.hf.write.SHARD_BYTES", 30_000)
    names = read_bits(folders.fused)
    assert len([name for name in names if name.endswith("experts.gate_up_proj")]) == 2 and len(names) < 30
    model = from_hf(folders.fused, dtype="float64")
    chex.assert_trees_all_equal(
        nnx.state(model, nnx.Param), nnx.state(from_hf(folders.separate, dtype="float64"), nnx.Param)
    )
    for like, form in (
        (folders.fused, folders.fused),
        (folders.separate, folders.separate),
        (None, folders.separate),
    ):
        out = tmp_path / str(like and like.name)
        to_hf(model, out, like=like)
        assert len(list(out.glob("*.safetensors"))) > 2
        assert read_bits(out) == read_bits(form)
        shape = read_shape(out)
        shape["rope"] |= {"original_length": 64}
        assert shape == read_shape(folders.separate)
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text('{"model_type": "gemma", "bos_token_id": 3}')
    (other / "model.safetensors").write_bytes((folders.fused / "model.safetensors").read_bytes())
    to_hf(model, tmp_path / "like other", like=other)
    assert read_bits(tmp_path / "like other") == read_bits(folders.separate)


def test_loss_balance_and_gradients_with_padding_are_those_of_transformers(x64, folders, tmp_path):
    tokens = np.random.default_rng(4).integers(0, 61, (2, LENGTH)).astype(np.int32)
    is_real = np.ones((2, LENGTH), bool)
    is_real[1, -PADDING:] = False
    targets = np.where(is_real & np.roll(is_real, -1, axis=1), np.roll(tokens, -1, axis=1), -1)
    targets[:, -1] = -1
    positions = np.tile(np.arange(LENGTH, dtype=np.int32), (2, 1))
    batch = dict(tokens=tokens, targets=targets, positions=positions, document_ids=np.where(is_real, 0, -1))
    with float64_transformers():
        theirs, mask = folders.model, torch.tensor(is_real).long()
        theirs.zero_grad()
        out = theirs(torch.tensor(tokens).long(), attention_mask=mask, output_router_logits=True)
        want_loss = torch.nn.functional.cross_entropy(
            out.logits.reshape(-1, 61), torch.tensor(targets).long().ravel(), ignore_index=-1
        )
        want_penalty = balance_loss(theirs, out, mask)
        (want_loss + want_penalty).backward()
    write_fused(tmp_path / "grads", theirs, {name: p.grad for name, p in theirs.named_parameters()})

    model = from_hf(folders.separate, dtype="float64")
    params = nnx.state(model, nnx.Param)

    def total(params, batch):
        losses = dense_losses(model, params, batch)
        return sum(losses), losses

    (_, (loss, penalty)), grads = quick_jit(jax.value_and_grad(total, has_aux=True))(params, batch)
    assert float(loss) == pytest.approx(want_loss.item(), rel=1e-12)
    assert float(penalty) == pytest.approx(want_penalty.item(), rel=1e-12) and float(penalty) > 0.1
    errors = relative_errors(grads, load_hf_params(tmp_path / "grads", params))
    assert max(errors.values()) < 1e-9, errors


@pytest.mark.parametrize("form", ["separate", "fused"])
def test_a_device_reads_its_experts_alone_and_they_are_written_from_there(x64, folders, monkeypatch, tmp_path, form):
    reads = []
    read = TensorFolder.read
    monkeypatch.setattr(
        TensorFolder, "read", lambda self, name, part: reads.append((name, part)) or read(self, name, part)
    )
    model = from_hf(folders.fused, dtype="float64")
    shapes = nnx.state(model, nnx.Param)
    mesh = jax.make_mesh((2,), ("seq",))
    arrays = ("gate", "up", "down")

    def sharding(path, leaf):
        of_experts = any(f"['experts']['{name}']" in jax.tree_util.keystr(path) for name in arrays)
        spec = PartitionSpec(None, "seq") if of_experts else PartitionSpec()
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    reads.clear()
    got = load_hf_params(getattr(folders, form), jax.tree_util.tree_map_with_path(sharding, shapes))
    chex.assert_trees_all_equal(got, shapes)
    to_hf(got, tmp_path / "out", config=model.config, like=getattr(folders, form))
    assert read_bits(tmp_path / "out") == read_bits(getattr(folders, form))
    of_layer = [(name, part) for name, part in reads if "layers.1.mlp.experts" in name]
    if form == "separate":
        assert sorted(name.split(".")[5] for name, _ in of_layer) == sorted("012345" * 3)
        return
    assert [part[0] for name, part in of_layer if name.endswith("down_proj")] == [slice(0, 3), slice(3, 6)]
    halves = [part[:2] for name, part in of_layer if name.endswith("gate_up_proj")]
    assert halves == [
        (experts, half) for half in (slice(0, 20), slice(20, 40)) for experts in (slice(0, 3), slice(3, 6))
    ]


def test_settings_of_training_are_free(folders):
    model = from_hf(folders.separate, experts={"balance": 0.0, "z": 0.001, "chosen": 2, "normalized": True})
    experts = model.config.experts
    assert (experts.balance, experts.z, experts.chosen, experts.normalized, experts.size) == (0.0, 0.001, 2, True, 20)
    with pytest.raises(ValueError, match=r"model.experts.count must be 6, as in the weights of .*, got 8; remove"):
        from_hf(folders.separate, experts={"count": 8})
