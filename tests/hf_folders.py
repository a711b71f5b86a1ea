"""Small Hugging Face folders written by hand: random tensors, a config.json, a tokenizer of bytes."""

import json

import numpy as np
from safetensors.numpy import save_file

from sppo_jax.config import ModelConfig
from sppo_jax.config.to_hf import shape_to_hf
from sppo_jax.models.hf.tensors import tensor_shapes

SMALL = dict(vocab_size=260, hidden_size=16, num_layers=2, num_heads=4, num_kv_heads=2, mlp_size=24, qkv_bias=True)


def write_folder(folder, dtype="float32", **changes):
    """Writes a model's folder.

    Args:
        folder: to make.
        dtype: of the tensors.
        changes: of the model's shape.

    Returns:
        The tensors by name.
    """
    model = ModelConfig(**{**SMALL, **changes})
    rng = np.random.default_rng(1)
    tensors = {name: rng.normal(0, 0.2, shape).astype(dtype) for name, shape in tensor_shapes(model).items()}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    config = shape_to_hf(model, like={"bos_token_id": 256}, length=512, dtype=dtype)
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder / "tokenizer.json", num_tokens=257)
    return tensors


def write_tokenizer(path, num_tokens):
    """Writes a tokenizer of single characters and unused tokens."""
    characters = [chr(code) for code in range(32, 127)] + ["\n", "\t"]
    vocab = {token: number for number, token in enumerate(characters)}
    vocab |= {f"<unused{number}>": number for number in range(len(vocab), num_tokens)}
    model = {"type": "BPE", "vocab": vocab, "merges": [], "unk_token": f"<unused{num_tokens - 1}>"}
    path.write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
