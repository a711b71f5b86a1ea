"""The GPUs of a machine as a process sees them: how many, which, and what memory they have."""

import pytest
from gpu_machines import GiB, machine

from sppo_jax.hardware import DEVICES, num_gpus, visible_gpus
from sppo_jax.hardware.present import Gpu, present_device

H100 = ("NVIDIA H100 80GB HBM3", 81559)


@pytest.mark.parametrize(
    "visible, chosen",
    [
        (None, [0, 1, 2, 3]),
        ("0,1", [0, 1]),
        (" 3 , 1 ", [3, 1]),
        ("GPU-22aa", [2]),
        ("GPU-33aa-bb,GPU-0", [3, 0]),
        ("1,-1,2", [1]),  # CUDA stops at what names nothing
        ("0,9,1", [0]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
    ],
)
def test_visible_devices_are_read_as_cuda_reads_them(tmp_path, visible, chosen):
    environ = machine(tmp_path, *[H100] * 4)
    if visible is not None:
        environ["CUDA_VISIBLE_DEVICES"] = visible
    assert [gpu.uuid for gpu in visible_gpus(environ)] == [f"GPU-{k}{k}aa-bb" for k in chosen]
    assert num_gpus(environ) == len(chosen)


@pytest.mark.parametrize(
    "visible, words",
    [
        ("7", "name GPUs of this machine, got '7' on one with 4 GPUs; correct"),
        ("GPU-77", "got 'GPU-77' on one with 4 GPUs"),
        ("MIG-1", "got 'MIG-1' on one without slices that nvidia-smi lists"),
        ("1,1", "name each GPU once, got '1,1'"),
    ],
)
def test_lists_of_no_gpu_are_refused_in_one_line(tmp_path, visible, words):
    environ = machine(tmp_path, *[H100] * 4) | {"CUDA_VISIBLE_DEVICES": visible}
    with pytest.raises(ValueError, match=f"^CUDA_VISIBLE_DEVICES must .*{words}") as error:
        visible_gpus(environ)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "name, total_mib, known, gib",
    [
        (*H100, "h100", 79),  # the table's figure: a plan for this machine is the plan for h100:1x1
        ("NVIDIA A100-SXM-64GB", 65536, "a100-80g", 63.4),
        ("NVIDIA A100-SXM4-80GB", 81920, "a100-80g", 79),
        ("NVIDIA H20-3e", 144384, "h20", 140.4),
        ("NVIDIA GH200 144G HBM3e", 147456, "gh200", 143.4),
        ("NVIDIA A40-24Q", 24576, "a40", 23.4),
    ],
)
def test_memory_is_that_of_the_device_present(tmp_path, name, total_mib, known, gib):
    (gpu,) = visible_gpus(machine(tmp_path, (name, total_mib)))
    assert gpu.memory_bytes == (total_mib - 600) * 2**20
    device = present_device(DEVICES[known], gpu)
    assert device.name == known and device.hbm_bytes == pytest.approx(gib * GiB, rel=1e-3)
    assert device.matmul_flops_s == DEVICES[known].matmul_flops_s


@pytest.mark.parametrize(
    "visible, profile",
    [
        (None, "3g.40gb"),
        ("0", "3g.40gb"),
        ("MIG-01cc-dd", "1g.10gb"),
        ("MIG-01", "1g.10gb"),
        ("MIG-02cc-dd,MIG-00cc-dd", "1c.2g.20gb"),  # a process sees the first slice alone
        ("GPU-00aa-bb", "3g.40gb"),
    ],
)
def test_a_slice_has_its_own_memory_and_part_of_the_speed(tmp_path, visible, profile):
    environ = machine(tmp_path, H100, slices={0: ["3g.40gb", "1g.10gb", "1c.2g.20gb", "1g.10gb+me"]})
    if visible is not None:
        environ["CUDA_VISIBLE_DEVICES"] = visible
    (gpu,) = visible_gpus(environ)
    parts, size = int(profile.split("g.")[0][-1]), int(profile.split(".")[-1][:-2])
    device = present_device(DEVICES["h100"], gpu)
    assert 0.94 * size * GiB < device.hbm_bytes < size * GiB
    assert device.matmul_flops_s == pytest.approx(989e12 * parts / 7)
    assert device.hbm_bytes_s == pytest.approx(3.35e12 * device.hbm_bytes / (79 * GiB))
    assert device.attention_rows == int(128 * 132 * parts / 7)


def test_whole_gpus_come_before_slices(tmp_path):
    environ = machine(tmp_path, H100, H100, slices={0: ["1g.10gb"]})
    assert [gpu.uuid for gpu in visible_gpus(environ)] == ["GPU-11aa-bb"]


def test_cuda_counts_the_fastest_first_unless_it_is_told_to_count_by_bus(tmp_path):
    environ = machine(tmp_path, ("NVIDIA T400 4GB", 4096), ("NVIDIA A100-SXM4-80GB", 81920))
    for order, first in (({}, "A100"), ({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, "T400")):
        (gpu,) = visible_gpus(environ | order | {"CUDA_VISIBLE_DEVICES": "0"})
        assert first in gpu.name


def test_jax_may_see_fewer(tmp_path):
    environ = machine(tmp_path, *[H100] * 4) | {"CUDA_VISIBLE_DEVICES": "1,2,3"}
    assert [gpu.uuid[4] for gpu in visible_gpus(environ | {"JAX_CUDA_VISIBLE_DEVICES": "2,0"})] == ["3", "1"]


def test_no_driver_is_not_no_gpu(tmp_path):
    assert visible_gpus({"PATH": str(tmp_path)}) is None and num_gpus({"PATH": str(tmp_path)}) is None


def test_the_drivers_files_count_where_nvidia_smi_is_missing_or_broken(tmp_path, monkeypatch):
    from sppo_jax.hardware import present

    folder = tmp_path / "gpus"
    for number in (1, 0):
        (folder / f"0000:0{number}:00.0").mkdir(parents=True)
        text = f"Model: \t\t NVIDIA L40S\nIRQ:   \t 98\nGPU UUID: \t GPU-{number}{number}aa\n"
        (folder / f"0000:0{number}:00.0" / "information").write_text(text)
    assert present._of_driver(folder) == tuple(
        Gpu(name="NVIDIA L40S", uuid=f"GPU-{k}{k}aa", memory_bytes=None) for k in (0, 1)
    )
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "nvidia-smi").write_text("#!/bin/sh\necho Driver/library version mismatch\nexit 18\n")
    (broken / "nvidia-smi").chmod(0o755)
    own = present._of_driver
    monkeypatch.setattr(present, "_of_driver", lambda _: own(folder))
    environ = {"PATH": f"{broken}:/bin"}
    assert num_gpus(environ) == 2 and num_gpus(environ | {"CUDA_VISIBLE_DEVICES": "GPU-11"}) == 1
    with pytest.raises(ValueError, match="got 'MIG-1' on one without slices that nvidia-smi lists"):
        visible_gpus(environ | {"CUDA_VISIBLE_DEVICES": "MIG-1"})
    assert present_device(DEVICES["l40s"], visible_gpus(environ)[0]) == DEVICES["l40s"]
