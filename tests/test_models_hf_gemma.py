"""A multimodal Gemma 3 folder: its language model is imported, by both spellings of its tensors' names."""

import numpy as np
import pytest
import torch
import transformers
from exactness import quick_jit
from hf_models import GEMMA3, SIZES, float64_transformers
from safetensors.torch import load_file, save_file

from sppo_jax.models import from_hf, to_hf

pytestmark = pytest.mark.xdist_group("models_hf")
VISION = dict(
    hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=8
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model with a vision tower, saved by transformers; its folder, tokens, and logits."""
    folder = tmp_path_factory.mktemp("multimodal") / "weights"
    tokens = np.random.default_rng(3).integers(0, 50, (2, 24)).astype(np.int32)
    text = {**SIZES, **GEMMA3, "final_logit_softcapping": None}
    config = transformers.Gemma3Config(
        text_config=text, vision_config=VISION, image_token_index=60, boi_token_index=58,
        eoi_token_index=59, mm_tokens_per_image=4, attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(7)
    with float64_transformers(), torch.no_grad():
        model = transformers.Gemma3ForConditionalGeneration(config).eval()
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
        logits = model(torch.tensor(tokens, dtype=torch.long)).logits.numpy()
    model.save_pretrained(folder)
    return folder, tokens, logits


def text_tensors(folder):
    tensors = load_file(folder / "model.safetensors")
    return {
        name.removeprefix("language_model."): x.numpy().tobytes()
        for name, x in tensors.items()
        if not name.startswith(("vision_tower", "multi_modal_projector"))
    }


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_language_model_alone_is_imported_and_exported(x64, folder, prefix, tmp_path):
    origin, tokens, logits = folder
    here = tmp_path / "in"
    here.mkdir()
    (here / "config.json").write_text((origin / "config.json").read_text())
    tensors = load_file(origin / "model.safetensors")
    assert any(name.startswith("language_model.model.") for name in tensors)
    save_file(
        {name.replace("language_model.model.", prefix): x for name, x in tensors.items()}, here / "model.safetensors"
    )
    left_out = r"has multi_modal_projector \(2 tensors\) and vision_tower \(\d+ tensors\), left out here"
    with pytest.warns(UserWarning, match=left_out):
        model = from_hf(here, dtype="float64")
    np.testing.assert_allclose(quick_jit(lambda x: model(x))(tokens), logits, rtol=0, atol=1e-9)
    to_hf(model, tmp_path / "out", like=here)
    assert text_tensors(tmp_path / "out") == text_tensors(origin)
    config = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    assert (config.model_type, config.architectures) == ("gemma3_text", ["Gemma3ForCausalLM"])
