"""docs/api.md is what the docstrings say, names what is public first, and its examples run."""

import importlib.util
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import sppo_jax

ROOT = Path(__file__).parents[1]
spec = importlib.util.spec_from_file_location("make_api", ROOT / "docs" / "make_api.py")
make_api = importlib.util.module_from_spec(spec)
spec.loader.exec_module(make_api)


def test_the_page_is_what_the_docstrings_say():
    assert make_api.PAGE.read_text(encoding="ascii") == make_api.page(), f"write it again: {make_api.COMMAND}"


def test_public_names_come_first():
    names = make_api.public_names()
    first = {f"sppo_jax.{name}" for name in sppo_jax.__all__}
    assert set(names[: len(first)]) == first
    assert set(names[len(first) : len(first) + 2]) == {"sppo_jax.models.from_hf", "sppo_jax.models.to_hf"}


@pytest.mark.parametrize("name", make_api.public_names())
def test_a_docstring_has_what_a_reader_needs(name):
    found = make_api._object(name)
    lead = found.__doc__.partition("\n\n")[0]
    assert lead.endswith(".") and "Args:" in found.__doc__
    given = [item.name for item in inspect.signature(found).parameters.values() if item.kind is not item.KEYWORD_ONLY]
    assert [item for item in given if f"{item}:" not in found.__doc__] == []


def test_the_examples_run():
    """The file that tests name as "api" runs as a user would run it."""
    done = subprocess.run([sys.executable, make_api.EXAMPLES], capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
