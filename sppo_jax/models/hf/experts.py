"""Tensors of a mixture of experts in Hugging Face folders, which come in several forms; as data. Imports no jax.

Letters are those of `hf_tensors`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Literal

from sppo_jax.models.hf.tensor_rules import TensorRule

# How a folder holds the experts of a layer: one tensor an expert, or one tensor for all experts, in which gates and ups
# are halves of a dim or take turns along it.
ExpertsForm = Literal["separate", "halves", "interleaved"]

_MLP = "model.layers.{}.mlp."
_EXPERT, _ALL = _MLP + "experts.{}.", _MLP + "experts."
_GATE_UP = "mlp.experts.gate_up_proj"
_ROUTER = (TensorRule("layers/experts/router", _MLP + "gate.weight", "e d -> d e", only="experts"),)
_CHOICE = (
    TensorRule("layers/experts/choice_bias", _MLP + "gate.e_score_correction_bias", "e -> e", only="choice_bias"),
)
_SHARED = (
    TensorRule("layers/experts/shared_gate", _MLP + "shared_expert.gate_proj.weight", "s d -> d s", only="shared"),
    TensorRule("layers/experts/shared_up", _MLP + "shared_expert.up_proj.weight", "s d -> d s", only="shared"),
    TensorRule("layers/experts/shared_down", _MLP + "shared_expert.down_proj.weight", "d s -> s d", only="shared"),
    TensorRule("layers/experts/shared_router", _MLP + "shared_expert_gate.weight", "u d -> d", only="shared_router"),
)
_SEPARATE = (
    TensorRule("layers/experts/gate", _EXPERT + "gate_proj.weight", "x d -> d x", only="experts"),
    TensorRule("layers/experts/up", _EXPERT + "up_proj.weight", "x d -> d x", only="experts"),
    TensorRule("layers/experts/down", _EXPERT + "down_proj.weight", "d x -> x d", only="experts"),
)
_HALVES = (
    TensorRule("layers/experts/gate", _ALL + "gate_up_proj", "e (g x) d -> e d x", only="experts", half=0),
    TensorRule("layers/experts/up", _ALL + "gate_up_proj", "e (g x) d -> e d x", only="experts", half=1),
    TensorRule("layers/experts/down", _ALL + "down_proj", "e d x -> e x d", only="experts"),
)
# gpt-oss: the parameters' own order of dims, and biases.
_INTERLEAVED = (
    TensorRule("layers/experts/router", _MLP + "router.weight", "e d -> d e", only="experts"),
    TensorRule("layers/experts/router_bias", _MLP + "router.bias", "e -> e", only="expert_bias"),
    TensorRule("layers/experts/gate", _ALL + "gate_up_proj", "e d (x g) -> e d x", only="experts", half=0),
    TensorRule("layers/experts/up", _ALL + "gate_up_proj", "e d (x g) -> e d x", only="experts", half=1),
    TensorRule("layers/experts/gate_bias", _ALL + "gate_up_proj_bias", "e (x g) -> e x", only="expert_bias", half=0),
    TensorRule("layers/experts/up_bias", _ALL + "gate_up_proj_bias", "e (x g) -> e x", only="expert_bias", half=1),
    TensorRule("layers/experts/down", _ALL + "down_proj", "e x d -> e x d", only="experts"),
    TensorRule("layers/experts/down_bias", _ALL + "down_proj_bias", "e d -> e d", only="expert_bias"),
)
RULES_OF_FORM: Mapping[ExpertsForm, tuple[TensorRule, ...]] = {
    "separate": (*_ROUTER, *_CHOICE, *_SEPARATE, *_SHARED),
    "halves": (*_ROUTER, *_CHOICE, *_HALVES, *_SHARED),
    "interleaved": _INTERLEAVED,
}
# Quantised weights: blocks and scales of MXFP4, scales of fp8, integers of GPTQ and AWQ.
QUANTIZED = re.compile(r".*(_blocks|_scales|\.qweight|\.qzeros|\.scales|_scale|_scale_inv)$")


def form_of(names: Iterable[str], fused: ExpertsForm) -> ExpertsForm:
    """Returns the form of a folder's experts.

    Args:
        names: of its tensors.
        fused: the form that the family has where a tensor holds all experts of a layer; shapes do not tell, because
            some are square. gpt-oss has no other form.
    """
    if fused == "interleaved":
        return fused
    return fused if any(name.endswith(_GATE_UP) for name in names) else "separate"
