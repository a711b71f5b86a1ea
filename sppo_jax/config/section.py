"""Sections of settings that convert and check themselves, with one-line errors for the user."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import types
import typing
import warnings
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from sppo_jax.config.yaml_numbers import OtherNumber, check_alike, text_of
from sppo_jax.files.paths import check_local
from sppo_jax.plan.renamed import new_value, zero_line
from sppo_jax.rules import Facts, check


class ConfigError(ValueError):
    """A setting that the user gave is wrong; the message is one line."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


# A number that a user may also write as `auto`: it is worked out when a config is read, unless nothing depends on it.
WorkedOut = Annotated[int, Literal["auto"]]
AUTO: Any = "auto"


class Unset:
    """The value of a setting that an override sets back to its default."""


class Section:
    """Converts every field to its annotated type, then checks its range; errors name the setting as `section.field`."""

    section: ClassVar[str] = ""

    def __post_init__(self) -> None:
        hints = field_types(type(self))
        for spec in dataclasses.fields(typing.cast(Any, self)):
            name = self._name(spec.name)
            given = getattr(self, spec.name)
            if (now := new_value(name, given)) is not given:
                warnings.warn(zero_line(name), stacklevel=2)
            value = _convert(now, hints[spec.name], name, _way_back(spec, name))
            object.__setattr__(self, spec.name, value)
        self._check()

    @classmethod
    def complete(cls, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        """Adds the settings that follow from those given, before missing settings are reported."""
        return settings

    def _check(self) -> None:
        """Checks ranges and fields against each other."""

    def _hold(self, facts: Facts) -> None:
        try:
            check(facts)
        except ValueError as error:
            raise ConfigError(str(error)) from None

    def _name(self, name: str) -> str:
        return f"{self.section}.{name}" if self.section else name

    def _at_least(self, minimum: float, *names: str) -> None:
        for name in names:
            value, full = getattr(self, name), self._name(name)
            if value is not None and not isinstance(value, str) and value < minimum:
                raise ConfigError(f"{full} must be at least {minimum}, got {value}; use {full}={minimum} or more")

    def _at_most(self, maximum: float, *names: str) -> None:
        for name in names:
            value, full = getattr(self, name), self._name(name)
            if value is not None and not isinstance(value, str) and value > maximum:
                raise ConfigError(f"{full} must be at most {maximum}, got {value}; use {full}={maximum} or less")

    def _local(self, *names: str) -> None:
        for name in names:
            path = getattr(self, name)
            try:
                check_local(path or "", self._name(name))
            except ValueError as error:
                raise ConfigError(str(error)) from None

    def _fraction(self, *names: str) -> None:
        for name in names:
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(
                    f"{self._name(name)} must be in [0, 1), got {getattr(self, name)}; choose a value in that range"
                )


def build_section(cls: type[Section], settings: Any, name: str) -> Section:
    """Builds one section of settings and the sections in it.

    Args:
        cls: the dataclass of the section.
        settings: the user's settings, a mapping.
        name: dotted name of the section, for errors; "" for the outermost.

    Raises:
        ConfigError: a setting is unknown, missing or wrong.
    """
    if not isinstance(settings, Mapping):
        raise ConfigError(f"{name} must be a section of settings, got {settings!r}; write key: value lines under it")
    hints = field_types(cls)
    for key in settings:
        if key not in hints:
            full = f"{name}.{key}" if name else f"{key}"
            near = difflib.get_close_matches(str(key), hints, n=1, cutoff=0.0)
            raise ConfigError(f"{full} is not a setting; the nearest setting is {f'{name}.' if name else ''}{near[0]}")
    settings = {key: value for key, value in settings.items() if not isinstance(value, Unset)}
    settings = cls.complete({key: text_of(value) if _is_text(hints[key]) else value for key, value in settings.items()})
    for spec in dataclasses.fields(typing.cast(Any, cls)):
        required = spec.default is dataclasses.MISSING and spec.default_factory is dataclasses.MISSING
        if required and spec.name not in settings:
            raise ConfigError(f"{f'{name}.' if name else ''}{spec.name} must be given, got none; add it to the config")
    return cls(**settings)


def field_types(cls: type) -> dict[str, Any]:
    """Returns what a user may write for each field of a section, as a type."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {spec.name: _written(hints[spec.name]) for spec in dataclasses.fields(cls)}


def _written(annotation: Any) -> Any:
    if typing.get_origin(annotation) is not Annotated:
        return annotation
    number, other = typing.get_args(annotation)
    return typing.Union[other, number]  # noqa: UP007


def _is_text(annotation: Any) -> bool:
    """Returns whether a setting takes a text, and no number."""
    options = typing.get_args(annotation) if _is_union(annotation) else (annotation,)
    return str in options and not {int, float} & set(options)


def _way_back(spec: dataclasses.Field[Any], name: str) -> str:
    """Says how to write the default of a setting; empty where it has none, or no name of its own."""
    if spec.default is dataclasses.MISSING or "NAME" in name:
        return ""
    text = spec.default if isinstance(spec.default, str) else json.dumps(spec.default)
    of_model = ", unless a preset or folder says more" if name.startswith("model.") else ""
    return f"or write {name}= for the default ({text}{of_model})"


def _convert(value: Any, annotation: Any, name: str, way_back: str) -> Any:
    """Returns the value as the annotated type, or raises a ConfigError that names the setting.

    Args:
        value: as the user gave it.
        annotation: the type.
        name: dotted name of the setting.
        way_back: from `_way_back`.
    """
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return (
            value if isinstance(value, annotation) else build_section(annotation, {} if value is None else value, name)
        )
    options = typing.get_args(annotation) if _is_union(annotation) else (annotation,)
    for option in options:
        try:
            return _convert_one(value, option)
        except ConfigError:
            raise
        except OtherNumber as error:
            raise ConfigError(f"{name} {error}") from None
        except (TypeError, ValueError, OverflowError):
            continue
    expected = ", or ".join(_describe(option) for option in options)
    near = "correct the value"
    if isinstance(value, str):
        choices = [choice for option in options for choice in _choices(option)]
        near = next((f"did you mean {match}?" for match in difflib.get_close_matches(value, choices, n=1)), near)
    if str in options and isinstance(value, int | float):
        near = "put quotes around the value"
    got = "null" if value is None else repr(value)
    change = " ".join(filter(None, (f"{near}," if way_back and near[-1] != "?" else near, way_back)))
    raise ConfigError(f"{name} must be {expected}, got {got}; {change}")


def _is_union(annotation: Any) -> bool:
    return typing.get_origin(annotation) in (typing.Union, types.UnionType)


def _choices(option: Any) -> tuple[str, ...]:
    return typing.get_args(option) if typing.get_origin(option) is Literal else ()


def _convert_one(value: Any, option: Any) -> Any:
    if option is types.NoneType or option is bool or option is str:
        value = text_of(value) if option is str else value
        if type(value) is not option:
            raise TypeError
        if isinstance(value, str) and (not value.strip() or "\0" in value):
            raise ValueError
        return value
    if typing.get_origin(option) is Literal:
        if value not in typing.get_args(option):
            raise ValueError
        return value
    if typing.get_origin(option) is tuple:
        if not isinstance(value, list | tuple):
            raise TypeError
        return tuple(_convert_one(item, typing.get_args(option)[0]) for item in value)
    if typing.get_origin(option) is dict:
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise TypeError
        items = {key: item for key, item in value.items() if not isinstance(item, Unset)}
        return {key: _convert_item(item, typing.get_args(option)[1]) for key, item in items.items()}
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise TypeError
    check_alike(value)
    number = float(value)
    if not math.isfinite(number):
        raise ValueError
    if option is float:
        return number
    if number != int(number):
        raise ValueError
    return int(value) if isinstance(value, int) else int(number)


def _convert_item(value: Any, option: Any) -> Any:
    """Converts a value of a mapping, which may be of several types; a text in quotes is no number."""
    options = typing.get_args(option) if _is_union(option) else (option,)
    if str in options and isinstance(value, str):
        return _convert_one(value, str)
    check_alike(value, or_text=str in options)
    for one in options:
        if isinstance(one, type) and issubclass(one, Section):
            if isinstance(value, one | Mapping):
                return value if isinstance(value, one) else build_section(one, value, one.section)
            continue
        try:
            return _convert_one(value, one)
        except (TypeError, ValueError, OverflowError):
            continue
    raise TypeError


def _describe(option: Any) -> str:
    if _is_union(option):
        return ", or ".join(map(_describe, typing.get_args(option)))
    if isinstance(option, type) and issubclass(option, Section):
        return "a section of settings"
    if typing.get_origin(option) is Literal:
        return " | ".join(typing.get_args(option))
    if typing.get_origin(option) is tuple:
        return f"a list, each {_describe(typing.get_args(option)[0])}"
    if typing.get_origin(option) is dict:
        return f"a mapping of names, each to {_describe(typing.get_args(option)[1])}"
    names = {types.NoneType: "null", bool: "true | false", str: "text", int: "a whole number", float: "a number"}
    return names[option]
