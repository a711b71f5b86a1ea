"""Settings that were given and change nothing beside the others; those of the plan are in `search.given`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from sppo_jax.config.data import DRAWN, ChatConfig
from sppo_jax.config.delta import DeltaConfig
from sppo_jax.config.experts import ExpertsConfig
from sppo_jax.config.model import ModelConfig
from sppo_jax.config.sections import Config

_Acts = Callable[[Config], bool]


def _ends(config: Config) -> set[str]:
    """Returns the ends of the names of the sources; "any" of a directory."""
    names = [*config.data.sources, *config.data.validation_sources]
    return {
        next((end for end in _ENDS if name.removesuffix(".gz").endswith(end)), "any")
        if name not in (*DRAWN, "stdlib")
        else name
        for name in names
    }


def _of(*ends: str) -> _Acts:
    return lambda config: bool({*ends, "any"} & _ends(config))


def _formats(config: Config) -> set[str]:
    """Returns what the rows of the sources hold, as the config says."""
    data = config.data
    given = (data.source, data.validation_source or {})
    names = [(source, name) for source in given for name in (source if isinstance(source, dict) else [source])]
    return {data.with_settings(data.settings_of(name, source)).format for source, name in names}


def _holds(*formats: str) -> _Acts:
    return lambda config: bool({*formats, "auto"} & _formats(config))


def _scaled(*scalings: str) -> _Acts:
    return lambda config: config.model.rope.scaling in scalings


def _has_mlp(model: ModelConfig) -> bool:
    """Returns whether any layer has an MLP in place of experts."""
    return any(layer_type.experts.count == 0 for layer_type, _ in model.counts(model.num_layers))


def _has_delta(model: ModelConfig) -> bool:
    """Returns whether any layer has the gated delta rule."""
    return any(layer_type.mixer == "delta" for layer_type, _ in model.counts(model.num_layers))


_ENDS = (".txt", ".jsonl", ".parquet", ".npy", ".bin")
_TEXT = ("stdlib", ".txt", ".jsonl", ".parquet")
_FILES = (*_TEXT, ".npy", ".bin")
_CHAT = tuple(f"data.chat.{field.name}" for field in dataclasses.fields(ChatConfig))
_EXPERTS = tuple(f"model.experts.{field.name}" for field in dataclasses.fields(ExpertsConfig) if field.name != "count")
_DELTA = tuple(f"model.delta.{field.name}" for field in dataclasses.fields(DeltaConfig))


def _num_warmup_steps(config: Config) -> int:
    return config.optimizer.num_warmup_steps(config.train.steps)


# Settings, where one of them makes a difference, and why it does not elsewhere.
_ROWS: tuple[tuple[tuple[str, ...], _Acts, str], ...] = (
    (("data.text_key",), _of(".jsonl", ".parquet"), "no source has keys or columns"),
    (("data.text_key",), _holds("text"), "data.format is not text"),
    (("data.start_token", "data.end_token"), _holds("text", "prompt"), "data.format is neither text nor prompt"),
    (("data.ignore_keys",), _of(".jsonl", ".parquet"), "no source has rows"),
    (("data.start_token", "data.end_token"), _of(*_TEXT, "needles"), "no source is text"),
    (_CHAT, _of(".jsonl", ".parquet", "needles"), "no source has rows"),
    (_CHAT, _holds("chat", "prompt", "alpaca"), "data.format is text or tokens"),
    (("data.token_dtype",), _of(".bin"), "no source is a .bin file"),
    (("data.separator",), _of(".bin", ".npy"), "no source is a .bin or .npy file"),
    (("data.pack", "data.fill"), _of(*_FILES), "a task that is drawn fills its own sequences"),
    (
        ("data.validation_fraction",),
        lambda config: config.data.validation_source is None and _of(*_FILES)(config),
        "nothing is held out of data.source with data.validation_source or a task that is drawn",
    ),
    (
        ("data.recall.pairs", "data.recall.values", "data.recall.distances"),
        lambda config: "recall" in config.data.sources,
        "data.source is not recall",
    ),
    (("data.needles.tasks",), lambda config: "needles" in config.data.sources, "data.source is not needles"),
    (("model.rope.factor",), _scaled("linear", "llama3", "yarn"), "model.rope.scaling is none"),
    (
        ("model.rope.low_freq_factor", "model.rope.high_freq_factor"),
        _scaled("llama3"),
        "model.rope.scaling is not llama3",
    ),
    (
        ("model.rope.beta_fast", "model.rope.beta_slow", "model.rope.truncate"),
        _scaled("yarn"),
        "model.rope.scaling is not yarn",
    ),
    (_EXPERTS, lambda config: config.model.routed.count > 0, "model.experts.count is 0"),
    (_DELTA, lambda config: _has_delta(config.model), "no layer has the gated delta rule"),
    (("model.mlp",), lambda config: _has_mlp(config.model), "every layer has experts in place of the MLP"),
    (
        ("model.mlp_size",),
        lambda config: _has_mlp(config.model) or config.model.experts.size == config.model.mlp_size,
        "every layer has experts, and model.experts.size is given",
    ),
    (
        ("model.experts.normalized",),
        lambda config: config.model.experts.scores != "softmax_of_chosen",
        "weights of model.experts.scores=softmax_of_chosen add up to 1",
    ),
    (
        ("model.experts.bias_rate",),
        lambda config: config.model.experts.choice_bias,
        "model.experts.choice_bias is false",
    ),
    (("model.experts.balance_form",), lambda config: config.model.experts.balance > 0, "model.experts.balance is 0"),
    (
        ("model.experts.balance_over",),
        lambda config: config.model.experts.is_penalised,
        "model.experts.balance and model.experts.z are 0",
    ),
    (("optimizer.warmup",), lambda config: _num_warmup_steps(config) > 0, "optimizer.warmup_steps is 0"),
    (
        ("optimizer.min_lr_ratio", "optimizer.decay_steps"),
        lambda config: config.optimizer.decay != "none",
        "optimizer.decay is none",
    ),
    (("optimizer.decay_embeddings",), lambda config: config.optimizer.weight_decay > 0, "optimizer.weight_decay is 0"),
    (
        ("checkpoint.keep_best", "train.eval_context"),
        lambda config: config.train.eval_sequences > 0,
        "train.eval_sequences is 0",
    ),
    (
        ("checkpoint.keep_every",),
        lambda config: config.checkpoint.every_s > 0 or config.checkpoint.every_steps > 0 or config.checkpoint.final,
        "no checkpoint is saved",
    ),
)


def inert_settings(config: Config) -> list[str]:
    """Returns a line for each setting that was given and changes nothing beside the others."""
    given = dict(_given(config, ""))
    found: dict[str, str] = {}
    for names, acts, why in _ROWS:
        for name in names:
            if name in given and not acts(config):
                found.setdefault(name, f"{name}={given[name]} changes nothing, because {why}; leave it out")
    return list(found.values())


def _given(section: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Yields every setting that differs from its default, by its dotted name."""
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if dataclasses.is_dataclass(value):
            yield from _given(value, f"{prefix}{field.name}.")
        elif value != (field.default if field.default_factory is dataclasses.MISSING else field.default_factory()):
            yield f"{prefix}{field.name}", list(value) if isinstance(value, tuple) else value
