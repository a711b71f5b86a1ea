"""Settings of a model: its shape; imports no jax."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar, Literal

from sppo_jax.config.complete import complete_model
from sppo_jax.config.delta import DeltaConfig
from sppo_jax.config.experts import ExpertsConfig
from sppo_jax.config.layer_types import DELTA, FULL, LayerTypeConfig, check_layer_types, parse_layers, replaced_by
from sppo_jax.config.rope import RopeConfig
from sppo_jax.config.section import AUTO, ConfigError, Section, WorkedOut, build_section


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Section):
    """Shape of the decoder; a preset or a Hugging Face model fills in the keys that are not given.

    Args:
        preset: name of a published model shape, e.g. llama3-8b; null: none.
        hf: directory of a Hugging Face model; its config.json gives the shape, and training starts from its weights;
            `model: hf:PATH` is short for this key; null: none.
        vocab_size: number of token ids; 1 to 10000000.
        hidden_size: elements of the hidden state of a token; 1 to 10000000.
        num_layers: number of layers; 1 to 10000; may be left out where `model.layers` names them.
        layers: the type of each layer, names with counts and brackets such as 10x(5xlocal,full),2xlocal, where "full"
            is the model itself, and "delta" the model with `mixer: delta`; null: all layers are alike.
        layer_types: for each other name in `model.layers` what its layers have in place of the model's settings.
        mixer: what mixes the tokens of a layer: "attention", or "delta", the gated delta rule, whose past is a state
            of constant size.
        delta: the gated delta rule of layers that have it.
        num_heads: query heads of a layer; 1 to 10000000, a multiple of `model.num_kv_heads`.
        num_kv_heads: heads of keys and values of a layer; a divisor of `model.num_heads`; "auto": as many
            as `model.num_heads`.
        head_dim: elements of a head; an even number up to 10000000; "auto": `model.hidden_size / model.num_heads`.
        mlp_size: elements of the hidden layer of the MLP; 1 to 10000000; not used where `model.experts.count` is
            above 0; null: there is no MLP.
        mlp: kind of MLP: "swiglu" and "geglu" have a gate with SiLU or GELU, "gelu" has none.
        experts: mixture of experts in place of the MLP.
        norms: where a layer normalizes: "before" attention and MLP, "behind" them, or "both", which are four norms.
        unit_norm: whether norms multiply by 1 + scale, with scales that start at 0; true or false.
        qk_norm: whether queries and keys are normalized in each head; true or false.
        qk_norm_over_heads: whether the norm of `model.qk_norm` is over all heads together; true or false.
        qkv_bias: whether the projections to queries, keys and values have biases; true or false.
        output_bias: whether the projection of the attention output has a bias; true or false.
        output_gate: whether a learnt gate, a sigmoid, multiplies each element of the attention output; true or false.
        tied_embeddings: whether the output head is the embedding matrix; true or false.
        embedding_scale: number by which the embedding of a token is multiplied, rounded to the compute dtype; above 0.
        query_scale: number by which the products of queries and keys are multiplied; above 0; null: one over the root
            of `model.head_dim`.
        logit_cap: number beyond which logits do not go, as `cap tanh(logit / cap)`; above 0; null: no cap.
        norm_eps: term that RMSNorm adds to the mean square; at least 0.
        rope: rotary position embedding.
        sliding_window: number of tokens that a token attends to, itself and those before it in its document; at least
            1, a multiple of the devices on the ring; null: all of them.
        sinks: whether each query head has a sink, a learnt score that takes a share of attention and gives nothing;
            true or false.
        compute_dtype: dtype of activations and matrix products; "auto": bfloat16 on accelerators, float32 on a CPU.
        kernel: attention kernel; "blockwise" runs on every device; "cudnn" needs a GPU, bfloat16, and a
            `model.head_dim` that is a multiple of 8 and at most 128; "pallas" needs a TPU (v5e or later), bfloat16 or
            float32, and a `model.head_dim` of 64 to 256, and a CPU interprets it, slowly;
            "auto": "cudnn" or "pallas" on GPUs and TPUs where these needs are met, else "blockwise".
        check_kernels: whether a run on GPUs or TPUs begins with a check of kernel "cudnn" or "pallas" against plain
            attention; what passed is stored for device, driver and cuDNN, or libtpu; true or false.
        dropout: must be 0; dropout is not supported.
        init_scale: standard deviation of the initial weights; at least 0.
    """

    section: ClassVar[str] = "model"
    preset: str | None = None
    hf: str | None = None
    vocab_size: int
    hidden_size: int
    num_layers: int
    layers: str | None = None
    layer_types: dict[str, LayerTypeConfig] = field(default_factory=dict, hash=False)
    mixer: Literal["attention", "delta"] = "attention"
    delta: DeltaConfig = field(default_factory=DeltaConfig)
    num_heads: int
    num_kv_heads: WorkedOut = AUTO
    head_dim: WorkedOut = AUTO
    mlp_size: int | None = None
    mlp: Literal["swiglu", "geglu", "gelu"] = "swiglu"
    experts: ExpertsConfig = field(default_factory=ExpertsConfig)
    norms: Literal["before", "behind", "both"] = "before"
    unit_norm: bool = False
    qk_norm: bool = False
    qk_norm_over_heads: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    output_gate: bool = False
    tied_embeddings: bool = False
    embedding_scale: float = 1.0
    query_scale: float | None = None
    logit_cap: float | None = None
    norm_eps: float = 1e-5
    rope: RopeConfig = field(default_factory=RopeConfig)
    sliding_window: int | None = None
    sinks: bool = False
    compute_dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    kernel: Literal["auto", "blockwise", "cudnn", "pallas"] = "auto"
    check_kernels: bool = True
    dropout: float = 0.0
    init_scale: float = 0.02

    @classmethod
    def complete(cls, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        settings = complete_model(settings, rope_fields={spec.name for spec in dataclasses.fields(RopeConfig)})
        pattern = settings.get("layers")
        if isinstance(pattern, str) and "num_layers" not in settings:
            settings = {**settings, "num_layers": len(parse_layers(pattern))}
        return settings

    @property
    def type_names(self) -> tuple[str, ...]:
        """The type of each layer."""
        return parse_layers(self.layers) if self.layers else (FULL,) * self.num_layers

    def of_type(self, name: str) -> ModelConfig:
        """Returns the model as if all its layers were of one type."""
        return _of_type(self, name)

    @property
    def stacks(self) -> dict[str, tuple[str, ...]]:
        """The types whose layers are stored as one stack, by its name: their parameters have one shape."""
        return _stacks(self)

    @property
    def stack_names(self) -> tuple[str, ...]:
        """The stack of each layer."""
        stack_of = {layer_type: name for name, layer_types in self.stacks.items() for layer_type in layer_types}
        return tuple(stack_of[layer_type] for layer_type in self.type_names)

    @property
    def routed(self) -> ExpertsConfig:
        """The experts of the layers that have some; those of all these layers are alike."""
        found = (layer_type.experts for layer_type, _ in self.counts(self.num_layers) if layer_type.experts.count)
        return next(found, self.experts)

    @property
    def attention_types(self) -> list[ModelConfig]:
        """The model of each layer type that has attention."""
        return [layer_type for layer_type, _ in self.counts(self.num_layers) if layer_type.mixer == "attention"]

    @property
    def shared_heads(self) -> tuple[int, int]:
        """The query heads and the key-value heads that devices may divide: the gcd over all types with attention."""
        layer_types = self.attention_types or [self]
        return math.gcd(*(one.num_heads for one in layer_types)), math.gcd(*(one.num_kv_heads for one in layer_types))

    def shared_window(self, length: int) -> int:
        """Returns the window of which a ring must be a divisor: the gcd over all layer types; 0 without one."""
        return math.gcd(*(layer_type.window_within(length) for layer_type in self.attention_types))

    def counts(self, num_layers: int) -> list[tuple[ModelConfig, int]]:
        """Returns the model of each type, and how many of so many layers are of the type: its share of all layers.

        Of the types of one stack a group of layers may have any mix, so their shares of a group are rounded.
        """
        if not self.layers:
            return [(self, num_layers)]
        names = self.type_names
        found = {}
        for layer_types in self.stacks.values():
            begin = passed = 0
            for name in layer_types:
                passed += names.count(name)
                end = num_layers * passed // self.num_layers
                found[name], begin = end - begin, end
        return [(self.of_type(name), found[name]) for name in dict.fromkeys(names)]

    def window_within(self, length: int) -> int:
        """Returns the tokens that a token of a sequence of `length` attends to; 0: all before it."""
        return self.sliding_window if self.sliding_window is not None and self.sliding_window < length else 0

    def _check(self) -> None:
        self._at_least(1, "vocab_size", "hidden_size", "num_layers", "num_heads")
        self._complete_mlp()
        self._at_least(1, "num_kv_heads", "head_dim", "mlp_size", "sliding_window")
        self._at_least(0, "norm_eps", "init_scale")
        for name in ("query_scale", "logit_cap"):
            if (value := getattr(self, name)) is not None and value <= 0:
                raise ConfigError(f"model.{name} must be above 0, or null, got {value}; use null for none")
        # No model is larger, and products of these sizes fit the integers of jax.
        self._at_most(10**7, "vocab_size", "hidden_size", "num_heads", "head_dim", "mlp_size")
        self._at_most(10**4, "num_layers")
        if self.dropout != 0:
            raise ConfigError(f"model.dropout must be 0 (there is no dropout), got {self.dropout}; remove it")
        if self.embedding_scale <= 0:
            raise ConfigError(
                f"model.embedding_scale must be above 0, got {self.embedding_scale}; use 1 for embeddings as they are"
            )
        if self.qk_norm_over_heads and not self.qk_norm:
            raise ConfigError(
                "model.qk_norm_over_heads must have model.qk_norm=true, got true without; set model.qk_norm, or remove "
                "model.qk_norm_over_heads"
            )
        if self.num_kv_heads == AUTO:
            object.__setattr__(self, "num_kv_heads", self.num_heads)
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"model.num_heads must be a multiple of model.num_kv_heads, got {self.num_heads} and "
                f"{self.num_kv_heads}; change one of the two"
            )
        if self.head_dim == AUTO:
            if self.hidden_size % self.num_heads:
                raise ConfigError(
                    f"model.hidden_size must be a multiple of model.num_heads where model.head_dim is not given, "
                    f"got {self.hidden_size} and {self.num_heads}; set model.head_dim"
                )
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_heads)
        if self.head_dim % 2:
            raise ConfigError(f"model.head_dim must be even (rotary pairs), got {self.head_dim}; choose an even number")
        if self.mixer == DELTA:
            object.__setattr__(self, "delta", self.delta.filled(self.num_heads, self.num_kv_heads, self.head_dim))
        self._check_layer_types()

    def _check_layer_types(self) -> None:
        if self.layers is None:
            if self.layer_types:
                raise ConfigError(
                    "model.layer_types must have model.layers, which says where they are, got "
                    f"{', '.join(self.layer_types)} without; set model.layers, or remove model.layer_types"
                )
            return
        names = self.type_names
        check_layer_types(names, self.layer_types, self.num_layers)
        for name in dict.fromkeys(names):
            try:
                self.of_type(name)
            except ConfigError as error:
                raise ConfigError(f"model.layer_types.{name}: {error}") from None

    def _complete_mlp(self) -> None:
        open_size = self.experts.size == AUTO
        if self.mlp_size is None and (open_size or not self.experts.count):
            raise ConfigError("model.mlp_size must be given, got none; add it to the config")
        if self.mlp_size is not None and open_size and self.experts.count:
            object.__setattr__(self, "experts", dataclasses.replace(self.experts, size=self.mlp_size))


@lru_cache(maxsize=256)
def _of_type(model: ModelConfig, name: str) -> ModelConfig:
    given = replaced_by(model.layer_types, name)
    for part in given.keys() & {"rope", "experts", "delta"}:
        own = getattr(model, part)
        given[part] = build_section(type(own), {**dataclasses.asdict(own), **given[part]}, f"model.{part}")
    return dataclasses.replace(model, layers=None, layer_types={}, **given)


@lru_cache(maxsize=256)
def _stacks(model: ModelConfig) -> dict[str, tuple[str, ...]]:
    alike: dict[ModelConfig, list[str]] = {}
    for name in dict.fromkeys(model.type_names):
        # No parameter's shape depends on these two.
        shape = dataclasses.replace(model.of_type(name), sliding_window=None, rope=RopeConfig())
        alike.setdefault(shape, []).append(name)
    return {"+".join(layer_types): tuple(layer_types) for layer_types in alike.values()}
