"""Settings read from YAML, with overrides, and written back; duplicate keys are refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from sppo_jax.config.complete import expand_model
from sppo_jax.config.renamed import renamed_override, with_new_names
from sppo_jax.config.section import ConfigError, Unset, build_section
from sppo_jax.config.sections import Config
from sppo_jax.config.yaml_numbers import NumberLoader
from sppo_jax.files.paths import local_path


def load_config(path: str | Path, overrides: Iterable[str] = ()) -> Config:
    """Reads a YAML file and applies overrides.

    Args:
        path: the YAML file.
        overrides: `section.key=value` strings, the value in YAML; without a value the setting has its default.

    Raises:
        ConfigError: the file cannot be read, or a setting is unknown, missing or wrong.
    """
    return config_from_dict(_read(path), overrides)


def is_given(name: str, path: str | Path, overrides: Iterable[str] = ()) -> bool:
    """Returns whether a YAML file or an override gives a setting; a preset and a Hugging Face folder do not.

    Args:
        name: dotted name of the setting.
        path: the YAML file.
        overrides: as in `load_config`.

    Raises:
        ConfigError: the file cannot be read, or an override is none.
    """
    settings: Any = _overridden(_read(path), overrides)
    for part in name.split("."):
        if not isinstance(settings, Mapping) or part not in settings:
            return False
        settings = settings[part]
    return not isinstance(settings, Unset)


def _read(path: str | Path) -> dict[str, Any]:
    """Returns the settings of a YAML file."""
    try:
        path = local_path(path, "a config")
    except ValueError as error:
        raise ConfigError(str(error)) from None
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"a config must be a readable YAML file, got {path} ({error}); correct the path or the file"
        ) from error
    settings = _parse_yaml(text, str(path), is_file=True)
    if not isinstance(settings, dict):
        raise ConfigError(
            f"a config must hold sections of settings such as model and train, got {path} with none; add the sections"
        )
    return settings


def config_from_dict(settings: Mapping[str, Any], overrides: Iterable[str] = ()) -> Config:
    """Builds a Config from nested mappings, such as a YAML file gives.

    Args:
        settings: sections of settings.
        overrides: `section.key=value` strings, the value in YAML.

    Raises:
        ConfigError: a setting is unknown, missing or wrong.
    """
    config = build_section(Config, expand_model(_overridden(settings, overrides)), "")
    assert isinstance(config, Config)
    return config


def _overridden(settings: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """Returns settings with overrides applied, one after another, all under their names of today."""
    changed = with_new_names(settings)
    for override in overrides:
        _apply_override(changed, renamed_override(override))
        changed = with_new_names(changed)
    return changed


def to_yaml(config: Config) -> str:
    """Writes every setting, the defaults too, in the order of the dataclasses."""
    return yaml.safe_dump(to_dict(config), sort_keys=False, allow_unicode=False)


def to_dict(config: Config) -> dict[str, Any]:
    """Returns every setting as dicts, lists, strings and numbers; `config_from_dict` reads it."""
    return _plain(dataclasses.asdict(config))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return list(value) if isinstance(value, tuple) else value


def _parse_yaml(text: str, source: str, *, is_file: bool = False) -> Any:
    try:
        loader = _Loader(text)
        loader.place, loader.is_file = source, is_file
        return loader.get_single_data()
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    except (yaml.YAMLError, ValueError) as error:
        why = str(error).replace('in "<unicode string>", ', "at ")
        raise ConfigError(f"settings must be YAML, got {source} ({why}); correct it") from error
    except RecursionError:
        raise ConfigError(
            f"settings must be YAML with few nested levels, got {source} with too many; remove levels"
        ) from None


class _Loader(NumberLoader):
    """Refuses a duplicate key; YAML would silently keep the last value."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                line = key.start_mark.line + 1
                raise ConfigError(
                    f"a key must be given once, got {key.value} again on line {line}; keep one of the two"
                )
            if isinstance(key, yaml.ScalarNode):
                seen.add(key.value)
        return node


def _apply_override(settings: dict[str, Any], override: str) -> None:
    name, equals, text = override.partition("=")
    *sections, key = name.strip().split(".")
    if not equals or not all((*sections, key)):
        raise ConfigError(f"an override must read section.key=value, got {override!r}; write e.g. train.steps=10")
    for section in sections:
        inner = expand_model(settings).get(section)
        settings[section] = dict(inner) if isinstance(inner, Mapping) else {}
        settings = settings[section]
    if not text.strip():
        settings[key] = Unset()
        return
    # YAML reads a word that begins with * as an alias, and a word that ends with a colon as a key without a value.
    settings[key] = text if text.startswith(("*", "hf:")) else _parse_yaml(text, override)
