"""gpt-oss folders: MXFP4 and the way out of it, experts read by the device, and what is written without a folder."""

import json

import chex
import jax
import numpy as np
import pytest
import torch
import transformers
from flax import nnx
from hf_models import make_model
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file

from sppo_jax.config.hf.families import read_shape
from sppo_jax.models import from_hf, load_hf_params, to_hf
from sppo_jax.models.hf.folder import TensorFolder
from sppo_jax.models.stacks import stacks_of

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

pytestmark = pytest.mark.xdist_group("models_hf_gpt_oss")
EXPERTS = "model.layers.1.mlp.experts."
# The values of four bits of MXFP4.
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
FP4 = np.concatenate([FP4, -FP4])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A gpt-oss in float32."""
    folder = tmp_path_factory.mktemp("gpt-oss") / "weights"
    make_model("gpt-oss").save_pretrained(folder)
    return folder


def read_bits(folder):
    files = sorted(folder.glob("*.safetensors"))
    return {name: (x.shape, x.tobytes()) for file in files for name, x in load_file(file).items()}


def test_a_device_reads_its_experts_alone_and_without_a_folder_the_bits_are_the_same(folder, tmp_path, monkeypatch):
    model = from_hf(folder, dtype="float32")
    whole, mesh, reads = nnx.state(model, nnx.Param), jax.make_mesh((2,), ("seq",)), []
    read = TensorFolder.read
    monkeypatch.setattr(
        TensorFolder, "read", lambda self, name, part: reads.append((name, part)) or read(self, name, part)
    )

    def sharding(path, leaf):
        arrays = [f"['experts']['{name}']" for name in ("gate", "up", "down", "gate_bias", "down_bias")]
        of_experts = any(name in jax.tree_util.keystr(path) for name in arrays)
        spec = PartitionSpec(None, "seq") if of_experts else PartitionSpec()
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    got = load_hf_params(folder, jax.tree_util.tree_map_with_path(sharding, whole))
    chex.assert_trees_all_equal(got, whole)
    halves = [part[0] for name, part in reads if name == EXPERTS + "down_proj"]
    assert halves == [slice(0, 3), slice(3, 6)]
    monkeypatch.setattr("sppo_jax.models.hf.write.SHARD_BYTES", 30_000)
    to_hf(got, tmp_path / "out", config=model.config)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    assert read_bits(tmp_path / "out") == read_bits(folder)
    assert read_shape(tmp_path / "out") == read_shape(folder)


def pack(folder, packed, rng):
    """Writes a folder whose experts are MXFP4, any bits, as gpt-oss is published; returns these tensors."""
    packed.mkdir()
    tensors = load_file(folder / "model.safetensors")
    blocks = {}
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inner, outer = tensors.pop(name).shape
        blocks[f"{name}_blocks"] = rng.integers(0, 256, (experts, outer, inner // 32, 16)).astype(np.uint8)
        blocks[f"{name}_scales"] = rng.integers(120, 128, (experts, outer, inner // 32)).astype(np.uint8)
    save_file(tensors | blocks, packed / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
    (packed / "config.json").write_text(json.dumps(config))
    return blocks


def unpacked(blocks, scales):
    """Returns a matrix of each expert: a byte has two values, the low bits first, and 32 of them share a scale."""
    values = np.stack([FP4[blocks & 15], FP4[blocks >> 4]], axis=-1).reshape(*scales.shape, 32)
    values = values * 2.0 ** (scales.astype(int) - 127)[..., None]
    return values.reshape(*scales.shape[:2], -1).swapaxes(1, 2)


def test_mxfp4_is_refused_and_the_folder_that_the_line_says_to_write_is_read(tmp_path):
    make_model("gpt-oss", hidden_size=64, intermediate_size=32).save_pretrained(tmp_path / "plain")
    packed = tmp_path / "packed"
    blocks = pack(tmp_path / "plain", packed, np.random.default_rng(2))
    words = r"write a bfloat16 folder with transformers: from_pretrained\(FOLDER, dtype=\"bfloat16\", "
    with pytest.raises(ValueError, match=f"quantization_config must be absent, got quant_method='mxfp4'; {words}"):
        from_hf(packed)
    config = json.loads((packed / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps(config | {"quantization_config": None}))
    with pytest.raises(ValueError, match=f"tensors must be unquantized, got .*_blocks in .*; {words}") as error:
        from_hf(packed)
    assert "\n" not in str(error.value)

    (packed / "config.json").write_text(json.dumps(config))
    way = transformers.Mxfp4Config(dequantize=True)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        packed, dtype="bfloat16", quantization_config=way, attn_implementation="eager"
    )
    theirs.save_pretrained(tmp_path / "bfloat16")
    model = from_hf(tmp_path / "bfloat16", dtype="float32")
    layer = stacks_of(model.layers)["full"].experts
    want = unpacked(blocks[EXPERTS + "gate_up_proj_blocks"], blocks[EXPERTS + "gate_up_proj_scales"])
    np.testing.assert_array_equal(layer.gate[1], want[..., ::2])
    np.testing.assert_array_equal(layer.up[1], want[..., 1::2])
    down = unpacked(blocks[EXPERTS + "down_proj_blocks"], blocks[EXPERTS + "down_proj_scales"])
    np.testing.assert_array_equal(layer.down[1], down)
    tokens = np.arange(20)[None] * 7 % 61
    with torch.no_grad():
        logits = theirs.float()(torch.tensor(tokens)).logits.numpy()
    np.testing.assert_allclose(model(tokens), logits, rtol=1e-3, atol=1e-3)
