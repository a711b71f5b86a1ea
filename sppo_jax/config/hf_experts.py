"""The experts of a model in a Hugging Face config.json, both ways; imports no jax."""

from __future__ import annotations

from collections.abc import Mapping
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
    "moe_intermediate_size",
    "norm_topk_prob",
    "router_aux_loss_coef",
)
# transformers' coefficient where the key is left out.
_COEFFICIENT = 0.001


def experts_from_hf(config: Mapping[str, Any]) -> dict[str, Any]:
    """Maps the content of a config.json to `ExpertsConfig` fields.

    Raises:
        ValueError: two keys contradict each other.
        KeyError: a size is missing, or whether weights are normalised, which transformers does not do by default.
    """
    count = config["num_local_experts"] if "num_experts" not in config else config["num_experts"]
    if config.get("num_local_experts", count) != count:
        raise ValueError(
            f"num_experts and num_local_experts must be equal, got {count} and {config['num_local_experts']}; remove "
            "the wrong key"
        )
    if not count:
        raise ValueError(f"num_experts must be at least 1, got {count}; choose a model with experts")
    return {
        "count": count,
        "chosen": config["num_experts_per_tok"],
        "size": config["moe_intermediate_size"],
        "normalized": config["norm_topk_prob"],
        "balance": config.get("router_aux_loss_coef", _COEFFICIENT),
        "balance_form": "model",
        **{name: getattr(ExpertsConfig(), name) for name in WEIGHT_FIELDS if name not in ("count", "size")},
    }


def experts_to_hf(experts: ExpertsConfig, like: Mapping[str, Any]) -> dict[str, Any]:
    """Writes the keys of a config.json that speak of experts.

    Args:
        experts: of the model.
        like: content of the config.json that the model was imported from; may be empty.

    Raises:
        ValueError: no family has such experts; the message names the setting.
    """
    plain = ExpertsConfig()
    for name in WEIGHT_FIELDS:
        value = getattr(experts, name)
        if name not in ("count", "size") and value != getattr(plain, name):
            raise ValueError(
                f"a Hugging Face model with experts must have model.experts.{name}={_word(getattr(plain, name))}, got "
                f"{_word(value)}; export only models with experts as in Qwen3-MoE"
            )
    balance = experts.balance if experts.balance_form == "model" else like.get("router_aux_loss_coef", _COEFFICIENT)
    return {
        "num_experts": experts.count,
        "num_experts_per_tok": experts.chosen,
        "moe_intermediate_size": experts.size,
        # Of no layer; the released models have the size of the experts of a token.
        "intermediate_size": like.get("intermediate_size") or experts.chosen * experts.size,
        "norm_topk_prob": experts.normalized,
        "router_aux_loss_coef": balance,
    }


def _word(value: Any) -> Any:
    return str(value).lower() if isinstance(value, bool) else value
