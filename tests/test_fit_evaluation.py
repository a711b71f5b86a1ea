"""An evaluation is compiled for devices that are not here, and refuses what belongs to a training step."""

import jax
import pytest
import yaml

from sppo_jax.cli import main
from sppo_jax.config import config_from_dict
from sppo_jax.fit.evaluation import compile_evaluation
from sppo_jax.hardware import parse_cluster
from sppo_jax.models.counts import num_params
from sppo_jax.search.evaluation import for_evaluation, plan_evaluation

MODEL = {"vocab_size": 8192, "hidden_size": 256, "num_layers": 2, "num_heads": 4, "mlp_size": 512}
SETTINGS = {"model": MODEL, "sequence": {"length": 256}, "train": {"steps": 1}, "hardware": {"cluster": "cpu:1x2"}}


def test_the_compiler_sees_parameters_and_no_optimizer(monkeypatch):
    monkeypatch.setattr(
        "sppo_jax.fit.targets.compile_only_devices", lambda cluster: jax.devices()[: cluster.num_devices]
    )
    config, cluster = for_evaluation(config_from_dict(SETTINGS)), parse_cluster("cpu:1x2")
    fit = compile_evaluation(config, plan_evaluation(config, cluster).plan, cluster)
    of_params = num_params(config.model) * 4
    assert of_params * 1.5 < fit.compiler.hbm_bytes < of_params * 2.5  # a device's half, and the whole to work with
    # XLA:CPU keeps both tables beside the layers.
    assert of_params < fit.predicted.hbm_bytes < fit.compiler.hbm_bytes
    assert fit.fits and not fit.problem and fit.compiler.host_bytes == 0
    assert "compiled in" in fit.describe() and fit.to_dict()["fits"]


def test_options_of_a_step_are_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(SETTINGS))
    for words, told in ((["--variants"], "--variants"), (["stash.kv=keep"], "stash.kv")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("sppo_jax.commands.fit.compile_evaluation", None)
            assert main(["fit", "small.yaml", "--eval", *words]) == 2
        assert f"remove {told}" in capsys.readouterr().err
