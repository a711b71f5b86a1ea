"""Names of accelerators, and the devices of this machine."""

import pytest
from gpu_machines import machine

from sppo_jax.cli import main
from sppo_jax.hardware import DEVICES, find_device, local_cluster, make_cluster


@pytest.mark.parametrize(
    "name, known",
    [
        ("h200", "h200"),
        (" H200 ", "h200"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H200 NVL", "h200-nvl"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA H800", "h800"),
        ("NVIDIA H20", "h20"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA A100-SXM4-40GB", "a100-40g"),
        ("NVIDIA A100-SXM4-80GB", "a100-80g"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie"),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", "a100-80g"),
        ("NVIDIA A800-SXM4-80GB", "a800-80g"),
        ("NVIDIA A10", "a10"),
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA A30", "a30"),
        ("NVIDIA A40", "a40"),
        ("NVIDIA RTX A6000", "a6000"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40", "l40"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GeForce RTX 3090", "rtx-3090"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA GeForce RTX 5090", "rtx-5090"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA B300 SXM6 AC", "b300"),
        ("TPU v5 lite", "v5e"),
        ("v5litepod-16", "v5e"),
        ("TPU v5", "v5p"),
        ("TPU v4", "v4"),
        ("cpu", "cpu"),
        ("TPU v6 lite", "v6e"),
        ("v6e-8", "v6e"),
        ("TPU7x", "tpu7x"),
        ("tpu7x-8", "tpu7x"),
    ],
)
def test_devices_are_found_by_their_own_names(name, known):
    assert find_device(name) == DEVICES[known]


UNKNOWN = [
    "Tesla V100-SXM2-32GB",
    "NVIDIA RTX A4000",  # not an A40
    "Quadro RTX 6000",  # nor an Ada
    "NVIDIA GeForce RTX 4090 Laptop GPU",
    "NVIDIA GeForce RTX 4090 D",
    "NVIDIA GB10",
    "NVIDIA Graphics Device",
]


@pytest.mark.parametrize("name", ["abacus", "TPU8i", *UNKNOWN])
def test_an_unknown_device_names_the_known_ones_and_the_keys_to_give(name):
    with pytest.raises(ValueError, match=f"^unknown device '{name}', none of cpu, a100-40g.*; set hardware") as error:
        find_device(name)
    for key in ("hardware.cluster", "hardware.hbm_bytes", "hardware.matmul_flops_s", "JAX_PLATFORMS=cpu"):
        assert key in str(error.value)
    assert "\n" not in str(error.value)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Puts the process on a machine with GPUs that are not here."""

    def put(*gpus, slices=None, **environ):
        for name in ("JAX_PLATFORMS", "TPU_ACCELERATOR_TYPE", "CUDA_VISIBLE_DEVICES"):
            monkeypatch.delenv(name, raising=False)
        for name, value in (machine(tmp_path, *gpus, slices=slices) | environ).items():
            monkeypatch.setenv(name, value)

    return put


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_machine_with_an_unknown_gpu_is_not_planned_for_as_a_cpu(here, name):
    here((name, 16384))
    with pytest.raises(ValueError, match=f"unknown device '{name}', none of"):
        local_cluster()


def test_the_devices_of_this_machine_are_those_that_a_run_would_take(here):
    here(*[("NVIDIA L40S", 46068)] * 10, CUDA_VISIBLE_DEVICES="2,3,4")
    assert (local_cluster().name, local_cluster().device) == ("l40s:1x3", DEVICES["l40s"])


def test_a_host_may_have_more_devices_than_usual(here):
    here(*[("NVIDIA L40S", 46068)] * 10)
    assert local_cluster().name == "l40s:1x10"


def test_a_hidden_gpu_leaves_the_cpu(here):
    here(("NVIDIA H200", 143771), CUDA_VISIBLE_DEVICES="")
    assert local_cluster() == make_cluster(DEVICES["cpu"])


def test_gpus_of_two_kinds_are_refused_and_may_be_chosen_from(here, monkeypatch):
    here(("NVIDIA DGX Display", 4096), *[("NVIDIA A100-SXM4-80GB", 81920)] * 2)
    with pytest.raises(
        ValueError, match="of one kind, got NVIDIA A100-SXM4-80GB, NVIDIA DGX Display; set CUDA_VISIBLE"
    ):
        local_cluster()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert local_cluster().name == "a100-80g:1x2"


def test_a_machine_told_to_use_its_cpu_is_one(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v5litepod-4")
    assert local_cluster() == make_cluster(DEVICES["cpu"])


CONFIG = """
model: {vocab_size: 512, hidden_size: 256, num_layers: 4, num_heads: 4, mlp_size: 512}
sequence: {length: 4096}
train: {steps: 1}
"""


def test_plans_are_for_the_memory_that_is_there(here, tmp_path, capfd):
    (tmp_path / "c.yaml").write_text(CONFIG)
    seen = []
    for name, total_mib, slices in (
        ("NVIDIA A100-SXM4-80GB", 81920, None),
        ("NVIDIA A100-SXM-64GB", 65536, None),
        ("NVIDIA A100-SXM4-80GB", 81920, {0: ["2g.20gb"]}),
    ):
        place = tmp_path / str(len(seen))
        place.mkdir()
        here((name, total_mib), slices=slices, PATH=machine(place, (name, total_mib), slices=slices)["PATH"])
        assert main(["plan", str(tmp_path / "c.yaml")]) == 0
        seen.append(capfd.readouterr().out)
    for text, gib in zip(seen, ("of 79 GiB", "of 63.4 GiB", "of 19 GiB"), strict=True):
        assert gib in text, text


def test_an_unknown_gpu_is_planned_for_by_the_figures_that_are_given(here, tmp_path, capfd):
    (tmp_path / "c.yaml").write_text(CONFIG)
    here(("Tesla V100-SXM2-32GB", 32768))
    assert main(["plan", str(tmp_path / "c.yaml")]) == 2
    error = capfd.readouterr().err
    assert error.count("\n") == 1 and "Tesla V100-SXM2-32GB" in error and "hardware.hbm_bytes" in error
    figures = ["hardware.hbm_bytes=34000000000", "hardware.matmul_flops_s=8e13", "hardware.link_bytes_s=1e11"]
    assert main(["plan", str(tmp_path / "c.yaml"), "hardware.cluster=a100-40g:1x1", *figures]) == 0
