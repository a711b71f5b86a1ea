"""Shipped configs: found by name in every folder, listed, and behind a file of the user."""

import warnings
from pathlib import Path

import pytest

from sppo_jax.cli import COMMANDS, main
from sppo_jax.commands.shipped import find_config, shipped_configs, summary

ROOT = Path(__file__).parents[1]
RECIPE = "sft-agent-traces-128k.yaml"


def test_every_shipped_config_is_found_by_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    paths = sorted((ROOT / "configs").rglob("*.yaml"))
    assert sorted(shipped_configs().values()) == paths and len(shipped_configs()) == len(paths)  # names are unique
    for path in paths:
        within = path.relative_to(ROOT)
        assert {find_config(name) for name in (path.name, str(within), str(within.relative_to("configs")))} == {
            str(path)
        }
    with pytest.raises(ValueError, match="which is neither"):
        find_config(f"other/{RECIPE}")


def test_a_file_of_the_user_is_read_and_a_line_says_so(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / RECIPE).write_text("model: mine\n")
    with pytest.warns(UserWarning, match=f"{RECIPE} of this folder is read, not the shipped config"):
        assert find_config(RECIPE) == RECIPE
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert find_config(str(tmp_path / RECIPE)) == str(tmp_path / RECIPE)
        monkeypatch.chdir(ROOT / "configs" / "recipes")
        assert find_config(RECIPE) == RECIPE  # the shipped file itself


def test_an_unknown_name_is_answered_with_the_nearest(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="are llama3-8b-1gpu.yaml, llama3-8b-1gpu-80g.yaml, llama3-8b-5m.yaml"):
        find_config("llama3-8b-1gp.yaml")


def test_configs_are_listed_with_the_first_sentence_of_their_heads(capfd):
    assert main(["configs"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(shipped_configs())
    assert "qwen3-8b-1m-8gpu.yaml         Qwen3-8B on sequences of 1M tokens on one host" in lines
    assert all(20 < len(summary(path)) < 140 for path in shipped_configs().values())


def test_the_help_has_a_line_for_each_command(capfd):
    with pytest.raises(SystemExit):
        main(["--help"])
    _, _, listed = capfd.readouterr().out.partition("\ncommands:\n")
    assert [line.split()[0] for line in listed.splitlines()] == list(COMMANDS)
    assert all((ROOT / "sppo_jax" / "commands" / f"{name.replace('-', '_')}.py").is_file() for name in COMMANDS)
