"""docs/config.md is what the sections say, every field has a sentence, and the ranges in the sentences are enforced."""

import dataclasses
import re
import subprocess
import sys
import typing

import pytest
import yaml

from sppo_jax.config import ConfigError, config_from_dict
from sppo_jax.config.reference import COMMAND, PAGE, reference, sections, sentences
from sppo_jax.config.section import Section, field_types
from sppo_jax.plan.renamed import new_value

STALE = f"docs/config.md is stale: write the page again with `{COMMAND}`"
SECTIONS = list(sections())
SMALL = {
    "model": {"vocab_size": 257, "hidden_size": 64, "num_layers": 4, "num_heads": 4, "head_dim": 16, "mlp_size": 192},
    "sequence": {"length": 4096},
    "train": {"steps": 10},
}
# "1 to 10", "0 (none) to 10", or "at least 1" unless it holds in some cases only.
RANGE = re.compile(r"\b(\d[\de]*)(?: \([^)]*\))? to (\d[\de]*)|at least (\d+)(?! for)")
OTHER_RANGE = re.compile(r"above 0|any number|must be 0|a divisor of|up to|0 \(none\) to|at least|, as `model\.")


def numeric_keys():
    """Yields the name, the sentence and the type, int or float, of every key that may be one number."""
    for section in SECTIONS:
        hints = field_types(section)
        for name, text in sentences(section).items():
            hint = hints.get(name)
            kinds = {hint, *(() if typing.get_origin(hint) is tuple else typing.get_args(hint))}
            if kinds & {int, float}:
                yield f"{section.section}.{name}", text, int if int in kinds else float


def bounds():
    """Yields the ends of every stated range, which are allowed, and numbers beyond them, which are not."""
    for key, text, kind in numeric_keys():
        if found := RANGE.search(text):
            low, high, least = found.groups()
            low = int(low or least)
            yield key, low, True
            # Of a setting that is not given 0 is read until version 0.3.
            yield key, -1 if "0: " in text or new_value(key, 0) != 0 else low - 1, False
            if high:
                high = kind(float(high))
                yield key, high, True
                yield key, high + 1 if kind is int else 2 * high, False


def test_the_page_is_what_the_sections_say():
    assert PAGE.read_text(encoding="ascii") == reference(), STALE


def test_every_section_is_on_the_page():
    assert set(SECTIONS) == {
        section for section in Section.__subclasses__() if section.__module__.startswith("sppo_jax.")
    }


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.__name__)
def test_every_field_has_a_sentence_and_every_sentence_a_field(section):
    entries = sentences(section)
    assert list(entries) == [spec.name for spec in dataclasses.fields(section)]
    for name, text in entries.items():
        assert text.endswith(".") and len(text) > 10, f"the entry {name} of {section.__name__} must be a sentence"


@pytest.mark.parametrize(("key", "text", "kind"), list(numeric_keys()))
def test_every_number_states_a_range(key, text, kind):
    assert RANGE.search(text) or OTHER_RANGE.search(text), f"the sentence of {key} must state its range"


@pytest.mark.parametrize(("key", "value", "allowed"), list(bounds()))
def test_a_stated_range_is_enforced(key, value, allowed):
    if allowed:
        config_from_dict(SMALL, [f"{key}={value}"])
    else:
        with pytest.raises(ConfigError, match=rf"^{key} must be "):
            config_from_dict(SMALL, [f"{key}={value}"])


@pytest.mark.parametrize("entry", ["no colon here", "two words: text.", "size: text.\n        size: again."])
def test_a_malformed_entry_is_refused(entry):
    section = type(
        "Broken", (Section,), {"__doc__": f"A section.\n\n    Args:\n        {entry}\n    ", "__module__": "tests"}
    )
    with pytest.raises(ValueError, match="an entry in the docstring of Broken must read"):
        sentences(section)


def test_the_example_on_the_page_is_a_config():
    (example,) = re.findall(r"```yaml\n(.*?)```", reference(), re.DOTALL)
    assert config_from_dict(yaml.safe_load(example)).model.rope.theta == 500000.0


def test_the_reference_imports_no_jax():
    code = "import sys, sppo_jax.config.reference as page; page.reference(); sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
