"""A run begins with a check of its kernel: when, of which heads, remembered how, and what users read."""

import dataclasses
import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from bad_inputs import check_refused, write_place
from exactness import small_plan
from small_run import SETTINGS

from sppo_jax.attention import check
from sppo_jax.attention.check import PLAIN, CallHeads
from sppo_jax.attention.tpu.pallas import PallasKernel
from sppo_jax.config import ConfigError, config_from_dict
from sppo_jax.train import evaluate_saved, kernel_check, setup
from sppo_jax.train.kernel_check import check_kernels_once, heads_of

GPU = SimpleNamespace(platform="gpu", device_kind="NVIDIA H100 80GB HBM3")
TPU = SimpleNamespace(platform="tpu", device_kind="TPU v5")


def config(**model):
    return config_from_dict({**SETTINGS, "model": {**SETTINGS["model"], "compute_dtype": "bfloat16", **model}})


def plan(**changes):
    return small_plan((8, 8), **{"kernel": "cudnn", **changes})


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine with a GPU; what the check finds there, and the heads that were checked."""
    machine = SimpleNamespace(
        found=None,
        checked=[],
        kernels=[],
        driver="580.126.20",
        cudnn=(9, 28, 1),
        libtpu=(0, 0, 50),
        text="a",
        cache=tmp_path / "cache",
    )

    def find_difference(heads, dtype, *, kernel, **_):
        machine.checked.append(heads)
        machine.kernels.append(kernel)
        if isinstance(machine.found, Exception):
            raise machine.found
        return machine.found

    monkeypatch.setattr(check, "find_difference", find_difference)
    monkeypatch.setattr(kernel_check, "driver_version", lambda: machine.driver)
    monkeypatch.setattr(kernel_check, "cudnn_version", lambda: machine.cudnn)
    monkeypatch.setattr(kernel_check, "libtpu_version", lambda: machine.libtpu)
    monkeypatch.setattr(kernel_check, "_text_hash", lambda: machine.text)
    monkeypatch.setenv("XDG_CACHE_HOME", str(machine.cache))
    return machine


def test_only_a_gpu_that_runs_the_fused_kernel_is_checked(machine):
    machine.found = "all wrong"
    check_kernels_once(config(), plan(), SimpleNamespace(platform="cpu"))
    check_kernels_once(config(), plan(kernel="blockwise"), GPU)
    check_kernels_once(config(check_kernels=False), plan(), GPU)
    assert not machine.checked
    with pytest.raises(ValueError, match="got all wrong on"):
        check_kernels_once(config(), plan(), GPU)


def test_a_difference_is_one_line_that_names_the_call_and_the_way_out(machine):
    machine.found = "dK of the causal triangle off by 31 times what rounding does (2/2 heads of 8, ragged lengths)"
    for _ in range(2):  # what differs is not remembered
        with pytest.raises(ValueError) as line:
            check_kernels_once(config(), plan(), GPU)
        text = str(line.value)
        for part in (machine.found, GPU.device_kind, "cuDNN 9.28.1", "model.kernel=blockwise", "check_kernels=false"):
            assert part in text
        assert "\n" not in text and "pip install 'nvidia-cudnn-cu" in text
    assert len(machine.checked) == 2


def test_a_call_that_fails_is_one_line_too(machine):
    machine.found = jax.errors.JaxRuntimeError("INTERNAL: CUDNN_STATUS_NOT_SUPPORTED\nin a graph")
    with pytest.raises(
        ValueError, match=r"a failure of a call \(2/2 heads of 8\): INTERNAL: CUDNN_S.* in a graph on NV"
    ):
        check_kernels_once(config(), plan(), GPU)


def test_what_passed_is_remembered_for_device_driver_libraries_and_heads(machine):
    def again(**model):
        before = len(machine.checked)
        check_kernels_once(config(**model), plan(), machine.gpu)
        return len(machine.checked) > before

    machine.gpu = GPU
    assert again() and not again()
    machine.driver = "590.1"
    assert again() and not again()
    machine.cudnn = (9, 29, 0)
    assert again() and not again()
    machine.gpu = SimpleNamespace(platform="gpu", device_kind="NVIDIA B200")
    assert again() and not again()
    assert again(head_dim=16) and not again(head_dim=16)
    machine.driver = "580.126.20"
    machine.cudnn, machine.gpu = (9, 28, 1), GPU
    assert not again()


LONG = (4096, 8192)


def on_tpu(**changes):
    return small_plan(changes.pop("chunks", LONG), **{"kernel": "pallas", **changes})


def test_the_kernel_for_tpus_is_checked_with_the_blocks_of_the_longest_chunk(machine):
    check_kernels_once(config(head_dim=128), on_tpu(kernel="blockwise"), TPU)
    check_kernels_once(config(head_dim=128), on_tpu(), GPU)
    check_kernels_once(config(head_dim=128, check_kernels=False), on_tpu(), TPU)
    assert not machine.checked
    model = dict(num_heads=8, num_kv_heads=2, head_dim=128)
    check_kernels_once(config(**model), on_tpu(), TPU)
    check_kernels_once(config(**model, sliding_window=512), on_tpu(mesh=(1, 1, 2), kind="ring"), TPU)
    # 4096 rows of 4 heads are 1024 queries: two blocks of these, and three of 512 keys.
    assert machine.checked == [(8, 2, 128)] * 2 and {kernel.extent[:2] for kernel in machine.kernels} == {(2048, 1536)}
    check_kernels_once(config(**model), on_tpu(chunks=(256, 256)), TPU)
    assert machine.kernels[-1].extent[:2] == (512, 768)


def test_many_heads_for_tpus_are_checked_as_few(machine):
    for num_kv_heads, want in ((8, (16, 8, 128)), (32, (16, 8, 128)), (9, (14, 7, 128))):
        model = config(num_heads=2 * num_kv_heads, num_kv_heads=num_kv_heads, head_dim=128)
        check_kernels_once(model, on_tpu(), TPU)
        assert machine.checked[-1] == want


def test_a_difference_on_a_tpu_names_libtpu_and_the_way_out(machine):
    machine.found = "dK of the causal triangle off by 31 times what rounding does (2/2 heads of 128, ragged lengths)"
    with pytest.raises(ValueError) as line:
        check_kernels_once(config(head_dim=128), on_tpu(), TPU)
    text = str(line.value)
    for part in (machine.found, "TPU v5 with libtpu 0.0.50;", "model.kernel=blockwise", "model.check_kernels=false"):
        assert part in text
    assert "\n" not in text and "cuDNN" not in text


def test_what_passed_on_a_tpu_is_remembered_for_device_libtpu_and_the_text_of_the_kernel(machine):
    def again():
        before = len(machine.checked)
        check_kernels_once(config(head_dim=128), on_tpu(), machine.tpu)
        return len(machine.checked) > before

    machine.tpu = TPU
    assert again() and not again()
    for name, value in (
        ("libtpu", (0, 0, 52)),
        ("text", "b"),
        ("tpu", SimpleNamespace(**{**vars(TPU), "device_kind": "TPU v6 lite"})),
    ):
        setattr(machine, name, value)
        assert again() and not again()


def test_the_kernel_for_tpus_that_a_cpu_interprets_is_checked(monkeypatch, tmp_path):
    monkeypatch.setitem(kernel_check._PLATFORMS, "pallas", ("cpu",))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked, device = config(num_heads=2, num_kv_heads=1, head_dim=128), jax.local_devices()[1]
    check_kernels_once(asked, on_tpu(chunks=(128, 128)), device)
    (note,) = (tmp_path / "sppo_jax" / "kernels").iterdir()
    assert json.loads(note.read_text())["device"] == "cpu"
    note.unlink()
    gradient = PallasKernel.gradient
    monkeypatch.setattr(PallasKernel, "gradient", lambda kernel, dq: gradient(kernel, dq + 1))
    with pytest.raises(ValueError, match=r"by the kernel for TPUs must agree with plain attention, got dQ of the rect"):
        check_kernels_once(asked, on_tpu(chunks=(128, 128)), device)


@pytest.mark.parametrize("text", ["", "{", "[]", json.dumps({"check": 0})])
def test_a_file_that_cannot_be_read_is_ignored_and_replaced(text, machine):
    check_kernels_once(config(), plan(), GPU)
    (note,) = (machine.cache / "sppo_jax" / "kernels").iterdir()
    whole = note.read_text()
    note.write_text(text)
    check_kernels_once(config(), plan(), GPU)
    assert len(machine.checked) == 2 and note.read_text() == whole
    assert [path.name for path in note.parent.iterdir()] == [note.name]


def test_without_a_cache_each_run_checks(machine):
    machine.cache.write_text("a file")
    for _ in range(2):
        check_kernels_once(config(), plan(), GPU)
    assert len(machine.checked) == 2


@pytest.mark.parametrize(
    "changes,want",
    [
        ({}, [(8, 2, 16)]),
        ({"mesh": (1, 1, 2)}, [(4, 1, 16)]),
        ({"mesh": (1, 1, 4)}, [(2, 1, 16)]),  # a copy of a key head for every two members
        ({"mesh": (1, 1, 4), "kind": "ring"}, [(8, 2, 16)]),
        ({"mesh": (1, 1, 4), "groups": "flex"}, [(2, 1, 16), (8, 2, 16)]),
        ({"mesh": (1, 1, 4), "kind": "ring", "groups": "flex"}, [(8, 2, 16)]),
    ],
)
def test_the_heads_are_those_of_a_device(changes, want):
    model = config(num_heads=8, num_kv_heads=2, head_dim=16).model
    assert heads_of(model, plan(**changes)) == [CallHeads(*each) for each in want]


def test_the_check_itself_runs_on_a_device_of_this_process(monkeypatch):
    monkeypatch.setattr(check, "NUM_QUERIES", 8)
    monkeypatch.setattr(check, "NUM_KEYS", 12)
    monkeypatch.setattr(check, "PATTERNS", {"few": check.Pattern((5, 9), (5, 4), 0.0)})
    device, drawn, draw = jax.local_devices()[3], [], check._draw
    monkeypatch.setattr(check, "_draw", lambda *asked: drawn.append(draw(*asked)) or drawn[-1])
    assert check.find_difference(CallHeads(2, 1, 8), jnp.bfloat16, kernel=PLAIN, devices=[device]) is None
    assert len(drawn) == 2 and all(x.devices() == {device} for x in jax.tree.leaves(drawn))


def test_an_evaluation_without_the_check_keeps_its_plan():
    assert evaluate_saved._plans_anew(["model.kernel=blockwise"])
    assert not evaluate_saved._plans_anew(["model.check_kernels=false"])


@pytest.fixture
def place(tmp_path, monkeypatch):
    write_place(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_run_whose_kernel_is_wrong_does_not_begin(place, capfd, machine, monkeypatch, tmp_path_factory):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))  # documents are tokenized before
    machine.found = "dV of the rectangle that is no number"

    def as_on_a_gpu(config, plan, device):
        check_kernels_once(config, dataclasses.replace(plan, kernel="cudnn"), GPU)

    monkeypatch.setattr(setup, "check_kernels_once", as_on_a_gpu)
    check_refused(
        "train c.yaml --run-dir run", "got dV of the rectangle that is no number on NVIDIA H100", place, capfd
    )
    with pytest.raises(ConfigError, match="check_kernels"):
        config(check_kernels="perhaps")
