"""A caller's own code passes a strict type checker: public names have types, also where they are imported late."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import sppo_jax
from sppo_jax import attention, models

ROOT = Path(__file__).parents[1]
# optax has no types, and some calls of jax and flax have none.
STRICT = (
    *("--strict", "--config-file=", "--cache-dir", str(ROOT / ".mypy_cache" / "callers"), "--follow-imports=silent"),
    *("--disable-error-code=import-untyped", "--untyped-calls-exclude=jax", "--untyped-calls-exclude=flax"),
)
# What a package imports late: for each name the module that defines it.
LATE = {
    sppo_jax: sppo_jax._HOMES,
    models: {name: f"sppo_jax.models.{home}" for name, home in models._LAZY.items()},
    attention: {name: f"sppo_jax.attention.{home}" for name, home in attention._HOMES.items()},
}


def checked(*files: Path) -> str:
    """Returns what mypy --strict says of files."""
    run = (sys.executable, "-m", "mypy", *STRICT, *map(str, files))
    return subprocess.run(run, capture_output=True, text=True, cwd=ROOT, timeout=500).stdout


def test_callers_and_examples_are_strictly_typed(tmp_path):
    wrong = tmp_path / "wrong.py"
    wrong.write_text("import sppo_jax\n\nlength: int = sppo_jax.make_plan('a.yaml')\n")
    said = checked(wrong, ROOT / "tests" / "caller.py", *sorted((ROOT / "examples").glob("*.py")))
    wanted, given = "incompatible type", 'variable has type "int"'
    assert [f"{wrong.name}:3:" in line for line in said.splitlines()] == [True, True, False], said
    assert wanted in said and given in said and "Found 2 errors in 1 file" in said


def test_a_caller_uses_every_public_name():
    text = (ROOT / "tests" / "caller.py").read_text(encoding="utf-8") + (ROOT / "examples" / "api.py").read_text()
    assert [name for name in sppo_jax.__all__ if f"sppo_jax.{name}" not in text] == []


@pytest.mark.parametrize("package", LATE, ids=lambda package: package.__name__)
def test_what_is_imported_late_is_imported_for_types(package):
    tree = ast.parse(Path(package.__file__).read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    found = {name.name: line.module for line in block.body for name in line.names}
    assert found == LATE[package] and set(found) <= set(package.__all__)
