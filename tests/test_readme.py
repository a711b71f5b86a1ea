"""README and docs: the snippet runs, commands and options exist, printed output is today's, links lead somewhere."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench import readme
from bench.blocks import read_block
from sppo_jax.cli import COMMANDS, main

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *ROOT.glob("*/README.md")])
README = (ROOT / "README.md").read_text(encoding="utf-8")
LINK = re.compile(r"\]\(([^)#\s]+)(#[^)]*)?\)")


def options_of(command: str, capsys) -> set[str]:
    """Returns the options that the help of a command names."""
    for words in ([command], ["convert", "to-hf"], ["convert", "from-hf"])[: 3 if command == "convert" else 1]:
        with pytest.raises(SystemExit):
            main([*words, "--help"])
    return options_in(capsys.readouterr().out) - {"--help"}


def options_in(text: str) -> set[str]:
    return set(re.findall(r"--[a-z][a-z-]*", text))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page):
    links = [link for link, _ in LINK.findall(page.read_text(encoding="utf-8")) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_snippet_runs_as_printed(tmp_path):
    (snippet,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    code = snippet + "\nprint(float(loss), len(jax.tree.leaves(grads)))\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    loss, count = done.stdout.split()[-2:]
    assert 5 < float(loss) < 6.5 and int(count) > 5  # about ln 256


def test_the_plan_is_what_the_command_prints_today():
    assert read_block(ROOT / "README.md", "plan") == readme.block(), "write it again: python -m bench.readme"


@pytest.mark.parametrize("command", COMMANDS)
def test_the_command_page_names_every_option(command, capsys):
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    (line,) = re.findall(rf"^sppo {command} .*$", page, re.MULTILINE)
    assert options_of(command, capsys) == options_in(line)


def test_commands_of_the_readme_have_configs_and_options_that_exist(capsys):
    commands = re.findall(r"^(?:\$ )?sppo ([a-z-]+) +(.*)$", README, re.MULTILINE)
    assert {command for command, _ in commands} == {"plan", "train", "convert"}
    for command, words in commands:
        assert all((ROOT / path).exists() for path in re.findall(r"configs/\S+\.yaml", words))
        assert options_in(words) <= options_of(command, capsys)
