"""Which tensor of a Hugging Face model is which parameter here, and in which layout; as data. Imports no jax.

Letters: v vocabulary, d hidden size, n query heads, k key and value heads, h head size, f MLP size, l layers,
e experts, x size of an expert, s size of the shared expert, g gates and ups, u one element, a elements of all query
heads, b of all key heads.
Of the gated delta rule: c key heads, i key size, m value heads, r value heads of a key head, j value size, t taps.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from sppo_jax.models.hf.delta import DELTA_RULES
from sppo_jax.models.hf.experts import RULES_OF_FORM
from sppo_jax.models.hf.form import PLAIN, Form
from sppo_jax.models.hf.tensor_rules import TensorRule

if TYPE_CHECKING:
    from sppo_jax.config.delta import DeltaConfig
    from sppo_jax.config.experts import ExpertsConfig
    from sppo_jax.config.model import ModelConfig

_LAYER = "model.layers.{}."
_BEFORE = (
    TensorRule("embedding", "model.embed_tokens.weight", "v d -> v d"),
    TensorRule("layers/attention_norm/scale", _LAYER + "input_layernorm.weight", "d -> d", only="norms before"),
    TensorRule("layers/query", _LAYER + "self_attn.q_proj.weight", "(n h) d -> d n h", only="no output gate"),
    TensorRule("layers/query", _LAYER + "self_attn.q_proj.weight", "(n g h) d -> d n h", only="output gate", half=0),
    TensorRule(
        "layers/output_gate", _LAYER + "self_attn.q_proj.weight", "(n g h) d -> d n h", only="output gate", half=1
    ),
    TensorRule("layers/key", _LAYER + "self_attn.k_proj.weight", "(k h) d -> d k h", only="attention"),
    TensorRule("layers/value", _LAYER + "self_attn.v_proj.weight", "(k h) d -> d k h", only="attention"),
    TensorRule("layers/query_bias", _LAYER + "self_attn.q_proj.bias", "(n h) -> n h", only="qkv_bias"),
    TensorRule("layers/key_bias", _LAYER + "self_attn.k_proj.bias", "(k h) -> k h", only="qkv_bias"),
    TensorRule("layers/value_bias", _LAYER + "self_attn.v_proj.bias", "(k h) -> k h", only="qkv_bias"),
    TensorRule("layers/query_norm/scale", _LAYER + "self_attn.q_norm.weight", "h -> h", only="qk_norm"),
    TensorRule("layers/key_norm/scale", _LAYER + "self_attn.k_norm.weight", "h -> h", only="qk_norm"),
    TensorRule("layers/query_norm/scale", _LAYER + "self_attn.q_norm.weight", "a -> a", only="qk_norm over heads"),
    TensorRule("layers/key_norm/scale", _LAYER + "self_attn.k_norm.weight", "b -> b", only="qk_norm over heads"),
    TensorRule("layers/output", _LAYER + "self_attn.o_proj.weight", "d (n h) -> n h d", only="attention"),
    TensorRule("layers/output_bias", _LAYER + "self_attn.o_proj.bias", "d -> d", only="output_bias"),
    TensorRule("layers/sinks", _LAYER + "self_attn.sinks", "n -> n", only="sinks"),
    TensorRule("layers/mlp_norm/scale", _LAYER + "post_attention_layernorm.weight", "d -> d", only="two norms before"),
    TensorRule(
        "layers/attention_out_norm/scale", _LAYER + "post_attention_layernorm.weight", "d -> d", only="norms behind"
    ),
    TensorRule("layers/mlp_norm/scale", _LAYER + "pre_feedforward_layernorm.weight", "d -> d", only="four norms"),
    TensorRule(
        "layers/mlp_out_norm/scale", _LAYER + "post_feedforward_layernorm.weight", "d -> d", only="norms behind"
    ),
    TensorRule("layers/gate", _LAYER + "mlp.gate_proj.weight", "f d -> d f", only="mlp"),
    TensorRule("layers/up", _LAYER + "mlp.up_proj.weight", "f d -> d f", only="mlp"),
    TensorRule("layers/down", _LAYER + "mlp.down_proj.weight", "d f -> f d", only="mlp"),
)
_AFTER = (
    TensorRule("final_norm/scale", "model.norm.weight", "d -> d"),
    TensorRule("head", "lm_head.weight", "v d -> d v", only="untied"),
)
# Tensors that say nothing new: buffers of old checkpoints.
NO_PARAMETERS = re.compile(r".*\.rotary_emb\.inv_freq$")


class TensorSlot(NamedTuple):
    """A tensor and what it holds.

    Args:
        name: of the tensor.
        rules: of the parameters whose values it holds: one, gates and ups, or the parts of joined projections.
        index: of the layer, or of layer and expert, along the stacked dims of these parameters.
    """

    name: str
    rules: tuple[TensorRule, ...]
    index: tuple[int, ...]


def parts_of(model: ModelConfig) -> dict[str, bool]:
    """Returns whether a model has the parameters whose rules name a key in `only`."""
    experts, attends = model.experts, model.mixer == "attention"
    return {
        "": True,
        "untied": not model.tied_embeddings,
        "attention": attends,
        "delta": not attends,
        "output gate": attends and model.output_gate,
        "no output gate": attends and not model.output_gate,
        "qkv_bias": attends and model.qkv_bias,
        "output_bias": attends and model.output_bias,
        "sinks": attends and model.sinks,
        "qk_norm": attends and model.qk_norm and not model.qk_norm_over_heads,
        "qk_norm over heads": attends and model.qk_norm_over_heads,
        "norms before": model.norms != "behind",
        "norms behind": model.norms != "before",
        "two norms before": model.norms == "before",
        "four norms": model.norms == "both",
        "mlp": experts.count == 0,
        "experts": experts.count > 0,
        "expert_bias": experts.count > 0 and experts.bias,
        "choice_bias": experts.count > 0 and experts.choice_bias,
        "shared": experts.count > 0 and experts.shared_size is not None,
        "shared_router": experts.count > 0 and experts.shared_gate,
    }


def rules_for(model: ModelConfig, form: Form = PLAIN) -> dict[str, TensorRule]:
    """Returns the rules of a model's parameters, by their paths.

    Args:
        model: the shape.
        form: of its tensors.
    """
    rules = (*_BEFORE, *DELTA_RULES[form.delta], *RULES_OF_FORM[form.experts], *_AFTER)
    of_layers = []
    for name, layer_types in model.stacks.items():
        present, several = parts_of(model.of_type(layer_types[0])), len(set(model.type_names)) > 1
        own = [rule for rule in rules if rule.stack and present[rule.only]]
        layers = [number for number, stack in enumerate(model.stack_names) if stack == name]
        of_layers += [_of_stack(rule, name, layers) for rule in own] if several else own
    present = parts_of(model)
    before, after = ([rule for rule in part if not rule.stack and present[rule.only]] for part in (_BEFORE, _AFTER))
    return {rule.ours: rule for rule in (*before, *of_layers, *after)}


def _of_stack(rule: TensorRule, name: str, layers: list[int]) -> TensorRule:
    return replace(rule, ours=rule.ours.replace("layers/", f"layers/{name}/", 1), of_stack=name, layers=tuple(layers))


def sizes_of(model: ModelConfig, stack: str | None = None) -> dict[str, int]:
    """Returns the size of each letter, in layers of a stack where there are several types."""
    num_layers = model.num_layers
    if stack is not None:
        num_layers, model = model.stack_names.count(stack), model.of_type(model.stacks[stack][0])
    return {
        "v": model.vocab_size,
        "d": model.hidden_size,
        "n": model.num_heads,
        "k": model.num_kv_heads,
        "h": model.head_dim,
        "f": model.mlp_size or 0,
        "l": num_layers,
        "a": model.num_heads * model.head_dim,
        "b": model.num_kv_heads * model.head_dim,
        **(_sizes_of_experts(model.experts) if model.experts.count else {}),
        **(_sizes_of_states(model.delta) if model.mixer == "delta" else {}),
    }


def _sizes_of_experts(experts: ExpertsConfig) -> dict[str, int]:
    return {"e": experts.count, "x": experts.size, "s": experts.shared_size or 0}


def _sizes_of_states(delta: DeltaConfig) -> dict[str, int]:
    return {
        "c": delta.key_heads,
        "i": delta.key_size,
        "m": delta.value_heads,
        "r": delta.value_heads // delta.key_heads,
        "j": delta.value_size,
        "t": delta.taps,
    }


def parameter_shapes(model: ModelConfig, form: Form = PLAIN) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every parameter of a model by its path, layers stacked; arguments as `rules_for`."""
    rules = rules_for(model, form)
    sizes = {rule.of_stack: sizes_of(model, rule.of_stack) for rule in rules.values()}
    return {
        path: tuple(sizes[rule.of_stack][letter] for letter in (*rule.stack, *rule.letters))
        for path, rule in rules.items()
    }


def tensor_shapes(model: ModelConfig, form: Form = PLAIN) -> dict[str, tuple[int, ...]]:
    """Returns the name and shape of every tensor of a model in the order of `places`."""
    found = list(places(model, form))
    sizes = {name: sizes_of(model, name) for name in {place.rules[0].of_stack for place in found}}
    return {place.name: place.rules[0].shape(sizes[place.rules[0].of_stack]) for place in found}


def places(model: ModelConfig, form: Form = PLAIN) -> Iterator[TensorSlot]:
    """Yields every tensor of a model, layer by layer and expert by expert: the order in which they are written.

    Args:
        model: the shape.
        form: of its tensors.
    """
    rules = list(rules_for(model, form).values())
    layered = [number for number, rule in enumerate(rules) if rule.stack]
    yield from _within(model, rules[: layered[0]], ())
    passed: Counter[str] = Counter()
    for name in model.stack_names:
        own = [rule for rule in rules if rule.stack and rule.of_stack in (None, name)]
        yield from _within(model, own, (passed[name],))
        passed[name] += 1
    yield from _within(model, rules[layered[-1] + 1 :], ())


def _within(model: ModelConfig, rules: list[TensorRule], index: tuple[int, ...]) -> Iterator[TensorSlot]:
    """Yields the tensors of some rules at an index of their first stacked dims."""
    by_name: dict[str, list[TensorRule]] = {}
    for rule in rules:
        by_name.setdefault(rule.theirs, []).append(rule)
    groups = itertools.groupby(by_name.values(), lambda of_name: len(of_name[0].stack) > len(index))
    for is_deeper, run in groups:
        if not is_deeper:
            yield from (TensorSlot(of_name[0].name(index), tuple(of_name), index) for of_name in run)
            continue
        deeper = [rule for of_name in run for rule in of_name]
        size = sizes_of(model, deeper[0].of_stack)[deeper[0].stack[len(index)]]
        for number in range(size):
            yield from _within(model, deeper, (*index, number))
