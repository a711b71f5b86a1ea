"""What a release rests on: workflows of make targets, forms, citations, a changelog, and runs of each version."""

import json
import re
import subprocess
import tarfile
from pathlib import Path

import pytest
import yaml

from sppo_jax.cli import COMMANDS, main
from sppo_jax.commands.command import read_plan
from sppo_jax.config import load_config
from sppo_jax.train.checkpoints.read import find_checkpoint, read_run
from sppo_jax.version import __version__

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = [path for path in sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")) if path.stem != "config"]
CHANGES = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
VERSION = re.compile(r"^## (\d+\.\d+\.\d+) - (\d{4}-\d\d-\d\d|unreleased)$", re.MULTILINE)
# The archive of tests/older/ that has runs of a version.
OLDER = {"0.1.0": "forms.tar.xz"}
TARGET = re.compile(r'make (\w+)((?: \w+=[\w."$]+)*)')


def read(path: Path) -> dict:
    """Returns a file of YAML; its key `on` is a word, not the truth value that YAML 1.1 makes of it."""
    return yaml.load(path.read_text(encoding="utf-8"), yaml.BaseLoader)


def steps_of(workflow: dict) -> list[dict]:
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_make_targets_alone(path):
    ran = [step["run"] for step in steps_of(read(path)) if "run" in step]
    assert ran
    for line in ran:
        found = TARGET.fullmatch(line)
        assert found, line
        done = subprocess.run(["make", "-n", found[1]], cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_has_no_secret_and_few_rights(path):
    text, workflow = path.read_text(encoding="utf-8"), read(path)
    assert not re.search(r"secrets\.|password|token:(?! write$)", text, re.MULTILINE)
    assert workflow["permissions"] == {"contents": "read"}
    assert all(
        re.fullmatch(r"[\w./-]+@(v\d+|release/v1)", step["uses"]) for step in steps_of(workflow) if "uses" in step
    )


def test_workflows_test_build_pages_and_publish_what_was_built():
    assert [path.stem for path in WORKFLOWS] == ["docs", "release", "test"]
    docs, release, test = map(read, WORKFLOWS)
    assert test["jobs"]["test"]["strategy"]["matrix"]["python"] == ["3.11", "3.12"]
    site = read_site()["site_dir"]
    assert [step["with"]["path"] for step in docs["jobs"]["build"]["steps"] if "upload" in step.get("uses", "")] == [
        site
    ]
    publish = release["jobs"]["publish"]
    assert publish["permissions"] == {"id-token": "write"} and publish["needs"] == "build"
    assert [step["uses"].partition("@")[0] for step in publish["steps"]] == [
        "actions/download-artifact",
        "pypa/gh-action-pypi-publish",
    ]
    assert release["on"] == {"push": {"tags": ["v*"]}}


def read_site() -> dict:
    return read(ROOT / "mkdocs.yml")


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_a_form_asks_for_what_says_most(path):
    form = read(path)
    asked = " ".join(item["attributes"].get("description", "") for item in form["body"])
    wanted = {"run": ["sppo plan CONFIG.yaml --json", "check.json", "events.jsonl"], "plan": ["--json", "check.json"]}
    assert all(one in asked for one in wanted[path.stem])
    assert set(re.findall(r"`sppo ([a-z-]+) ", asked)) - {"--version"} <= set(COMMANDS)
    assert len({item["id"] for item in form["body"]}) == len(form["body"])
    assert all(item["type"] == "textarea" and item["attributes"]["label"] for item in form["body"])


def test_the_citation_has_this_software_and_six_papers():
    cited = read(ROOT / "CITATION.cff")
    assert cited["cff-version"] == "1.2.0" and cited["authors"] == [{"name": "The sppo_jax developers"}]
    papers = {paper["url"].rpartition("/")[2]: paper for paper in cited["references"]}
    assert set(papers) == {"2503.10377", "2406.03488", "2412.01523", "2408.16978", "2407.12117", "2405.15362"}
    for number, paper in papers.items():
        assert paper["title"] and paper["year"].endswith(number[:2]) and len(paper["authors"]) >= 4
        assert all(set(author) == {"given-names", "family-names"} for author in paper["authors"])


def test_the_newest_change_is_of_this_version():
    versions = VERSION.findall(CHANGES)
    assert len(versions) == CHANGES.count("\n## ") and versions[0][0] == __version__
    assert [number for number, _ in versions] == sorted((number for number, _ in versions), reverse=True)
    assert set(re.findall(r"^### (.*)$", CHANGES, re.MULTILINE)) <= {
        "Added",
        "Changed",
        "Deprecated",
        "Removed",
        "Fixed",
    }


def test_names_that_the_changes_have_are_those_of_the_table():
    from sppo_jax.plan.renamed import _ZEROS, RENAMED, UNTIL

    newest = " ".join(CHANGES.partition("## 0.2.0")[2].partition("\n## ")[0].split())
    for each in RENAMED:
        assert f"`{each.section}.{each.old}` is `{each.section}.{each.new}`" in newest
    zeros = {name.removesuffix(f".{name.rpartition('.')[2]}") if "delta" in name else name for name in _ZEROS}
    assert [name for name in zeros if f"`{name}`" not in newest] == [] and f"until {UNTIL}" in newest


def test_a_run_of_each_released_version_is_kept():
    released = [number for number, date in VERSION.findall(CHANGES) if date != "unreleased"]
    assert released == list(OLDER), "keep a small run of the version in tests/older/, and name its archive here"


@pytest.mark.parametrize("version", OLDER)
def test_what_a_version_wrote_is_read(version, tmp_path, monkeypatch):
    """Its config, its run with the plan and the checkpoint, whose weights are exported."""
    with tarfile.open(ROOT / "tests" / "older" / OLDER[version]) as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    assert json.loads(Path("dense/plan.json").read_text())["version"] == version
    config = load_config("dense.yaml")
    assert load_config("dense/config.yaml").model == config.model
    assert read_plan(Path("dense/plan.json"), config).chunk_lengths
    assert read_run(find_checkpoint(Path("dense")))["step"] == 2
    assert main(["convert", "to-hf", "dense", "out"]) == 0
    assert json.loads(Path("out/config.json").read_text())["hidden_size"] == config.model.hidden_size
