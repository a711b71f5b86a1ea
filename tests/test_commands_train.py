"""What `sppo train` refuses before it starts."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from exactness import small_plan

from sppo_jax.commands import train
from sppo_jax.config import config_from_dict
from sppo_jax.hardware.present import Gpu
from sppo_jax.plan.host_arrays import HostArrays
from sppo_jax.plan.parts import Predicted
from sppo_jax.processes import distributed
from sppo_jax.train import planned

GIB = 2**30
SETTINGS = {
    "model": {"vocab_size": 24, "hidden_size": 16, "num_layers": 4, "num_heads": 2, "mlp_size": 32},
    "data": {"source": "tokens.npy"},
    "sequence": {"length": 64},
    "train": {"steps": 1},
    "hardware": {"cluster": "h100:1x1"},
}


def a_plan(host_gib):
    predicted = Predicted(step_s=1.0, bubble_fraction=0.0, hbm_bytes=(0,), host_bytes=(host_gib * GIB,))
    plan = small_plan((16,) * 4, mesh=(1, 1, 1))
    return replace(plan, predicted=predicted, host_arrays=HostArrays(stash_bytes=host_gib * GIB))


@pytest.fixture
def machine(monkeypatch):
    """A machine with one GPU and 300 GiB of memory, whatever a datasheet says of its kind."""
    monkeypatch.setattr(train, "gpus_may_start", lambda: True)
    monkeypatch.setattr(train, "visible_gpus", lambda: (Gpu(name="NVIDIA H100", uuid="", memory_bytes=None),))
    monkeypatch.setattr(distributed.machine, "host_bytes", lambda: 300 * GIB)
    monkeypatch.setattr(distributed, "cluster", lambda config: None)
    return config_from_dict(SETTINGS)


def test_a_plan_that_pins_more_than_the_machine_has_ends_with_exit_code_3(machine, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(planned, "plan_of_run", lambda *given: (a_plan(400), ""))
    args = SimpleNamespace(plan=None, config="tiny.yaml", verbose=False)
    assert train._train(args, machine, tmp_path / "run", None) == 3
    words = capsys.readouterr().err.splitlines()
    assert len(words) == 1 and "the plan pins 400 GiB of a host" in words[0] and "got a host with 300 GiB" in words[0]
    assert not (tmp_path / "run").exists()


def test_a_config_for_which_no_plan_fits_ends_with_exit_code_3_before_data_are_read(machine, tmp_path, capsys):
    config = replace(machine, hardware=replace(machine.hardware, hbm_bytes=1000))
    assert (
        train._train(SimpleNamespace(plan=None, config="tiny.yaml", verbose=False), config, tmp_path / "run", None) == 3
    )
    words = capsys.readouterr().err.splitlines()
    assert len(words) == 1 and words[0].startswith("no plan fits") and not (tmp_path / "run").exists()


@pytest.mark.parametrize(("host_gib", "refused"), [(0, False), (290, False), (292, True)])
def test_ninety_seven_percent_may_be_pinned(host_gib, refused, machine):
    assert bool(train._lack_of_host_memory(machine, a_plan(host_gib), None)) == refused


def test_a_machine_without_gpus_pins_nothing(machine, monkeypatch):
    monkeypatch.setattr(train, "visible_gpus", lambda: None)
    assert train._lack_of_host_memory(machine, a_plan(400), None) == ""
    monkeypatch.setattr(train, "visible_gpus", lambda: (Gpu(name="NVIDIA H100", uuid="", memory_bytes=None),))
    monkeypatch.setattr(train, "gpus_may_start", lambda: False)
    assert train._lack_of_host_memory(machine, a_plan(400), None) == ""


def test_devices_that_no_table_knows_may_follow_a_plan(machine, monkeypatch):
    def unknown(config, cluster):
        raise ValueError("unknown device")

    monkeypatch.setattr(train, "resolve_cluster", unknown)
    monkeypatch.setattr(train, "visible_gpus", lambda: ())
    assert train._lack_of_host_memory(machine, a_plan(400), None) == ""
