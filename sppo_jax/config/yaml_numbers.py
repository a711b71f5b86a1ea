"""Numbers of YAML that keep how they were written: a text setting takes the text, a number setting may refuse it.

YAML 1.1 reads 0100000 as 32768 (octal) and 12:00 as 720 (base 60). Whether a value is a number or a text is known only
where its setting is known, so a number keeps its text and its place until then.
"""

from __future__ import annotations

import math
import re
from typing import Any

import yaml

_TAG = "tag:yaml.org,2002:"
# What YAML 1.2 and Python read as a number, and YAML 1.1 as text: an exponent without a point or without a sign.
_EXPONENT = re.compile(r"[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9][0-9_]*)[eE][-+]?[0-9]+$")


class WrittenInt(int):
    """A whole number with its text and its place, such as c.yaml:3."""

    text: str
    place: str

    def __repr__(self) -> str:
        return self.text


class WrittenFloat(float):
    """A number with its text and its place, such as c.yaml:3."""

    text: str
    place: str

    def __repr__(self) -> str:
        return self.text


class OtherNumber(ValueError):
    """A number that YAML 1.1 and Python read differently; the message goes on behind the name of a setting."""


class NumberLoader(yaml.SafeLoader):
    """Loads numbers with their texts and places; dates, and the keys of mappings, are texts."""

    place = ""
    is_file = False

    def construct_number(self, node: yaml.ScalarNode) -> WrittenInt | WrittenFloat:
        """Returns the number that YAML 1.1 reads, with its text."""
        found: WrittenInt | WrittenFloat
        if node.tag == f"{_TAG}int":
            found = WrittenInt(self.construct_yaml_int(node))
        else:
            found = WrittenFloat(self.construct_yaml_float(node))
        found.text = node.value
        found.place = f"{self.place}:{node.start_mark.line + 1}" if self.is_file else self.place
        return found

    def construct_text(self, node: yaml.ScalarNode) -> str:
        """Returns a date as the text that it is written as."""
        return node.value

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Makes every key that looks like a number or a date a text: all keys of settings are names."""
        node = super().compose_mapping_node(anchor)
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag in _LIKE_NUMBERS:
                key.tag = f"{_TAG}str"
        return node


_LIKE_NUMBERS = tuple(f"{_TAG}{tag}" for tag in ("int", "float", "timestamp"))
for _name in _LIKE_NUMBERS[:2]:
    NumberLoader.add_constructor(_name, NumberLoader.construct_number)
NumberLoader.add_constructor(_LIKE_NUMBERS[2], NumberLoader.construct_text)
NumberLoader.add_implicit_resolver(f"{_TAG}float", _EXPONENT, list("-+.0123456789"))


def text_of(value: Any) -> Any:
    """Returns a number of YAML as its text; other values as they are."""
    return value.text if isinstance(value, WrittenInt | WrittenFloat) else value


def check_alike(value: Any, *, or_text: bool = False) -> None:
    """Checks that Python reads a number as YAML 1.1 does; hexadecimal numbers are alike to everyone.

    Args:
        value: a setting's value; only numbers with their texts are checked.
        or_text: whether the setting takes a text as well.

    Raises:
        OtherNumber: Python reads another number, or none.
    """
    if not isinstance(value, WrittenInt | WrittenFloat) or not math.isfinite(value):
        return
    read, number = _read_by_python(value), float(value) if isinstance(value, float) else int(value)
    if read == number:
        return
    ways = [f"{number:.15g}" if isinstance(number, float) else str(number)]
    ways += [str(read)] if read is not None else []
    ways += [f"'{value.text}' in quotes for a text"] if or_text else []
    raise OtherNumber(
        f"must be a number that YAML and Python read alike, got {value.text} in {value.place}, which is {ways[0]} to "
        f"YAML 1.1 ({_form(value.text)}); write {' or '.join(ways)}"
    )


def _read_by_python(value: WrittenInt | WrittenFloat) -> int | float | None:
    try:
        if re.match(r"[-+]?0x", value.text):
            return int(value.text, 16)
        return int(value.text) if isinstance(value, int) else float(value.text)
    except ValueError:
        return None


def _form(text: str) -> str:
    if ":" in text:
        return "base 60"
    if re.match(r"[-+]?0b", text):
        return "binary"
    return "octal" if re.match(r"[-+]?0[0-7_]+$", text) else "its underscores left out"
