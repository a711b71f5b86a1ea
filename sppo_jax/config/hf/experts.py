"""The experts of a model in a Hugging Face config.json, both ways; imports no jax."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sppo_jax.config.experts import ExpertsConfig

# Fields of `ExpertsConfig` that the weights or the model's code decide.
WEIGHT_FIELDS = (
    "count",
    "size",
    "mlp",
    "bias",
    "shared_size",
    "shared_gate",
    "scores",
    "scaling",
    "choice_bias",
    "expert_groups",
    "chosen_groups",
)
# Keys that speak of experts; an export writes its own.
KEYS = (
    "num_experts",
    "num_local_experts",
    "num_experts_per_tok",
    "experts_per_token",
    "moe_intermediate_size",
    "norm_topk_prob",
    "router_aux_loss_coef",
    "output_router_logits",
    "shared_expert_intermediate_size",
    "swiglu_limit",
    "swiglu_alpha",
)
# transformers' coefficient where the key is left out.
_COEFFICIENT = 0.001
# Said where a folder does not switch the loss on. The coefficient of a folder is no advice: gpt-oss has an unused 0.9.
BALANCE_OFF = f"balance off, as the folder has it; model.experts.balance={_COEFFICIENT:g} turns it on"
# What to do with experts in MXFP4, as gpt-oss is published.
DEQUANTIZE = (
    'write a bfloat16 folder with transformers: from_pretrained(FOLDER, dtype="bfloat16", '
    "quantization_config=Mxfp4Config(dequantize=True)) and save_pretrained(NEW_FOLDER)"
)


@dataclass(frozen=True, kw_only=True)
class _Style:
    """How a family has its experts.

    Args:
        name: of the family, in messages.
        count: the key with the number of experts that an export writes.
        size: the key with the size of an expert.
        normalized: the key that says whether weights are divided by their sum; None where they add up to 1.
        normalizes: whether they are if that key is left out.
        shared: the key with the size of the expert that every token passes; None where there is none.
        fields: of `ExpertsConfig`, where the model's code differs from its defaults.
        constants: keys whose values the code here has.
    """

    name: str
    count: str
    size: str
    normalized: str | None = None
    normalizes: bool = False
    shared: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    constants: Mapping[str, float] = field(default_factory=dict)


_SHARED: Mapping[str, Any] = dict(shared="shared_expert_intermediate_size", fields={"shared_gate": True})
_STYLES = {
    "qwen3_moe": _Style(
        name="Qwen3-MoE", count="num_experts", size="moe_intermediate_size", normalized="norm_topk_prob"
    ),
    "qwen3_next": _Style(
        name="Qwen3-Next",
        count="num_experts",
        size="moe_intermediate_size",
        normalized="norm_topk_prob",
        normalizes=True,
        **_SHARED,
    ),
    "qwen3_5_moe_text": _Style(name="Qwen3.5-MoE", count="num_experts", size="moe_intermediate_size", **_SHARED),
    "gpt_oss": _Style(
        name="gpt-oss",
        count="num_local_experts",
        size="intermediate_size",
        fields={"mlp": "clamped", "bias": True, "scores": "softmax_of_chosen"},
        constants={"swiglu_limit": 7.0, "swiglu_alpha": 1.702},
    ),
}


def experts_from_hf(config: Mapping[str, Any]) -> dict[str, Any]:
    """Maps the content of a config.json to `ExpertsConfig` fields.

    Raises:
        ValueError: two keys contradict each other, or a constant of the model's code is another.
        KeyError: a size is missing.
    """
    style = _STYLES[config["model_type"]]
    count = config["num_local_experts"] if "num_experts" not in config else config["num_experts"]
    if config.get("num_local_experts", count) != count:
        raise ValueError(
            f"num_experts and num_local_experts must be equal, got {count} and {config['num_local_experts']}; remove "
            "the wrong key"
        )
    if not count:
        raise ValueError(f"num_experts must be at least 1, got {count}; choose a model with experts")
    for name, value in style.constants.items():
        if config.get(name, value) != value:
            raise ValueError(f"{name} must be {value:g}, got {config[name]!r}; choose a model with this value")
    plain = ExpertsConfig()
    return {
        "count": count,
        "chosen": config["num_experts_per_tok"],
        "size": config[style.size],
        "normalized": config.get(style.normalized, style.normalizes) if style.normalized else plain.normalized,
        "balance": config.get("router_aux_loss_coef", _COEFFICIENT) if _has_balance(config) else 0.0,
        "balance_form": "model",
        **{name: getattr(plain, name) for name in WEIGHT_FIELDS if name not in ("count", "size")},
        **style.fields,
        **({"shared_size": config[style.shared] or None} if style.shared else {}),
    }


def _has_balance(config: Mapping[str, Any]) -> bool:
    """Returns whether transformers adds the loss that balances experts: the coefficient alone adds none."""
    return bool(config.get("output_router_logits", False))


def experts_to_hf(experts: ExpertsConfig, like: Mapping[str, Any], family: str) -> dict[str, Any]:
    """Writes the keys of a config.json that speak of experts.

    Args:
        experts: of the model.
        like: content of the config.json that the model was imported from; may be empty.
        family: `model_type` that is written.

    Raises:
        ValueError: the family has no such experts; the message names the setting.
    """
    plain, style = ExpertsConfig(), _STYLES[family]
    for name in WEIGHT_FIELDS:
        value, must = getattr(experts, name), style.fields.get(name, getattr(plain, name))
        is_size = name in ("count", "size") or name == "shared_size" and style.shared
        if not is_size and value != must:
            raise ValueError(
                f"a Hugging Face model with experts must have model.experts.{name}={_word(must)}, got "
                f"{_word(value)}; export only models with experts as in {style.name}"
            )
    # Megatron's loss, and none, leave the coefficient as it was; of Megatron's transformers has no switch either.
    of_model = experts.balance_form == "model"
    balance = experts.balance if of_model and experts.balance else like.get("router_aux_loss_coef", _COEFFICIENT)
    written = {
        style.count: experts.count,
        "num_experts_per_tok": experts.chosen,
        # Of no layer, where experts have a key of their own; the released models have the size of a token's experts.
        "intermediate_size": like.get("intermediate_size") or experts.chosen * experts.size,
        style.size: experts.size,
        "router_aux_loss_coef": balance,
        "output_router_logits": experts.balance > 0 if of_model else _has_balance(like),
        **style.constants,
    }
    if style.shared:
        written[style.shared] = experts.shared_size or 0
    return written | ({style.normalized: experts.normalized} if style.normalized else {})


def _word(value: Any) -> Any:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else value
