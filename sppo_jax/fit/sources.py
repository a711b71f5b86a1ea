"""What a lowered step is made from: the source files that it imports, as one digest.

Equal digests mean equal programs, so nothing has to be lowered to compare them. Other digests mean nothing yet: a
comment changes them too.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

_ROOT = Path(__file__).parents[1]
# What `compile_plan` lowers.
_PROGRAM = ("sppo_jax.fit.lowering", "sppo_jax.fit.workspace", "sppo_jax.fit.targets", "sppo_jax.fit.fingerprint")


@cache
def sources_digest() -> str:
    """Returns 16 digits of all files of this package that a lowered step imports, with their names."""
    digest = hashlib.sha256()
    for path in sorted(program_files()):
        digest.update(f"{path.relative_to(_ROOT).as_posix()}\0".encode())
        digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def program_files() -> set[Path]:
    """Returns the files of this package that a lowered step imports, directly or by way of others."""
    found: set[Path] = set()
    left = [path for name in _PROGRAM for path in _files_of(name)]
    while left:
        path = left.pop()
        if path not in found:
            found.add(path)
            left += [file for name in _imported(path) for file in _files_of(name)]
    return found


def _imported(path: Path) -> Iterator[str]:
    """Yields the names that a file imports, at any depth; of `from a import b` both `a` and `a.b`."""
    for node in _nodes(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{name.name}" for name in node.names)


def _nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yields a node and those below it, without what only a type checker reads."""
    yield node
    is_for_types = isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
    for child in node.orelse if is_for_types else ast.iter_child_nodes(node):
        yield from _nodes(child)


def _files_of(module: str) -> list[Path]:
    """Returns the file of a module of this package and those of the packages that it lies in; else none."""
    root, *parts = module.split(".")
    if root != _ROOT.name:
        return []
    found = [_ROOT.joinpath(*parts[:count], "__init__.py") for count in range(len(parts) + 1)]
    found += [_ROOT.joinpath(*parts[:-1], f"{parts[-1]}.py")] if parts else []
    return [path for path in found if path.is_file()]
