"""`sppo init` beyond a model's positions: no warning is left, and transformers with the same scaling agrees."""

import json
import logging

import numpy as np
import pytest
import torch
import transformers
from exactness import quick_jit
from hf_models import float64_transformers, make_model

from sppo_jax.cli import main
from sppo_jax.config import load_config, to_dict
from sppo_jax.models import from_hf

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
logging.getLogger("torch").setLevel(logging.ERROR)
pytestmark = pytest.mark.xdist_group("init_lengths")

TEXT = b"Numbers of positions beyond those that a model was trained on need a rotation that turns more slowly, for far."
LENGTHS = (96, 128, 256, 576)  # of models with 64 positions
# A model of each family, and what is written of `model.rope` for the shortest length.
FAMILIES = {
    "qwen3-tied": {"scaling": "yarn", "factor": 2.0, "original_length": 64},
    "llama": {"scaling": "linear", "factor": 3.0},
    "llama-tied-llama3": {"scaling": "llama3", "factor": 12.0},
    "qwen2-yarn": {"scaling": "yarn", "factor": 6.0},
    "mistral": {"scaling": "yarn", "factor": 2.0},
    "mistral-window": {},
    "qwen3-windows": {"theta": 23000.0},
    "qwen3-moe": {"scaling": "yarn", "factor": 2.0},
    "smollm3": {"scaling": "yarn", "factor": 2.0},
    "gemma3": {"scaling": "linear", "factor": 12.0},
    "olmo3": {"scaling": "yarn", "factor": 6.0},
    "gpt-oss": {"scaling": "yarn", "factor": 3.0},
    "qwen3.5": {"scaling": "yarn", "factor": 2.0},
    "qwen3.5-moe": {"scaling": "yarn", "factor": 2.0},
    "qwen3-next": {"scaling": "yarn", "factor": 2.0},
}
IN_CI = "qwen3-tied"


def with_rope(content, rope):
    """Returns a config.json with other rotary settings for layers without a window, by transformers' names."""
    kinds = {"none": "default"}
    changed = {"rope_type": kinds.get(rope.scaling, rope.scaling), "rope_theta": rope.theta}
    if rope.scaling != "none":
        changed["factor"] = rope.factor
    if rope.scaling == "yarn":
        changed["original_max_position_embeddings"] = rope.original_length
    given = content["rope_parameters"]
    if "full_attention" in given:
        return content | {"rope_parameters": given | {"full_attention": given["full_attention"] | changed}}
    return content | {"rope_parameters": given | changed}


def logits_of_transformers(folder, content, tokens):
    """Returns what transformers computes in float64 from a folder's weights with another config.json."""
    (folder / "config.json").write_text(json.dumps(content))
    with float64_transformers(), torch.no_grad():
        loaded = dict(dtype=torch.float64, attn_implementation="eager", experts_implementation="eager")
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, **loaded)
        return model(torch.tensor(tokens, dtype=torch.long)).logits.numpy()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == IN_CI else pytest.mark.slow) for name in FAMILIES]
)
def test_the_written_scaling_is_transformers_and_ends_the_warning(x64, tmp_path, monkeypatch, capfd, name):
    monkeypatch.chdir(tmp_path)
    with float64_transformers():
        make_model(name).save_pretrained("hf")
    content = json.loads((tmp_path / "hf" / "config.json").read_text())
    tokens = (np.frombuffer(TEXT, np.uint8) % 61).astype(np.int32)[None]
    assert tokens.shape[1] > LENGTHS[0]
    written = []
    for length in LENGTHS:
        capfd.readouterr()
        assert main(["init", "hf:hf", "--length", str(length), "--cluster", "cpu:1x1", "--out", f"{length}.yaml"]) == 0
        assert main(["plan", f"{length}.yaml"]) == 0
        assert "sequence.length should be" not in capfd.readouterr().err
        rope = load_config(f"{length}.yaml").model.rope
        written.append(rope)
        got = quick_jit(from_hf("hf", dtype="float64", rope=to_dict(load_config(f"{length}.yaml"))["model"]["rope"]))
        want = logits_of_transformers(tmp_path / "hf", with_rope(content, rope), tokens)
        np.testing.assert_allclose(got(tokens), want, rtol=0, atol=1e-9)
        (tmp_path / "hf" / "config.json").write_text(json.dumps(content))
    assert {key: getattr(written[0], key) for key in FAMILIES[name]} == FAMILIES[name]
    # From no scaling 96 and 128 tokens need the same factor.
    assert len(set(written)) in ((3, 4) if FAMILIES[name] else (1,))
    head = (tmp_path / "96.yaml").read_text()
    assert "# rope" in head and ("rope:" in head) == bool(FAMILIES[name])
