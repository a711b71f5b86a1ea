"""Settings under their names of today, whatever version they were written for; imports no jax."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from sppo_jax.config.section import ConfigError
from sppo_jax.plan.renamed import RENAMED, Renamed, find_renamed, new_name, new_value, zero_line

# Every config.yaml of a run, and every config in a checkpoint, has these sections. Nobody writes all of them by hand.
_OF_A_RUN = {"model", "data", "mesh", "sequence", "schedule", "stash", "optimizer", "train", "checkpoint", "metrics"}


def with_new_names(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings under their names of today, and with values of today for 0 where it said that none is given.

    Warns of each old one, but for settings that a run wrote.

    Args:
        settings: the settings of a whole config.

    Raises:
        ConfigError: a setting is given under both of its names.
    """
    found, is_saved = dict(settings), settings.keys() >= _OF_A_RUN
    for each in RENAMED:
        section = found.get(each.section)
        if isinstance(section, Mapping) and each.old in section:
            found[each.section] = _moved(section, each)
            _say(each.line, is_saved)
    return {name: _without_zeros(name, value, is_saved) for name, value in found.items()}


def renamed_override(override: str) -> str:
    """Returns an override with the setting's name of today; warns of an old one."""
    name, equals, text = override.partition("=")
    found = find_renamed(name.strip())
    if found is None:
        return override
    _say(found.line)
    return f"{new_name(name.strip())}{equals}{text}"


def _moved(section: Mapping[str, Any], each: Renamed) -> dict[str, Any]:
    if each.new in section:
        raise ConfigError(
            f"{each.section}.{each.old} is now {each.section}.{each.new}, got both; remove {each.section}.{each.old}"
        )
    return {each.new if name == each.old else name: value for name, value in section.items()}


def _without_zeros(name: str, value: Any, is_saved: bool) -> Any:
    """Returns a value of today of a setting or of a section, by its dotted name."""
    if isinstance(value, Mapping):
        return {key: _without_zeros(f"{name}.{key}", item, is_saved) for key, item in value.items()}
    new = new_value(name, value)
    if new is not value:
        _say(zero_line(name), is_saved)
    return new


def _say(line: str, is_saved: bool = False) -> None:
    if line and not is_saved:
        warnings.warn(line, stacklevel=2)
