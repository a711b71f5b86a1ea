"""Devices to compile for that need not be there."""

import re

import pytest

from sppo_jax.fit.targets import GPUS, compile_only_devices
from sppo_jax.hardware import DEVICES, parse_cluster


@pytest.mark.parametrize("name", GPUS)
def test_target_text_is_complete(name):
    text = GPUS[name].text(DEVICES[name].hbm_bytes_s)
    assert text.count("{") == text.count("}") == 2
    assert ("ACCELERATED_FEATURES" in text) == (GPUS[name].capability[0] >= 9)


def test_every_gpu_of_the_planner_has_a_target():
    assert set(GPUS) == {name for name, device in DEVICES.items() if device.platform == "gpu"}
    for name, target in GPUS.items():
        # The planner leaves out what the driver keeps.
        assert 0.9 * target.memory_bytes < DEVICES[name].hbm_bytes < target.memory_bytes


def test_a_cpu_has_no_compiler_of_its_own():
    with pytest.raises(ValueError, match="the cluster of sppo fit must have GPUs or TPUs, got cpu:1x2; name another"):
        compile_only_devices(parse_cluster("cpu:1x2"))


def test_a_missing_compiler_names_the_install_command(monkeypatch):
    from jax.experimental import topologies

    def missing(*args, **kwargs):
        raise RuntimeError("no plugin\nanywhere")

    monkeypatch.setattr(topologies, "get_topology_desc", missing)
    for name, extra in (("h100:1x8", "jax[cuda13]"), ("v5e:2x4", "jax[tpu]")):
        with pytest.raises(
            ValueError, match=re.escape(f"no plugin anywhere; install the compiler with: pip install '{extra}'")
        ):
            compile_only_devices(parse_cluster(name))
