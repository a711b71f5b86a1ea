"""Small random transformers models of each family, and transformers made to compute in float64 throughout."""

import sys
import types
from contextlib import contextmanager

import pytest
import torch
import transformers
from transformers import modeling_rope_utils
from transformers.models.gemma3 import modeling_gemma3
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama import modeling_llama
from transformers.models.mistral import modeling_mistral
from transformers.models.olmo3 import modeling_olmo3
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen3 import modeling_qwen3
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe
from transformers.models.qwen3_moe import modeling_qwen3_moe
from transformers.models.qwen3_next import modeling_qwen3_next
from transformers.models.smollm3 import modeling_smollm3

SIZES = dict(
    vocab_size=61, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, attn_implementation="eager",
)  # fmt: skip
LLAMA3 = dict(
    rope_type="llama3", rope_theta=5e3, factor=8.0, original_max_position_embeddings=16, low_freq_factor=1.0,
    high_freq_factor=4.0,
)  # fmt: skip
YARN = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=16)

GEMMA3 = dict(
    num_hidden_layers=4, head_dim=12, sliding_window=9, layer_types=["sliding_attention", "full_attention"] * 2,
    query_pre_attn_scalar=20, final_logit_softcapping=2.0, pad_token_id=None,
    rope_parameters={
        "full_attention": dict(rope_type="linear", rope_theta=1e6, factor=8.0),
        "sliding_attention": dict(rope_type="default", rope_theta=1e4),
    },
)  # fmt: skip

# No size fits in the place of another; three layers of four have the gated delta rule.
DELTA = dict(
    num_hidden_layers=4, head_dim=12, linear_num_key_heads=2, linear_num_value_heads=6, linear_key_head_dim=8,
    linear_value_head_dim=10, linear_conv_kernel_dim=4, pad_token_id=None,
    rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5),
)  # fmt: skip
DELTA_EXPERTS = DELTA | dict(
    num_hidden_layers=2, layer_types=["linear_attention", "full_attention"], num_experts=6, num_experts_per_tok=2,
    moe_intermediate_size=20, shared_expert_intermediate_size=28, router_aux_loss_coef=0.1,
    output_router_logits=True, experts_implementation="eager",
)  # fmt: skip

# Modules whose float32 is float64 within `float64_transformers`.
MODULES = (
    modeling_gemma3, modeling_olmo3,
    modeling_rope_utils, modeling_llama, modeling_mistral, modeling_qwen2, modeling_qwen3, modeling_qwen3_moe,
    modeling_smollm3, modeling_gpt_oss, modeling_qwen3_next, modeling_qwen3_5, modeling_qwen3_5_moe,
)  # fmt: skip

# Together: grouped heads of three ratios, heads that do not divide the width, tied or not, every scaling, bias, norm.
MODELS = {
    "llama": (
        transformers.LlamaConfig,
        dict(head_dim=10, rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor=2.0)),
    ),
    "llama-tied-llama3": (
        transformers.LlamaConfig,
        dict(tie_word_embeddings=True, rms_norm_eps=1e-5, rope_parameters=LLAMA3),
    ),
    "qwen2-yarn": (transformers.Qwen2Config, dict(rope_parameters=YARN)),
    "qwen3-tied": (transformers.Qwen3Config, dict(head_dim=12, tie_word_embeddings=True)),
    "qwen3-moe": (
        transformers.Qwen3MoeConfig,
        dict(
            head_dim=12,
            num_experts=6,
            num_experts_per_tok=2,
            moe_intermediate_size=20,
            norm_topk_prob=True,
            router_aux_loss_coef=0.1,
            output_router_logits=True,
            experts_implementation="eager",
        ),
    ),
    "mistral-window": (transformers.MistralConfig, dict(sliding_window=9)),
    "qwen2-window": (
        transformers.Qwen2Config,
        dict(use_sliding_window=True, sliding_window=16, max_window_layers=0, tie_word_embeddings=True),
    ),
    # Layers of two kinds: every second one has a window, experts, or does not rotate.
    "qwen3-windows": (
        transformers.Qwen3Config,
        dict(
            num_hidden_layers=4,
            head_dim=12,
            use_sliding_window=True,
            sliding_window=9,
            layer_types=["sliding_attention", "full_attention"] * 2,
        ),
    ),
    "qwen3-moe-mixed": (
        transformers.Qwen3MoeConfig,
        dict(
            num_hidden_layers=4,
            head_dim=12,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=20,
            norm_topk_prob=True,
            decoder_sparse_step=2,
            router_aux_loss_coef=0.1,
            output_router_logits=True,
            experts_implementation="eager",
        ),
    ),
    "smollm3": (
        transformers.SmolLM3Config,
        dict(num_hidden_layers=4, no_rope_layer_interval=2, pad_token_id=None, bos_token_id=1, eos_token_id=2),
    ),
    # Neither the size of an expert nor twice the size is the width, so that no transposed tensor fits.
    "gpt-oss": (
        transformers.GptOssConfig,
        dict(
            num_hidden_layers=3,
            head_dim=12,
            num_local_experts=6,
            num_experts_per_tok=2,
            intermediate_size=20,
            sliding_window=9,
            # In a head of 12 the ramp is another where its ends are rounded.
            rope_parameters=YARN
            | dict(rope_theta=100.0, factor=2.0, original_max_position_embeddings=32, truncate=False),
            router_aux_loss_coef=0.1,
            output_router_logits=True,
            experts_implementation="eager",
        ),
    ),
    # Norms behind or on both sides, and windowed layers with a rotation of their own.
    "gemma3": (transformers.Gemma3TextConfig, GEMMA3),
    "olmo3": (
        transformers.Olmo3Config,
        dict(
            num_hidden_layers=4,
            sliding_window=9,
            pad_token_id=None,
            eos_token_id=2,
            rope_parameters={
                "full_attention": YARN,
                "sliding_attention": dict(rope_type="default", rope_theta=500.0),
            },
        ),
    ),
    "qwen3-next": (transformers.Qwen3NextConfig, DELTA_EXPERTS),
    "qwen3-next-mixed": (
        transformers.Qwen3NextConfig,
        DELTA_EXPERTS
        | dict(
            num_hidden_layers=3,
            layer_types=["linear_attention", "full_attention", "linear_attention"],
            mlp_only_layers=[0, 1],
        ),
    ),
    "qwen3.5": (transformers.Qwen3_5TextConfig, DELTA),
    "qwen3.5-moe": (transformers.Qwen3_5MoeTextConfig, DELTA_EXPERTS | dict(intermediate_size=...)),
    "mistral": (
        transformers.MistralConfig,
        dict(num_attention_heads=5, num_key_value_heads=1, head_dim=6, sliding_window=None),
    ),
}


def make_model(name, **changes):
    """Makes a model, every parameter random, in torch's default dtype."""
    kind, fields = MODELS[name]
    torch.manual_seed(7)
    settings = {name: value for name, value in {**SIZES, **fields, **changes}.items() if value is not ...}
    model = transformers.AutoModelForCausalLM.from_config(kind(**settings)).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            # So large that gates are clamped, where a limit clamps them.
            is_clamped = hasattr(model.config, "swiglu_limit") and parameter_name.endswith("gate_up_proj")
            # Around one where there is one dim: scales of norms, which biases may be too.
            parameter.normal_(float(parameter.dim() == 1), 1.2 if is_clamped else 0.3)
    return model


def balance_loss(model, out, mask=None):
    """Returns transformers' loss that balances experts, times its coefficient, as a mean over sequences.

    A sequence weighs by its share of the real tokens.
    """
    config, rows = model.config, out.logits.shape[0]
    of_sequences = zip(*(of_layer.reshape(rows, -1, config.num_experts) for of_layer in out.router_logits), strict=True)
    masks = [None] * rows if mask is None else mask
    own = sys.modules[type(model).__module__]
    losses = [
        own.load_balancing_loss_func(of, config.num_experts, config.num_experts_per_tok, mask)
        for of, mask in zip(of_sequences, masks, strict=True)
    ]
    weights = [1 / rows] * rows if mask is None else (mask.sum(1) / mask.sum()).tolist()
    return config.router_aux_loss_coef * sum(weight * loss for weight, loss in zip(weights, losses, strict=True))


class _DoubleTorch(types.ModuleType):
    """torch, in which float32 is float64."""

    float = float32 = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


@contextmanager
def float64_transformers(*others):
    """Makes transformers compute in float64 where its code says float32: norms, angles and softmax.

    Args:
        others: modules beside `MODULES`.
    """
    double = _DoubleTorch("torch")
    with pytest.MonkeyPatch.context() as patch:
        for module in (*MODULES, *others):
            patch.setattr(module, "torch", double)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(torch.float32)
