"""Settings under their names of today, whatever version they were written for; imports no jax."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from sppo_jax.config.section import ConfigError
from sppo_jax.plan.renamed import RENAMED, Renamed, find_renamed, new_name

# Every config.yaml of a run, and every config in a checkpoint, has these sections. Nobody writes all of them by hand.
_OF_A_RUN = {"model", "data", "mesh", "sequence", "schedule", "stash", "optimizer", "train", "checkpoint", "metrics"}


def with_new_names(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings under their names of today; warns of each old name, but for settings that a run wrote.

    Args:
        settings: the settings of a whole config.

    Raises:
        ConfigError: a setting is given under both of its names.
    """
    found = dict(settings)
    for each in RENAMED:
        section = found.get(each.section)
        if isinstance(section, Mapping) and each.old in section:
            found[each.section] = _moved(section, each)
            _say(each, is_saved=settings.keys() >= _OF_A_RUN)
    return found


def renamed_override(override: str) -> str:
    """Returns an override with the setting's name of today; warns of an old one."""
    name, equals, text = override.partition("=")
    found = find_renamed(name.strip())
    if found is None:
        return override
    _say(found)
    return f"{new_name(name.strip())}{equals}{text}"


def _moved(section: Mapping[str, Any], each: Renamed) -> dict[str, Any]:
    if each.new in section:
        raise ConfigError(
            f"{each.section}.{each.old} is now {each.section}.{each.new}, got both; remove {each.section}.{each.old}"
        )
    return {each.new if name == each.old else name: value for name, value in section.items()}


def _say(each: Renamed, *, is_saved: bool = False) -> None:
    if each.line and not is_saved:
        warnings.warn(each.line, stacklevel=2)
