"""A run that began with the balance of an import keeps it, and a config that says otherwise is refused."""

import json

import pytest
import yaml
from hf_configs import PUBLISHED

from sppo_jax.config import load_config, to_yaml
from sppo_jax.config.load import is_given
from sppo_jax.train.begun import BALANCE, as_begun
from sppo_jax.train.checkpoints.run_dir import changes_since
from sppo_jax.train.checkpoints.unfinished import newest_unfinished

GPT_OSS = PUBLISHED["gpt-oss-20b"]


@pytest.fixture
def path(tmp_path):
    """A config whose model is in a folder with an unused coefficient."""
    (tmp_path / "oss").mkdir()
    (tmp_path / "oss" / "config.json").write_text(json.dumps(GPT_OSS))
    settings = {"model": f"hf:{tmp_path / 'oss'}", "sequence": {"length": 64}, "train": {"steps": 9}}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(settings))
    return tmp_path / "mine.yaml"


@pytest.fixture
def begun(path, tmp_path):
    """What is left of a run that took the coefficient of the folder."""
    run_dir = tmp_path / "runs" / "mine-20260102-030405"
    for item in ("state", "run"):
        (run_dir / "checkpoints" / "5" / item).mkdir(parents=True)
    (run_dir / "config.yaml").write_text(to_yaml(load_config(path, [f"{BALANCE}=0.9"])))
    (run_dir / "lock").touch()
    return run_dir


def test_a_run_goes_on_as_it_began(path, begun):
    config = load_config(path)
    assert config.model.experts.balance == 0
    assert as_begun(config, begun) == load_config(begun / "config.yaml")
    assert changes_since(begun, as_begun(config, begun)) == []
    assert newest_unfinished(begun.parent, "mine", config, leaves_balance=True) == begun
    assert as_begun(config, begun.parent / "new") == config


def test_a_balance_that_is_given_is_not_replaced(path, begun):
    given = load_config(path, [f"{BALANCE}=0.0"])
    with pytest.raises(ValueError, match="model.experts.balance must stay 0.9, the value in .*, got 0.0; set"):
        changes_since(begun, given)
    assert newest_unfinished(begun.parent, "mine", given) is None


def test_what_is_given_is_known_from_file_and_overrides(path, begun):
    assert not is_given(BALANCE, path)
    assert not is_given(BALANCE, path, ["model.experts.z=0.1", "model.kernel=blockwise"])
    assert is_given(BALANCE, path, [f"{BALANCE}=0"])
    assert is_given(BALANCE, begun / "config.yaml")
    assert not is_given(BALANCE, begun / "config.yaml", [f"model=hf:{path.parent / 'oss'}"])
