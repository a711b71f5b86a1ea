"""Advice of refusals is tried: what a message says to write is added to the command, and its line is gone."""

import os
import re

import jax
import numpy as np
import pytest
import yaml
from bad_inputs import SETTINGS as CONFIG
from bad_inputs import run, text
from hf_folders import write_folder
from test_bad_inputs import DATA, SETTINGS

# KEY=VALUE in advice: KEY= alone is the default; a value ends at a space, or at its bracket or quote.
WORD = re.compile(r"(?<![\w.=-])((?:[a-z][a-z_0-9]*\.)+[a-z][a-z_0-9]*=(?:\[[^\]]*\]|'[^']*'|[^\s,;)]*))")
MODELS = {
    "small": CONFIG["model"],
    "preset": {"preset": "qwen2.5-0.5b", "compute_dtype": "float32"},
    "folder": {"hf": "hf"},
}
# How many pieces of advice are tried at least; and at most in CI, of each model but the small one.
LEAST, FEW = 60, 5


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A working directory with a config for each model, and documents."""
    monkeypatch.chdir(tmp_path)
    for name in ("JAX_PLATFORMS", "XLA_FLAGS"):
        monkeypatch.setenv(name, os.environ[name])
    jax.devices()
    np.save("tokens.npy", (np.arange(1000) % 23).astype(np.uint16))
    text("ok.txt", "the cat " * 40)()
    write_folder(tmp_path / "hf")
    for name, model in MODELS.items():
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(CONFIG | {"model": model}))
    return tmp_path


def alternatives(line):
    """Yields what a refusal says to write, each choice by itself; words without "or" between them go together."""
    _, _, advice = line.partition(" got ")
    for choice in re.split(r",? or ", advice.partition("; ")[2]):
        words = [word.rstrip(".") for word in WORD.findall(choice)]
        if words:
            yield words


def rule_of(line):
    """Returns what must hold, as a refusal says it: without what was got."""
    return re.split(r",? got ", line)[0]


def rows_of(model):
    """Yields the words of commands that are refused, by the rows that tests of bad inputs have."""
    for overrides, _ in SETTINGS:
        yield ["plan", f"{model}.yaml", *overrides.split()]
    for source, _, prepare in DATA:
        if prepare is None and not source.startswith("{"):
            first, *others = source.split()
            yield ["data", f"{model}.yaml", f"data.source={first}", *others]


def tried(model, capfd, most=1000):
    """Returns the advice that was tried with a model, until there are so many pieces, and what did not work."""
    pieces, failed = [], []
    for words in rows_of(model):
        if len(pieces) >= most:
            break
        code, _, _, lines = run(words, capfd)
        if code != 2:
            continue
        for advice in alternatives(lines[0]):
            pieces.append(advice)
            # What is no override is written again; other advice is added.
            kept = words[:2] if lines[0].startswith("an override must read") else words
            _, _, _, again = run([*kept, *advice], capfd)
            if again and rule_of(again[0]) == rule_of(lines[0]):
                failed.append((words, advice, again[0]))
    return pieces, failed


def check(found):
    count = sum(len(pieces) for pieces, _ in found)
    print(f"advice tried: {count}")
    assert [failure for _, failed in found for failure in failed] == [] and count >= LEAST


def test_advice_works_for_a_small_model_and_at_first_for_others(place, capfd):
    check([tried(model, capfd, 1000 if model == "small" else FEW) for model in MODELS])


@pytest.mark.slow
def test_all_advice_works(place, capfd):
    check([tried(model, capfd) for model in MODELS])
