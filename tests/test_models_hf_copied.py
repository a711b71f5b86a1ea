"""Layers that draft tokens, which an import leaves out: an export of the same base has them again."""

import json

import numpy as np
import pytest
from hf_folders import write_folder
from safetensors.numpy import load_file, save_file

from sppo_jax.config.hf.families import read_config
from sppo_jax.models import from_hf, to_hf
from sppo_jax.models.hf.copied import NOTHING, copied_from

HYBRID = dict(layers="delta,full", qkv_bias=False, qk_norm=True, unit_norm=True, output_gate=True)
DRAFTS = {
    "mtp.fc.weight": np.arange(6, dtype=np.float16).reshape(2, 3),
    "mtp.layers.0.norm.weight": np.array([0.1], np.float32),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A folder with layers that draft, in dtypes of their own, and what sees."""
    folder = tmp_path_factory.mktemp("base") / "hf"
    tensors = write_folder(folder, **HYBRID)
    save_file({**tensors, **DRAFTS, "model.visual.x": np.ones(2, np.float32)}, folder / "model.safetensors")
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | {"mtp_num_hidden_layers": 1}))
    return folder


@pytest.mark.filterwarnings("ignore:.*left out here")
@pytest.mark.parametrize("shard_bytes", [10**9, 4000])
def test_an_export_has_the_bits_of_the_layers_that_draft(base, tmp_path, monkeypatch, shard_bytes):
    monkeypatch.setattr("sppo_jax.models.hf.write.SHARD_BYTES", shard_bytes)
    model = from_hf(base)
    to_hf(model, tmp_path / "out", like=base, dtype="bfloat16")
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    found = {name: x for file in files for name, x in load_file(file).items()}
    assert {name: (x.dtype, x.tobytes()) for name, x in found.items() if name.startswith("mtp")} == {
        name: (x.dtype, x.tobytes()) for name, x in DRAFTS.items()
    }
    assert not any("visual" in name for name in found) and read_config(tmp_path / "out")["mtp_num_hidden_layers"] == 1
    assert (len(files) > 1) == (shard_bytes == 4000)
    if len(files) > 1:
        index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
        assert set(DRAFTS) < set(index["weight_map"]) == set(found)
    to_hf(model, tmp_path / "plain", like=base, without=["mtp"])
    left = {name for file in (tmp_path / "plain").glob("*.safetensors") for name in load_file(file)}
    assert left == set(found) - set(DRAFTS)
    assert "mtp_num_hidden_layers" not in read_config(tmp_path / "plain")


@pytest.mark.filterwarnings("ignore:.*left out here")
def test_a_changed_vocabulary_is_refused(base):
    origin, model = read_config(base), from_hf(base).config
    family = origin["model_type"]
    assert set(copied_from(base, origin, model, family, ()).shapes) == set(DRAFTS)
    with pytest.raises(ValueError, match=r"mtp\.\* of .* got 260 tokens and 7 in .*; add --without mtp"):
        copied_from(base, origin | {"vocab_size": 7}, model, family, ())
    others = [(None, family, ()), (base, "llama", ()), (base, family, ["mtp"])]
    assert [copied_from(one, origin, model, kind, without) for one, kind, without in others] == [NOTHING] * 3
