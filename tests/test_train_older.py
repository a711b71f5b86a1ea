"""Runs of each form that version 0.1.0 wrote in the middle of its work: they go on with their plan and their tokens.

`older/forms.tar.xz` holds a dense model, one with layers of several types and one with experts: config, plan, the
checkpoint of step 2 of 4, and the tokens of their text.
"""

import json
import tarfile
from pathlib import Path

import pytest

from sppo_jax.cli import main
from sppo_jax.commands.command import read_plan
from sppo_jax.config import config_from_dict, load_config
from sppo_jax.data.cache import store
from sppo_jax.data.open import prepare_data
from sppo_jax.train import planned
from sppo_jax.train.checkpoints.read import find_checkpoint, read_run

FORMS = ("dense", "mixed", "experts")


@pytest.fixture
def older(tmp_path, monkeypatch) -> Path:
    with tarfile.open(Path(__file__).parent / "older" / "forms.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)

    def refuse(*_args, **_settings):
        raise AssertionError("a run that goes on neither plans nor tokenizes")

    monkeypatch.setattr(planned, "search", refuse)
    monkeypatch.setattr(store, "_make", refuse)
    return tmp_path


@pytest.mark.parametrize("form", FORMS)
def test_a_run_has_its_plan_its_tokens_and_its_checkpoint(form, older):
    config, said = load_config(f"{form}.yaml"), []
    plan, problem = planned.plan_of_run(config, None, older / form, said.append, lambda found: None)
    saved = json.loads((older / form / "plan.json").read_text())
    assert not problem and not said and list(plan.chunk_lengths) == saved["chunk_lengths"]
    assert read_plan(older / form / "plan.json", config) == plan
    run = read_run(find_checkpoint(older / form))
    assert run["step"] == 2 and config_from_dict(run["config"]).model == load_config(older / form / "config.yaml").model
    assert prepare_data(config).fingerprint == run["data"]["fingerprint"]


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_a_run_goes_on(form, older):
    assert main(["train", f"{form}.yaml", "--run-dir", form]) == 0
    steps = [json.loads(line)["step"] for line in (older / form / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4]
