"""Writes docs/api.md from the docstrings of the public functions, with the examples of examples/api.py.

python docs/make_api.py
"""

import inspect
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import sppo_jax

ROOT = Path(__file__).parents[1]
PAGE, EXAMPLES = ROOT / "docs" / "api.md", ROOT / "examples" / "api.py"
COMMAND = "python docs/make_api.py"
_MARK = re.compile(r"^# == (\S+)$", re.MULTILINE)
# What a section of a docstring is called on the page.
_HEADS = {"Args": "Arguments", "Returns": "Returns", "Raises": "Raises"}

_INTRODUCTION = f"""# Python API

This page is generated from docstrings by `{COMMAND}`. Do not edit the page by hand. Its examples are
[examples/api.py](../examples/api.py): each continues those above, and CI runs all of them.

`import sppo_jax` is cheap: a name imports what it needs when it is first used, and planning imports no jax. Settings
are described in [config.md](config.md). Names that are not on this page may change.
"""


def public_names() -> list[str]:
    """Returns the names on the page, in its order: those of the examples."""
    return _MARK.findall(EXAMPLES.read_text(encoding="ascii"))


def page() -> str:
    """Returns the text of docs/api.md."""
    head, *parts = _MARK.split(EXAMPLES.read_text(encoding="ascii"))
    set_up = head.rpartition('"""\n')[2].strip()
    sections = [_section(name, code.strip()) for name, code in zip(parts[::2], parts[1::2], strict=True)]
    return "\n".join([_INTRODUCTION, "All examples begin with:", "", f"```python\n{set_up}\n```", "", *sections])


def _section(name: str, example: str) -> str:
    found = _object(name)
    text = inspect.cleandoc(found.__doc__ or "")
    lead, *sections = re.split(r"^(Args|Returns|Raises|Args and errors):", text, flags=re.MULTILINE)
    lines = [f"## {name}", "", "```python", _signature(name, found), "```", "", lead.strip(), ""]
    for head, body in zip(sections[::2], sections[1::2], strict=True):
        lines += [f"**{_HEADS.get(head, head)}**", "", *_entries(head, inspect.cleandoc("\n" + body)), ""]
    return "\n".join([*lines, "Example:", "", "```python", example, "```", ""])


def _object(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(sppo_jax if module == "sppo_jax" else import_module(module), attribute)


def _signature(name: str, found: Any) -> str:
    """Returns the call, an argument a line; the fields of a class are in its arguments."""
    short = name.rpartition(".")[2]
    if inspect.isclass(found):
        return f"class {short}"
    signature = inspect.signature(found)
    shown = [re.sub(r": '([^']*)'", r": \1", str(item)) for item in signature.parameters.values()]
    shown = [re.sub(r"\b(?:[a-z_]+\.)+([A-Z])", r"\1", item) for item in shown]
    for place, item in enumerate(signature.parameters.values()):
        if item.kind is item.KEYWORD_ONLY:
            shown.insert(place, "*")
            break
    line = f"{short}({', '.join(shown)})"
    return line if len(line) <= 100 else f"{short}(\n    " + ",\n    ".join(shown) + ",\n)"


def _entries(head: str, body: str) -> list[str]:
    """Returns a list of named entries, or a paragraph."""
    if head == "Returns":
        return [body]
    entries: list[str] = []
    for line in body.splitlines():
        if line.startswith(" ") and entries:
            entries[-1] += f" {line.strip()}"
        else:
            entries.append(line)
    return [re.sub(r"^(\w+): ", r"* `\1`: ", entry) for entry in entries]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="ascii")
