"""The settings of a model: its shape and its rotary positions; imports no jax."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from sppo_jax.config.complete import complete_model
from sppo_jax.config.group import ConfigError, Group


@dataclass(frozen=True, kw_only=True)
class RopeConfig(Group):
    """Rotary position embedding and how it is stretched beyond the length the model was trained on."""

    group: ClassVar[str] = "model.rope"
    theta: float = 10000.0
    scaling: Literal["none", "linear", "llama3", "yarn"] = "none"
    factor: float = 1.0
    original_length: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0

    def _check(self) -> None:
        self._at_least(1, "theta", "factor")
        if self.scaling in ("llama3", "yarn") and self.original_length < 1:
            raise ConfigError(
                f"model.rope.scaling={self.scaling} needs the length the model was trained on, "
                f"got model.rope.original_length={self.original_length}; set it, e.g. to 8192"
            )


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Group):
    """Shape of the decoder; a preset, or a Hugging Face model, fills what is not given.

    Args:
        hf: folder of a Hugging Face model, from whose weights training starts; its config.json gives the shape.
        sliding_window: attention span in tokens of the imported model; 0: the whole sequence, as attention is here.
    """

    group: ClassVar[str] = "model"
    preset: str | None = None
    hf: str | None = None
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int = 0
    head_dim: int = 0
    mlp_size: int
    mlp: Literal["swiglu", "gelu"] = "swiglu"
    qk_norm: bool = False
    qkv_bias: bool = False
    tied_embeddings: bool = False
    norm_eps: float = 1e-5
    rope: RopeConfig = field(default_factory=RopeConfig)
    sliding_window: int = 0
    compute_dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    kernel: Literal["auto", "blockwise", "cudnn"] = "auto"
    dropout: float = 0.0
    init_scale: float = 0.02

    @classmethod
    def complete(cls, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        return complete_model(settings, rope_fields={spec.name for spec in dataclasses.fields(RopeConfig)})

    def _check(self) -> None:
        self._at_least(1, "vocab_size", "hidden_size", "num_layers", "num_heads", "mlp_size")
        self._at_least(0, "num_kv_heads", "head_dim", "norm_eps", "init_scale", "sliding_window")
        # Beyond any model: products of these stay whole numbers of jax.
        self._at_most(10**7, "vocab_size", "hidden_size", "num_heads", "head_dim", "mlp_size")
        self._at_most(10**4, "num_layers")
        if self.dropout != 0:
            raise ConfigError(f"model.dropout must be 0 (there is no dropout), got {self.dropout}; remove it")
        if not self.num_kv_heads:
            object.__setattr__(self, "num_kv_heads", self.num_heads)
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"model.num_heads must be a multiple of model.num_kv_heads, got {self.num_heads} and "
                f"{self.num_kv_heads}; change one of them"
            )
        if not self.head_dim:
            if self.hidden_size % self.num_heads:
                raise ConfigError(
                    f"model.hidden_size must be a multiple of model.num_heads where model.head_dim is not given, "
                    f"got {self.hidden_size} and {self.num_heads}; set model.head_dim"
                )
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_heads)
        if self.head_dim % 2:
            raise ConfigError(f"model.head_dim must be even (rotary pairs), got {self.head_dim}; change it by one")
