"""Which tensor of a Hugging Face model is which parameter here, and in which layout; as data. Imports no jax.

Shape letters: v vocabulary, d hidden size, n query heads, k key and value heads, h head size, f MLP size, l layers.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from sppo_jax.config.model import ModelConfig

# Reads a part of a tensor: its name, and a slice for each dim.
ReadPart = Callable[[str, tuple[slice, ...]], np.ndarray]


@dataclass(frozen=True)
class Rule:
    """One parameter and its counterpart.

    Args:
        ours: path of the parameter; those of layers are stacked [l, ...].
        theirs: name of the tensor; `{}` is the layer.
        layout: dims of the tensor -> dims of the parameter, without l; parentheses join letters to one dim.
        only: field of `ModelConfig` that must be true for it to be there; "" for always, "untied" for a head.
    """

    ours: str
    theirs: str
    layout: str
    only: str = ""

    @property
    def stacked(self) -> bool:
        """Returns whether the parameter has a leading axis of layers."""
        return "{}" in self.theirs

    @property
    def groups(self) -> tuple[str, ...]:
        """Letters of each dim of the tensor."""
        return tuple(joined or single for joined, single in re.findall(r"\((.*?)\)|(\w)", _left(self.layout)))

    @property
    def letters(self) -> tuple[str, ...]:
        """Letter of each dim of the parameter, without l."""
        return tuple(self.layout.partition("->")[2].split())


def _left(layout: str) -> str:
    return layout.partition("->")[0]


_LAYER = "model.layers.{}."
RULES = (
    Rule("embedding", "model.embed_tokens.weight", "v d -> v d"),
    Rule("layers/attention_norm/scale", _LAYER + "input_layernorm.weight", "d -> d"),
    Rule("layers/query", _LAYER + "self_attn.q_proj.weight", "(n h) d -> d n h"),
    Rule("layers/key", _LAYER + "self_attn.k_proj.weight", "(k h) d -> d k h"),
    Rule("layers/value", _LAYER + "self_attn.v_proj.weight", "(k h) d -> d k h"),
    Rule("layers/query_bias", _LAYER + "self_attn.q_proj.bias", "(n h) -> n h", only="qkv_bias"),
    Rule("layers/key_bias", _LAYER + "self_attn.k_proj.bias", "(k h) -> k h", only="qkv_bias"),
    Rule("layers/value_bias", _LAYER + "self_attn.v_proj.bias", "(k h) -> k h", only="qkv_bias"),
    Rule("layers/query_norm/scale", _LAYER + "self_attn.q_norm.weight", "h -> h", only="qk_norm"),
    Rule("layers/key_norm/scale", _LAYER + "self_attn.k_norm.weight", "h -> h", only="qk_norm"),
    Rule("layers/output", _LAYER + "self_attn.o_proj.weight", "d (n h) -> n h d"),
    Rule("layers/mlp_norm/scale", _LAYER + "post_attention_layernorm.weight", "d -> d"),
    Rule("layers/gate", _LAYER + "mlp.gate_proj.weight", "f d -> d f"),
    Rule("layers/up", _LAYER + "mlp.up_proj.weight", "f d -> d f"),
    Rule("layers/down", _LAYER + "mlp.down_proj.weight", "d f -> f d"),
    Rule("final_norm/scale", "model.norm.weight", "d -> d"),
    Rule("head", "lm_head.weight", "v d -> d v", only="untied"),
)
# Tensors that say nothing new: buffers of old checkpoints.
NO_PARAMETERS = re.compile(r".*\.rotary_emb\.inv_freq$")


def rules_for(model: ModelConfig) -> dict[str, Rule]:
    """Returns the rules of a model's parameters, by their paths."""
    present = {"": True, "untied": not model.tied_embeddings, "qkv_bias": model.qkv_bias, "qk_norm": model.qk_norm}
    return {rule.ours: rule for rule in RULES if present[rule.only]}


def sizes_of(model: ModelConfig) -> dict[str, int]:
    """Returns the size of each shape letter."""
    return {
        "v": model.vocab_size,
        "d": model.hidden_size,
        "n": model.num_heads,
        "k": model.num_kv_heads,
        "h": model.head_dim,
        "f": model.mlp_size,
        "l": model.num_layers,
    }


def parameter_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every parameter of a model by its path, layers stacked."""
    sizes = sizes_of(model)
    return {
        path: tuple(sizes[letter] for letter in (("l", *rule.letters) if rule.stacked else rule.letters))
        for path, rule in rules_for(model).items()
    }


def tensor_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Returns the name and shape of every tensor of a model, layer by layer: the order in which they are written."""
    rules, sizes = rules_for(model).values(), sizes_of(model)

    def shape(rule: Rule) -> tuple[int, ...]:
        return tuple(math.prod(sizes[letter] for letter in group.split()) for group in rule.groups)

    before = itertools.takewhile(lambda rule: not rule.stacked, rules)
    after = [rule for rule in itertools.dropwhile(lambda rule: not rule.stacked, rules) if not rule.stacked]
    shapes = {rule.theirs: shape(rule) for rule in before}
    for layer in range(model.num_layers):
        shapes |= {rule.theirs.format(layer): shape(rule) for rule in rules if rule.stacked}
    return shapes | {rule.theirs: shape(rule) for rule in after}


def places(model: ModelConfig) -> Iterator[tuple[str, Rule, int | None]]:
    """Yields each tensor's name, its rule and its layer, in the order of `tensor_shapes`."""
    by_name = {
        rule.theirs.format(layer): (rule, layer if rule.stacked else None)
        for rule in rules_for(model).values()
        for layer in range(model.num_layers if rule.stacked else 1)
    }
    for name in tensor_shapes(model):
        yield name, *by_name[name]


def read_parameter(
    rule: Rule, read: ReadPart, index: Sequence[slice], sizes: Mapping[str, int], dtype: np.dtype
) -> np.ndarray:
    """Reads a part of a parameter, tensor by tensor, and only the bytes that are needed.

    Args:
        rule: of the parameter.
        read: reads a part of a tensor.
        index: the part, a slice for each dim of the parameter, the stacked one first.
        sizes: of the shape letters.
        dtype: wanted.

    Returns:
        The part, in the parameter's layout.
    """
    letters = ("l", *rule.letters) if rule.stacked else rule.letters
    spans = {letter: part.indices(sizes[letter])[:2] for letter, part in zip(letters, index, strict=True)}
    out = _aligned([stop - start for start, stop in spans.values()], np.dtype(dtype))
    if not rule.stacked:
        out[...] = _read_tensor(rule, rule.theirs, read, spans, sizes)
        return out
    first = spans["l"][0]
    for row in range(out.shape[0]):
        out[row] = _read_tensor(rule, rule.theirs.format(first + row), read, spans, sizes)
    return out


def _aligned(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Makes an empty array that jax uses on a CPU without a copy."""
    num_bytes, line = math.prod(shape) * dtype.itemsize, 64
    room = np.empty(num_bytes + line, np.uint8)
    first = -room.ctypes.data % line
    return room[first : first + num_bytes].view(dtype).reshape(shape)


def _read_tensor(
    rule: Rule, name: str, read: ReadPart, spans: Mapping[str, tuple[int, int]], sizes: Mapping[str, int]
) -> np.ndarray:
    """Reads a part of one tensor into the layout of its parameter."""
    cuts, shape, flat = [], [], []
    for group in rule.groups:
        lead, *inner = group.split()
        # Rows of the leading letter lie together; what is wanted of an inner one is cut out afterwards.
        size, (start, stop) = math.prod(sizes[letter] for letter in inner), spans[lead]
        cuts.append(slice(start * size, stop * size))
        shape += [stop - start, *(sizes[letter] for letter in inner)]
        flat += [lead, *inner]
    values = read(name, tuple(cuts)).reshape(shape).transpose([flat.index(letter) for letter in rule.letters])
    leads = {group.split()[0] for group in rule.groups}
    return values[tuple(slice(None) if letter in leads else slice(*spans[letter]) for letter in rule.letters)]


def to_tensor(rule: Rule, values: np.ndarray) -> np.ndarray:
    """Brings one layer of a parameter into the layout of its tensor.

    Args:
        rule: of the parameter.
        values: without the axis of layers.
    """
    sizes = dict(zip(rule.letters, values.shape, strict=True))
    order = [rule.letters.index(letter) for group in rule.groups for letter in group.split()]
    shape = [math.prod(sizes[letter] for letter in group.split()) for group in rule.groups]
    return values.transpose(order).reshape(shape)
