"""The reference of all settings, docs/config.md, written from the dataclasses; imports no jax.

Run `python -m sppo_jax.config.reference` to write the page after a change of a section.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from sppo_jax.config.section import Section, field_types
from sppo_jax.config.sections import Config

PAGE = Path(__file__).parents[2] / "docs" / "config.md"
COMMAND = "python -m sppo_jax.config.reference"

_INTRODUCTION = f"""# Configuration reference

This page is generated from the code by `{COMMAND}`. Do not edit the page by hand.

A config is a YAML file that holds sections of keys:

```yaml
model:
  preset: llama3-8b
  rope:
    theta: 500000.0
sequence:
  length: 131072
train:
  steps: 1000
```

* A key that is not given has its default. A key marked `required` must be given.
* An override `key=value` on the command line replaces a key of the file, e.g.
  `sppo train c.yaml sequence.length=65536 data.source=corpus.jsonl`. The key is the full name from the tables below.
  The value is YAML: `mesh.pipe=auto`, `sequence.chunks=[2048,2048]`, `data.tokenizer=null`. `KEY=` alone sets a
  key of the file back to its default. `auto` and `null` are values only of keys whose type has them.
* An unknown key is refused, and the message names the nearest known key. A key given twice is refused too.
* Every value is checked before anything runs. A wrong value ends the command with exit code 2 and one line with the
  rule, the value, and what to change.
* Numbers are finite. A whole number (`int`) may be written as `1e6`, and a number (`float`) as `3e-4`. `1_000_000` and
  `0x10` are numbers too. A number that YAML 1.1 reads otherwise than Python is refused with its line: `0100` (octal,
  64), `12:00` (base 60, 720), `0b101` (binary).
* A key of type `str` takes the text: `data.text_key: 2024`, `data.chat.date: 2026-01-31` and a folder called 0100 need
  no quotes. In a mapping of texts and numbers, such as `data.chat.values`, quotes make a text.
* The tables state the ranges that are checked when a config is read. A plan for given devices has further rules; for
  example, the mesh must use all devices.
"""


def reference() -> str:
    """Returns the text of docs/config.md."""
    return "\n".join([_INTRODUCTION, *(_section(section) for section in sections())])


def sections(outer: type[Section] = Config) -> Iterator[type[Section]]:
    """Yields a section and all sections in it, in the order of their fields.

    Args:
        outer: the dataclass of the section.
    """
    yield outer
    for section in dict.fromkeys(found for hint in _annotations(outer).values() for found in _sections_of(hint)):
        yield from sections(section)


def _sections_of(annotation: Any) -> Iterator[type[Section]]:
    """Yields the sections that a field holds, itself or as values of a mapping."""
    if _is_group(annotation):
        yield annotation
    for inner in typing.get_args(annotation):
        yield from _sections_of(inner)


def sentences(section: type[Section]) -> dict[str, str]:
    """Returns the entries under `Args:` in a section's docstring, each on one line.

    Args:
        section: the dataclass of the section.

    Raises:
        ValueError: an entry does not read `name: text`, or a name is given twice.
    """
    _, _, lines = _docstring(section).partition("\nArgs:\n")
    entries: list[str] = []
    for line in lines.splitlines():
        if line.startswith(" " * 8):
            entries[-1] += f" {line.strip()}"
        else:
            entries.append(line.strip())
    found: dict[str, str] = {}
    for entry in entries:
        name, colon, text = entry.partition(": ")
        if not colon or not name.isidentifier() or name in found:
            raise ValueError(
                f"an entry in the docstring of {section.__name__} must read `name: text` with a name of its own, "
                f"got {entry!r}; correct the entry"
            )
        found[name] = text
    return found


def _docstring(section: type[Section]) -> str:
    return inspect.cleandoc(section.__doc__ or "")


def _annotations(section: type[Section]) -> dict[str, Any]:
    return field_types(section)


def _is_group(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Section)


def _section(section: type[Section]) -> str:
    summary = " ".join(_docstring(section).partition("\n\n")[0].split())
    table = ["| key | type | default | meaning, unit and range |", "|---|---|---|---|"]
    annotations, texts = _annotations(section), sentences(section)
    for spec in dataclasses.fields(typing.cast(Any, section)):
        key = f"{section.section}.{spec.name}".lstrip(".")
        cells = (f"`{key}`", _type_text(annotations[spec.name]), _default_text(spec), texts[spec.name])
        table.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join([f"## {section.section or 'Top level'}", "", summary, "", *table, ""])


def _type_text(annotation: Any) -> str:
    """Returns a type as a user reads it, e.g. `auto`, or `int`."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if _is_group(annotation):
        return f"[section](#{annotation.section.replace('.', '').lower()})"
    if origin in (typing.Union, types.UnionType):
        return ", or ".join(_type_text(arg) for arg in args)
    if origin is Literal:
        return ("one of " if len(args) > 1 else "") + " ".join(f"`{arg}`" for arg in args)
    if origin is tuple:
        return f"list of {_type_text(args[0])}"
    if origin is dict:
        return f"mapping of {_type_text(args[0])} to {_type_text(args[1])}"
    return "`null`" if annotation is types.NoneType else f"`{annotation.__name__}`"


def _default_text(spec: dataclasses.Field[Any]) -> str:
    """Returns a default as YAML; a section whose keys all have defaults is an empty mapping."""
    if spec.default_factory is not dataclasses.MISSING:
        return "`{}`"
    if spec.default is dataclasses.MISSING:
        return "required"
    return f"`{spec.default if isinstance(spec.default, str) else json.dumps(spec.default)}`"


if __name__ == "__main__":
    PAGE.write_text(reference(), encoding="ascii")
