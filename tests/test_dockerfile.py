"""The Dockerfile, line by line: its paths, versions and commands are those of the repository; nothing is built."""

import fnmatch
import re
import tomllib
from pathlib import Path

import pytest
import yaml

from sppo_jax.cli import main

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PINNED = dict(line.split("==") for line in (ROOT / "constraints-py312.txt").read_text(encoding="ascii").splitlines())
IGNORED = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
TEXT = (ROOT / "Dockerfile").read_text(encoding="utf-8")
LINES = [line.split(maxsplit=1) for line in TEXT.splitlines() if line and not line.startswith("#")]
STARTS = [number for number, (word, _) in enumerate(LINES) if word == "FROM"]
BUILD, FINAL = LINES[: STARTS[1]], LINES[STARTS[1] :]
# What a wheel is built from: `setup.py` and `pyproject.toml` name the others.
SOURCES = {"pyproject.toml", "setup.py", "README.md", "LICENSE", "configs", "sppo_jax"}


def copied(stage) -> dict[str, str]:
    """Returns what a stage copies from the checkout, and where to."""
    found = {}
    for word, rest in stage:
        if word == "COPY" and "--from" not in rest:
            *names, target = rest.split()
            found |= {name: target for name in names}
    return found


def test_two_stages_have_one_slim_python_of_the_constraints():
    assert len(STARTS) == 2
    images = {rest.split()[0] for word, rest in LINES if word == "FROM"}
    (image,) = images
    assert re.fullmatch(r"python:3\.12\.\d+-slim-\w+", image) and "constraints-py312.txt" in copied(BUILD)


def test_every_path_is_in_the_checkout_and_is_sent_to_the_builder():
    names = {**copied(BUILD), **copied(FINAL)}
    assert [name for name in names if not (ROOT / name).exists()] == []
    assert [name for name in names if any(fnmatch.fnmatch(name, pattern) for pattern in IGNORED)] == []
    assert set(copied(BUILD)) == SOURCES | {"constraints-py312.txt"} and set(copied(FINAL)) == {"launch", "configs"}
    assert PROJECT["readme"] in SOURCES and set(PROJECT["license-files"]) <= SOURCES
    moved = [rest.split()[1:] for word, rest in FINAL if word == "COPY" and "--from" in rest]
    assert moved == [["/opt/sppo", "/opt/sppo"]] and "venv /opt/sppo" in TEXT and "PATH=/opt/sppo/bin" in TEXT


def test_versions_are_those_of_the_project():
    named = dict(re.findall(r"([a-z_]+)==([\d.]+)", TEXT))
    assert [f"{name}=={version}" for name, version in named.items()] == PROJECT["optional-dependencies"]["release"]
    (constraint,) = (rest.partition("=")[2] for word, rest in BUILD if "PIP_CONSTRAINT" in rest)
    folder = next(rest for word, rest in BUILD if word == "WORKDIR")
    assert constraint == f"{folder}/constraints-py312.txt"


@pytest.mark.parametrize("extra", ["cuda", "tpu"])
def test_what_is_installed_is_pinned_and_has_no_tests_nor_torch(extra):
    extras = PROJECT["optional-dependencies"]
    (asked,) = re.findall(r"\.whl\)\[\$\{EXTRA\},(\w+)\]", TEXT)
    (inner,) = re.findall(r"\[([a-z,]+)\]", extras[asked][0])
    lines = [*PROJECT["dependencies"], *extras[extra], *(line for name in inner.split(",") for line in extras[name])]
    names = {re.match(r"[\w.-]+", line).group().lower().replace("_", "-") for line in lines}
    pinned = {name.lower().replace("_", "-") for name in PINNED}
    assert names <= pinned
    assert not names & {"torch", "transformers", "pytest", "hypothesis", "mypy", "ruff", "build", "setuptools"}
    assert f"EXTRA={extra}" in TEXT


def test_the_last_command_checks_the_image(capsys):
    *_, (word, command) = LINES
    assert (word, command) == ("RUN", "sppo check --devices cpu:2 --quick")
    with pytest.raises(SystemExit):
        main(["check", "--help"])
    assert {"--devices", "--quick"} <= set(re.findall(r"--[a-z]+", capsys.readouterr().out))
    assert ["ENTRYPOINT", '["sppo"]'] in FINAL


def test_launch_files_use_the_image():
    """The JobSet finds its script and its config where the image has them; its head says how to build it."""
    text = (ROOT / "launch" / "jobset.yaml").read_text(encoding="utf-8")
    used = set(re.findall(r"/sppo_jax/([\w./-]+\.(?:sh|yaml))", text))
    assert used and all((ROOT / name).is_file() for name in used)
    places = {name: place for name, place in copied(FINAL).items()}
    assert {name.partition("/")[0] for name in used} <= {
        name for name, to in places.items() if to == f"/sppo_jax/{name}"
    }
    job = yaml.safe_load(text)["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert job["containers"][0]["image"].startswith("registry.example.com/")
    for name in ("jobset.yaml", "xpk.sh"):
        assert "Dockerfile" in (ROOT / "launch" / name).read_text(encoding="utf-8")


def test_pages_say_that_it_was_never_built():
    said = " ".join((ROOT / "launch" / "README.md").read_text(encoding="utf-8").split())
    assert "The Dockerfile was never built" in said and "was never built" in TEXT
