"""Published model shapes by name; imports no jax.

A preset is a dict of `ModelConfig` fields (with `rope` a dict of `RopeConfig` fields, `experts` one of `ExpertsConfig`
fields, and `delta` one of `DeltaConfig` fields). Keys of the user replace fields of the preset. The gpt-* shapes are
those of the sequence-pipeline papers: multi-head attention, a GELU MLP of four times the hidden size, GPT-2's
vocabulary padded to 50304, and a tied head. Here they have RMSNorm and rotary positions, which changes their cost by
well under one percent.
"""

from __future__ import annotations

import copy
import difflib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any


def _llama(hidden: int, layers: int, heads: int, kv_heads: int, mlp_size: int | None, **fields: Any) -> dict[str, Any]:
    """Returns the shape of a Llama-like model; vocabulary and rotary base are Llama 2's unless `fields` differs."""
    shape = {
        "vocab_size": 32000,
        "hidden_size": hidden,
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": hidden // heads,
        "mlp_size": mlp_size,
        "mlp": "swiglu",
        "qk_norm": False,
        "qkv_bias": False,
        "tied_embeddings": False,
        "norm_eps": 1e-5,
        "rope": {"theta": 10000.0},
    }
    return shape | fields


def _llama3_rope(factor: float) -> dict[str, Any]:
    return {
        "theta": 500000.0,
        "scaling": "llama3",
        "factor": factor,
        "original_length": 8192,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }


def _qwen(hidden: int, layers: int, heads: int, kv_heads: int, mlp_size: int | None, **fields: Any) -> dict[str, Any]:
    defaults = {"vocab_size": 151936, "norm_eps": 1e-6, "rope": {"theta": 1000000.0}}
    return _llama(hidden, layers, heads, kv_heads, mlp_size, **(defaults | fields))


def _qwen_experts(hidden: int, layers: int, heads: int, size: int) -> dict[str, Any]:
    experts = {"count": 128, "chosen": 8, "size": size, "normalized": True, "balance": 0.001}
    return _qwen(hidden, layers, heads, 4, None, head_dim=128, qk_norm=True, experts=experts)


def _gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    """Returns a gpt-oss shape: every second layer, the first among them, has a window."""
    shape = _llama(
        2880, layers, 64, 8, None, head_dim=64, vocab_size=201088, qkv_bias=True, output_bias=True, sinks=True
    )
    rope = {"theta": 150000.0, "scaling": "yarn", "factor": 32.0, "original_length": 4096, "truncate": False}
    chosen = {"mlp": "clamped", "bias": True, "scores": "softmax_of_chosen"}
    return shape | {
        "layers": f"{layers // 2}x(local,full)",
        "layer_types": {"local": {"sliding_window": 128}},
        "experts": {"count": experts, "chosen": 4, "size": 2880, **chosen},
        "rope": rope,
    }


def _local(window: int, theta: float) -> dict[str, Any]:
    """Returns a layer type with a window, whose rotation is not scaled."""
    return {"local": {"sliding_window": window, "rope": {"theta": theta, "scaling": "none", "factor": 1.0}}}


def _gemma3(hidden: int, layers: int, heads: int, kv_heads: int, mlp_size: int, scalar: int) -> dict[str, Any]:
    """Returns the shape of a Gemma 3; queries are scaled by one over the root of `scalar`."""
    rest = layers % 6
    fields = {"vocab_size": 262208, "head_dim": 128, "mlp": "geglu", "qk_norm": True, "norms": "both",
              "unit_norm": True, "tied_embeddings": True, "norm_eps": 1e-6}  # fmt: skip
    return _llama(hidden, layers, heads, kv_heads, mlp_size, **fields) | {
        "layers": f"{layers // 6}x(5xlocal,full)" + (f",{rest}xlocal" if rest else ""),
        "layer_types": _local(1024, 1e4),
        "rope": {"theta": 1e6, "scaling": "linear", "factor": 8.0, "original_length": 131072},
        "embedding_scale": hidden**0.5,
        "query_scale": scalar**-0.5,
    }


def _olmo3(hidden: int, layers: int, heads: int, kv_heads: int, mlp_size: int) -> dict[str, Any]:
    fields = {"vocab_size": 100278, "norm_eps": 1e-6, "norms": "behind", "qk_norm": True, "qk_norm_over_heads": True}
    return _llama(hidden, layers, heads, kv_heads, mlp_size, **fields) | {
        "layers": f"{layers // 4}x(3xlocal,full)",
        "layer_types": _local(4096, 5e5),
        "rope": {"theta": 5e5, "scaling": "yarn", "factor": 8.0, "original_length": 8192},
    }


def _hybrid(
    hidden: int, layers: int, heads: tuple[int, int], mlp_size: int | None, values: int, **fields: Any
) -> dict[str, Any]:
    """Returns the shape of a Qwen3.5 or Qwen3-Next, which have the gated delta rule in three layers of four.

    Args:
        hidden: elements of the hidden state.
        layers: of the model.
        heads: query heads, and heads of keys and values.
        mlp_size: of a layer's MLP.
        values: heads of values of the gated delta rule.
        fields: others, or other values.
    """
    shape: dict[str, Any] = dict(
        vocab_size=248320, head_dim=256, qk_norm=True, unit_norm=True, output_gate=True, norm_eps=1e-6,
        rope={"theta": 1e7, "fraction": 0.25},
        delta={"value_heads": values, "key_heads": 16, "key_size": 128, "value_size": 128, "taps": 4},
    )  # fmt: skip
    return _llama(hidden, layers, *heads, mlp_size, **(shape | fields)) | {"layers": f"{layers // 4}x(3xdelta,full)"}


def _hybrid_experts(count: int, chosen: int) -> dict[str, Any]:
    return {"count": count, "chosen": chosen, "size": 512, "shared_size": 512, "shared_gate": True, "balance": 0.001}


def _gpt(hidden: int, layers: int, heads: int) -> dict[str, Any]:
    return _llama(hidden, layers, heads, heads, 4 * hidden, vocab_size=50304, mlp="gelu", tied_embeddings=True)


_LLAMA3 = {"vocab_size": 128256, "rope": {"theta": 500000.0}}

PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "llama2-7b": _llama(4096, 32, 32, 32, 11008),
        "llama2-13b": _llama(5120, 40, 40, 40, 13824),
        "llama2-70b": _llama(8192, 80, 64, 8, 28672),
        "llama3-8b": _llama(4096, 32, 32, 8, 14336, **_LLAMA3),
        "llama3-70b": _llama(8192, 80, 64, 8, 28672, **_LLAMA3),
        "llama3.1-8b": _llama(4096, 32, 32, 8, 14336, vocab_size=128256, rope=_llama3_rope(8.0)),
        "llama3.2-1b": _llama(2048, 16, 32, 8, 8192, vocab_size=128256, tied_embeddings=True, rope=_llama3_rope(32.0)),
        "qwen2.5-0.5b": _qwen(896, 24, 14, 2, 4864, qkv_bias=True, tied_embeddings=True),
        "qwen2.5-7b": _qwen(3584, 28, 28, 4, 18944, vocab_size=152064, qkv_bias=True),
        "qwen2.5-32b": _qwen(5120, 64, 40, 8, 27648, vocab_size=152064, qkv_bias=True, norm_eps=1e-5),
        "qwen3-0.6b": _qwen(1024, 28, 16, 8, 3072, head_dim=128, qk_norm=True, tied_embeddings=True),
        "qwen3-8b": _qwen(4096, 36, 32, 8, 12288, qk_norm=True),
        "qwen3-32b": _qwen(5120, 64, 64, 8, 25600, head_dim=128, qk_norm=True),
        "qwen3-30b-a3b": _qwen_experts(2048, 48, 32, 768),
        "qwen3-235b-a22b": _qwen_experts(4096, 94, 64, 1536),
        "qwen3.5-0.8b": _hybrid(1024, 24, (8, 2), 3584, 16, tied_embeddings=True),
        "qwen3.5-4b": _hybrid(2560, 32, (16, 4), 9216, 32, tied_embeddings=True),
        "qwen3.5-9b": _hybrid(4096, 32, (16, 4), 12288, 32),
        "qwen3.5-27b": _hybrid(5120, 64, (24, 4), 17408, 48),
        "qwen3.6-35b-a3b": _hybrid(2048, 40, (16, 2), None, 32, experts=_hybrid_experts(256, 8)),
        "qwen3-next-80b-a3b": _hybrid(2048, 48, (16, 2), None, 32, experts=_hybrid_experts(512, 10), vocab_size=151936),
        "gemma-3-27b": _gemma3(5376, 62, 32, 16, 21504, 168),
        "olmo-3-7b": _olmo3(4096, 32, 32, 32, 11008),
        "mistral-7b-v0.3": _llama(4096, 32, 32, 8, 14336, vocab_size=32768, rope={"theta": 1000000.0}),
        "gpt-oss-20b": _gpt_oss(24, 32),
        "gpt-1.3b": _gpt(2048, 24, 16),
        "gpt-2.7b": _gpt(2560, 32, 32),
        "gpt-7b": _gpt(4096, 32, 32),
        "gpt-13b": _gpt(5120, 40, 40),
        "gpt-30b": _gpt(6144, 64, 64),
        "gpt-65b": _gpt(8192, 80, 64),
    }
)


def apply_preset(name: str) -> dict[str, Any]:
    """Returns a published model shape by its name.

    Args:
        name: a key of `PRESETS`.

    Returns:
        A new dict of `ModelConfig` fields, which the caller may change.

    Raises:
        ValueError: no preset has that name.
    """
    if name not in PRESETS:
        nearest = difflib.get_close_matches(name, PRESETS, n=1, cutoff=0.0)[0]
        known = ", ".join(sorted(PRESETS))
        raise ValueError(f"model.preset must be one of {known}, got {name!r}; did you mean {nearest!r}?")
    return copy.deepcopy(dict(PRESETS[name]))
