"""Tensors of Gated DeltaNet layers in Hugging Face folders, which come in two forms; as data. Imports no jax.

Letters are those of `hf_tensors`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from sppo_jax.models.hf.tensor_rules import JoinedRows, TensorRule

# How a folder holds the projections before the rule: queries, keys and values in one tensor and the others each in one,
# or all in two tensors, by key head.
DeltaForm = Literal["apart", "joined"]

_LAYER = "model.layers.{}.linear_attn."
_QKV = ("c i", "c i", "m j")
_CONVOLUTION, _TAPS = _LAYER + "conv1d.weight", "u t -> c i t"
_BOTH = (
    TensorRule("layers/query_taps", _CONVOLUTION, f"(c i) {_TAPS}", only="delta", part=JoinedRows(_QKV, 0)),
    TensorRule("layers/key_taps", _CONVOLUTION, f"(c i) {_TAPS}", only="delta", part=JoinedRows(_QKV, 1)),
    TensorRule("layers/value_taps", _CONVOLUTION, "(m j) u t -> m j t", only="delta", part=JoinedRows(_QKV, 2)),
    TensorRule("layers/decay_bias", _LAYER + "dt_bias", "m -> m", only="delta"),
    TensorRule("layers/decay_log", _LAYER + "A_log", "m -> m", only="delta"),
    TensorRule("layers/delta_norm/scale", _LAYER + "norm.weight", "j -> j", only="delta"),
    TensorRule("layers/output", _LAYER + "out_proj.weight", "d (m j) -> m j d", only="delta"),
)
_IN_QKV = _LAYER + "in_proj_qkv.weight"
_APART = (
    TensorRule("layers/query", _IN_QKV, "(c i) d -> d c i", only="delta", part=JoinedRows(_QKV, 0)),
    TensorRule("layers/key", _IN_QKV, "(c i) d -> d c i", only="delta", part=JoinedRows(_QKV, 1)),
    TensorRule("layers/value", _IN_QKV, "(m j) d -> d m j", only="delta", part=JoinedRows(_QKV, 2)),
    TensorRule("layers/output_gate", _LAYER + "in_proj_z.weight", "(m j) d -> d m j", only="delta"),
    TensorRule("layers/write", _LAYER + "in_proj_b.weight", "m d -> d m", only="delta"),
    TensorRule("layers/decay", _LAYER + "in_proj_a.weight", "m d -> d m", only="delta"),
)
JOINED_NAME = "linear_attn.in_proj_qkvz.weight"
_IN_QKVZ, _QKVZ = _LAYER + "in_proj_qkvz.weight", ("i", "i", "r j", "r j")
_IN_BA, _BA = _LAYER + "in_proj_ba.weight", ("r", "r")
_JOINED = (
    TensorRule("layers/query", _IN_QKVZ, "(c i) d -> d c i", only="delta", part=JoinedRows(_QKVZ, 0, "c")),
    TensorRule("layers/key", _IN_QKVZ, "(c i) d -> d c i", only="delta", part=JoinedRows(_QKVZ, 1, "c")),
    TensorRule("layers/value", _IN_QKVZ, "(c r j) d -> d m j", only="delta", part=JoinedRows(_QKVZ, 2, "c")),
    TensorRule("layers/output_gate", _IN_QKVZ, "(c r j) d -> d m j", only="delta", part=JoinedRows(_QKVZ, 3, "c")),
    TensorRule("layers/write", _IN_BA, "(c r) d -> d m", only="delta", part=JoinedRows(_BA, 0, "c")),
    TensorRule("layers/decay", _IN_BA, "(c r) d -> d m", only="delta", part=JoinedRows(_BA, 1, "c")),
)
DELTA_RULES: Mapping[DeltaForm, tuple[TensorRule, ...]] = {"apart": (*_APART, *_BOTH), "joined": (*_JOINED, *_BOTH)}
