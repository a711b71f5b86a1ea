"""Layer types: what each replaces of the model's settings, and in which order they stand; imports no jax."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from sppo_jax.config.section import ConfigError, Section
from sppo_jax.program.fold import Loop, fold

# The type that replaces nothing, and the one that replaces attention by the mixer of this name.
FULL, DELTA = "full", "delta"
_TOKEN = re.compile(r"\s*(?:(\d+)\s*x|([A-Za-z_]\w*)|([(),]))")
# No model is deeper; more layers would be a mistake in a pattern.
_MOST_LAYERS = 10**4

Settings = dict[str, bool | int | float | str | None]


@dataclass(frozen=True, kw_only=True)
class LayerTypeConfig(Section):
    """What the layers of one type have in place of the model's own settings; null is the model's setting.

    Args:
        mixer: what mixes the tokens of a layer, as `model.mixer`; of a type named "delta" it is "delta".
        delta: settings of `model.delta` that the type replaces, each by its name.
        num_heads: query heads of a layer, as `model.num_heads`.
        num_kv_heads: heads of keys and values of a layer, as `model.num_kv_heads`.
        head_dim: elements of a head, as `model.head_dim`.
        mlp_size: elements of the hidden layer of the MLP, as `model.mlp_size`; "none": as where the model has none.
        mlp: kind of MLP, as `model.mlp`.
        norms: where a layer normalizes, as `model.norms`.
        unit_norm: whether norms of a layer multiply by 1 + scale.
        qk_norm: whether queries and keys are normalized in each head.
        qk_norm_over_heads: whether the norm of queries and keys is over all heads together.
        qkv_bias: whether the projections to queries, keys and values have biases.
        output_bias: whether the projection of the attention output has a bias.
        output_gate: whether a learnt gate multiplies the attention output.
        query_scale: number by which the products of queries and keys are multiplied, as `model.query_scale`; "none":
            one over the root of the head size.
        sliding_window: number of tokens that a token attends to, as `model.sliding_window`; "none": all of them.
        sinks: whether each query head has a sink.
        rope: settings of `model.rope` that the type replaces, each by its name.
        experts: settings of `model.experts` that the type replaces, each by its name; `{count: 0}` is a plain MLP.
    """

    section: ClassVar[str] = "model.layer_types.NAME"
    mixer: Literal["attention", "delta"] | None = None
    delta: Settings | None = None
    num_heads: int | None = None
    num_kv_heads: Literal["auto"] | int | None = None
    head_dim: Literal["auto"] | int | None = None
    mlp_size: Literal["none"] | int | None = None
    mlp: Literal["swiglu", "geglu", "gelu"] | None = None
    norms: Literal["before", "behind", "both"] | None = None
    unit_norm: bool | None = None
    qk_norm: bool | None = None
    qk_norm_over_heads: bool | None = None
    qkv_bias: bool | None = None
    output_bias: bool | None = None
    output_gate: bool | None = None
    query_scale: Literal["none"] | float | None = None
    sliding_window: Literal["none"] | int | None = None
    sinks: bool | None = None
    rope: Settings | None = None
    experts: Settings | None = None

    def replaced(self) -> dict[str, Any]:
        """Returns the settings that the type replaces."""
        given = {spec.name: getattr(self, spec.name) for spec in dataclasses.fields(self)}
        return {name: None if value == "none" else value for name, value in given.items() if value is not None}


def replaced_by(layer_types: Mapping[str, LayerTypeConfig], name: str) -> dict[str, Any]:
    """Returns the settings that a layer type replaces; the types "full" and "delta" need no entry in `layer_types`."""
    own = layer_types[name].replaced() if name in layer_types else {}
    return {"mixer": DELTA} | own if name == DELTA else own


def parse_layers(pattern: str) -> tuple[str, ...]:
    """Returns the type of each layer, in order.

    Args:
        pattern: names with counts, e.g. "10x(5xlocal,global),2xlocal".

    Raises:
        ConfigError: the pattern cannot be read.
    """
    tokens, place = [], 0
    while pattern[place:].strip():
        match = _TOKEN.match(pattern, place)
        if match is None:
            raise _unreadable(pattern)
        tokens.append(match.groups())
        place = match.end()
    layer_types, rest = _sequence(tokens, pattern)
    if rest or not layer_types:
        raise _unreadable(pattern)
    return tuple(layer_types)


def layers_text(names: Sequence[str]) -> str:
    """Returns a pattern that names each of some layers: what `parse_layers` reads."""
    return _text(fold(names))


def _text(items: tuple) -> str:
    return ",".join(_repeated(item) if isinstance(item, Loop) else item for item in items)


def _repeated(loop: Loop) -> str:
    body = _text(loop.body)
    return f"{loop.count}x{body}" if len(loop.body) == 1 and body.isidentifier() else f"{loop.count}x({body})"


def _sequence(tokens: list[tuple], pattern: str) -> tuple[list[str], list[tuple]]:
    """Reads items with commas between; returns their types and the tokens behind them."""
    layer_types, tokens = _item(tokens, pattern)
    while tokens and tokens[0][2] == ",":
        more, tokens = _item(tokens[1:], pattern)
        layer_types += more
    return layer_types, tokens


def _item(tokens: list[tuple], pattern: str) -> tuple[list[str], list[tuple]]:
    """Reads a name or a sequence in brackets, behind an optional count."""
    count = 1
    if tokens and tokens[0][0]:
        count, tokens = int(tokens[0][0]), tokens[1:]
    if not tokens or not 1 <= count <= _MOST_LAYERS:
        raise _unreadable(pattern)
    (_, name, bracket), tokens = tokens[0], tokens[1:]
    layer_types = [name]
    if bracket == "(":
        layer_types, tokens = _sequence(tokens, pattern)
        if not tokens or tokens[0][2] != ")":
            raise _unreadable(pattern)
        tokens = tokens[1:]
    elif not name:
        raise _unreadable(pattern)
    if len(layer_types) * count > _MOST_LAYERS:
        raise _unreadable(pattern)
    return layer_types * count, tokens


def _unreadable(pattern: str) -> ConfigError:
    return ConfigError(
        f"model.layers must be names of layer types with counts and brackets, of at most {_MOST_LAYERS} layers, got "
        f"{pattern!r}; write e.g. 10x(5xlocal,full),2xlocal"
    )


def check_layer_types(names: tuple[str, ...], layer_types: Mapping[str, LayerTypeConfig], num_layers: int) -> None:
    """Checks that a pattern and the types belong together.

    Args:
        names: the type of each layer.
        layer_types: the settings of each type by its name.
        num_layers: layers of the model.

    Raises:
        ConfigError: they do not.
    """
    if len(names) != num_layers:
        raise ConfigError(
            f"model.layers must name model.num_layers={num_layers} layers, got {len(names)}; change one of the two"
        )
    for name in dict.fromkeys(names):
        if name not in (FULL, DELTA) and name not in layer_types:
            known = ", ".join(dict.fromkeys((*layer_types, FULL, DELTA)))
            raise ConfigError(
                f"model.layers must name types of model.layer_types, {FULL} or {DELTA}, got {name}; use one of "
                f"{known}, or add model.layer_types.{name}"
            )
    for name in layer_types:
        if name not in names:
            raise ConfigError(
                f"each name in model.layer_types must be the type of a layer, got {name}, which no layer has; name it "
                "in model.layers, or remove it"
            )
