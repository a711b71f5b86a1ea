"""How long the sequences are on which published models were trained; imports no jax."""

from __future__ import annotations

from collections.abc import Mapping

# The positions that config.json of a preset's model gives: its model_type, and max_position_embeddings in tokens. The
# gpt shapes were trained with learned positions, which they do not have here.
_LLAMA2, _LLAMA3, _LLAMA31 = (("llama", length) for length in (4096, 8192, 131072))
_QWEN25, _QWEN3, _QWEN3_MOE = ("qwen2", 32768), ("qwen3", 40960), ("qwen3_moe", 40960)
_QWEN35, _QWEN36, _QWEN_NEXT = (
    (model_type, 262144) for model_type in ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
)
PRESET_POSITIONS: Mapping[str, tuple[str, int]] = {
    **dict.fromkeys(("llama2-7b", "llama2-13b", "llama2-70b"), _LLAMA2),
    **dict.fromkeys(("llama3-8b", "llama3-70b"), _LLAMA3),
    **dict.fromkeys(("llama3.1-8b", "llama3.2-1b"), _LLAMA31),
    # Of the 7B and 32B those of Qwen2.5-Instruct: pre-training ended at 32,768 tokens (arXiv 2412.15115, section 3.3).
    **dict.fromkeys(("qwen2.5-0.5b", "qwen2.5-7b", "qwen2.5-32b"), _QWEN25),
    **dict.fromkeys(("qwen3-0.6b", "qwen3-8b", "qwen3-32b"), _QWEN3),
    **dict.fromkeys(("qwen3-30b-a3b", "qwen3-235b-a22b"), _QWEN3_MOE),
    **dict.fromkeys(("qwen3.5-0.8b", "qwen3.5-4b", "qwen3.5-9b", "qwen3.5-27b"), _QWEN35),
    "qwen3.6-35b-a3b": _QWEN36,
    "qwen3-next-80b-a3b": _QWEN_NEXT,
    "gemma-3-27b": ("gemma3_text", 131072),
    "olmo-3-7b": ("olmo3", 65536),
    "mistral-7b-v0.3": ("mistral", 32768),
    "gpt-oss-20b": ("gpt_oss", 131072),
}
# Tokens of the sequences of pre-training where config.json gives other positions: Qwen3 was trained on 32,768 tokens
# (arXiv 2505.09388, section 3.2), and its 40,960 positions are those and 8,192 of a prompt (its model card).
_TRAINED: Mapping[tuple[str, int], int] = {_QWEN3: 32768, _QWEN3_MOE: 32768}


def trained_length(model_type: str | None, num_positions: int) -> int:
    """Returns the tokens of the sequences on which a model was trained.

    Args:
        model_type: of its config.json.
        num_positions: the `max_position_embeddings` of its config.json.
    """
    return _TRAINED.get((str(model_type), num_positions), num_positions)
