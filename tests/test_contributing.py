"""The table of decisions in CONTRIBUTING: each file and function is there, and each step imports the next."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "sppo_jax"
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
STEP = re.compile(r"`([a-z_/]+\.py)`: `(\w+)`")
ROWS = [
    line
    for line in TEXT.partition("## Five decisions")[2].partition("\n## ")[0].splitlines()
    if line.startswith("| ") and STEP.search(line)
]
DECISIONS = {line.split(" | ")[0].removeprefix("| "): STEP.findall(line) for line in ROWS}


def imported_by(path: Path) -> set[str]:
    """Returns the modules that a file imports, with dots."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{name.name}" for name in node.names}
        elif isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
    return found


def defined_in(path: Path) -> set[str]:
    """Returns the functions and classes at the top of a file."""
    kinds = ast.FunctionDef | ast.ClassDef
    return {node.name for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, kinds)}


def test_the_table_has_five_decisions_of_at_most_three_files_and_the_readme_leads_to_it():
    assert len(ROWS) == len(DECISIONS) == 5
    assert all(2 <= len(steps) <= 3 for steps in DECISIONS.values())
    assert "(CONTRIBUTING.md#five-decisions)" in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("decision", DECISIONS)
def test_every_step_is_there_and_is_imported_by_the_one_before(decision):
    steps = DECISIONS[decision]
    for file, name in steps:
        assert name in defined_in(PACKAGE / file), f"{file}: {name}"
    for (file, _), (following, _) in zip(steps, steps[1:], strict=False):
        module = "sppo_jax." + following.removesuffix(".py").replace("/", ".")
        assert module in imported_by(PACKAGE / file), f"{file} does not import {following}"
