"""What fit makes of the compiler's figures, and the changes it proposes."""

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from jax.errors import JaxRuntimeError
from test_fit_copies import LOOPS, SLICES

from sppo_jax.cli import main
from sppo_jax.commands.fit import _problem
from sppo_jax.config import config_from_dict, load_config, to_yaml
from sppo_jax.fit.compiled import Fit, Sizes, compile_lowered, compile_plan, variants_of
from sppo_jax.fit.figures import Figures
from sppo_jax.fit.fingerprint import Lowering
from sppo_jax.fit.hlo.copies import HostCopies, LoopWait
from sppo_jax.fit.hlo.hops import RingHops
from sppo_jax.fit.hlo.slices import Slice
from sppo_jax.fit.nearest import nearest_change
from sppo_jax.hardware import parse_cluster, pool_bytes
from sppo_jax.processes.environment import prepare_to_compile
from sppo_jax.search.search import search

GIB = 2**30
# Without this variable a second process that loads libtpu ends.
LOCK = "ALLOW_MULTIPLE_LIBTPU_LOAD"


LOWERING = Lowering(
    fingerprint="0123456789abcdef",
    num_bodies=39,
    kernel_calls=4,
    host_stash_bytes=5,
    versions={"jaxlib": "0.12.0"},
    sources="fedcba9876543210",
)


def fit(hbm=70, host=10, exposed=0, kernel=None) -> Fit:
    return Fit(
        compiler=Sizes(hbm_bytes=hbm * GIB, host_bytes=host * GIB),
        predicted=Sizes(hbm_bytes=69 * GIB, host_bytes=10 * GIB),
        capacity=Sizes(hbm_bytes=79 * GIB, host_bytes=200 * GIB),
        copies=HostCopies(
            overlapped_bytes=(100 - exposed) * GIB,
            exposed_bytes=exposed * GIB,
            kernel_bytes=kernel if kernel is None else kernel * GIB,
            loops_unknown=0,
            together=(),
        ),
        waiting_share=0.0123,
        flash_calls=4,
        lowering=LOWERING,
        compile_s=12.34,
        jax_version="0.12.0",
    )


def test_the_compiler_decides_what_fits():
    assert fit().fits and not fit(hbm=80).fits and not fit(host=201).fits
    assert fit(exposed=3).exposed_share == pytest.approx(0.03)
    values = fit(hbm=80).to_dict()
    assert values["fits"] is False and values["compiler"]["hbm_bytes"] == 80 * GIB
    assert values["host_copies"] == {
        "overlapped_bytes": 100 * GIB,
        "exposed_bytes": 0,
        "kernel_bytes": None,
        "optimizer_bytes": 0,
        "waiting_share": 0.0123,
        "loop_bytes": 0,
        "loops_share": 0.0,
    }
    assert {"predicted", "capacity", "compile_s"} <= set(values) and values["num_bodies"] == 39
    text = fit(exposed=2).describe()
    assert text.endswith("12 s by jax 0.12.0") and values["jax"] == "0.12.0"
    assert "0123456789abcdef, 39 bodies of ticks" in text and values["fingerprint"] == "0123456789abcdef"
    assert "70 GiB" in text and "88.6%" in text
    assert "host copies             100 GiB per step\n" in text and "2.0% of it exposed\n" in text
    assert "longer than the overlapped compute for 1.2% of a step\n" in text
    of_optimizer = replace(fit(exposed=40), copies=replace(fit(exposed=40).copies, optimizer_bytes=40 * GIB))
    assert "40.0% of it exposed, the optimizer's 40.0% included\n" in of_optimizer.describe()
    assert (of_optimizer.exposed_share, of_optimizer.exposed_activations_share) == (0.4, 0.0)
    assert "25.0% of it by kernels on the compute units, the rest by DMA engines\n" in fit(kernel=25).describe()


def test_the_largest_variant_decides_what_fits():
    larger = replace(fit(), variants={"products by cuBLAS": fit(hbm=80), "loops in CUDA graphs": fit(host=12)})
    assert fit().fits and not larger.fits
    assert larger.largest == Sizes(hbm_bytes=80 * GIB, host_bytes=12 * GIB)
    values = larger.to_dict()
    assert values["compiler"]["hbm_bytes"] == 70 * GIB and values["largest"]["hbm_bytes"] == 80 * GIB
    assert values["variants"]["products by cuBLAS"]["compiler"]["hbm_bytes"] == 80 * GIB
    assert set(values["variants"]["loops in CUDA graphs"]) == {"compiler", "host_copies", "compile_s"}
    assert fit().to_dict()["largest"] == fit().to_dict()["compiler"] and fit().to_dict()["variants"] == {}


def test_hops_of_a_ring_are_said_with_what_they_run_beside():
    ring = replace(fit(), hops=RingHops(attention_bytes=6 * GIB, products_bytes=GIB, exposed_bytes=GIB))
    assert "\nring                    8 GiB sent per step: 75.0% beside attention, 12.5% beside" in ring.describe()
    assert ring.to_dict()["ring_hops"]["attention_bytes"] == 6 * GIB
    assert "\nring" not in fit().describe()


def test_loops_that_wait_are_said_with_and_without_graphs():
    waits = replace(fit().copies, loop_waits=(LoopWait("F", 2, 3 * GIB, 0, 0),))
    slow = replace(fit(), copies=waits, loops_share=0.04, variants={"loops in CUDA graphs": fit(hbm=71)})
    text = slow.describe()
    assert "loops wait for the end of writes of 6 GiB per step, which lengthens a step by at most 4.0%\n" in text
    assert "\nloops in CUDA graphs    71 GiB of HBM, 89.9% of the capacity, compiled in 12 s\n" in text
    assert text.count("no loop waits for a write to the host") == 1
    assert slow.to_dict()["host_copies"]["loop_bytes"] == 6 * GIB
    assert (
        "its workspace in a backward is up to 516 MiB, by formula"
        in replace(fit(), workspace_bytes=516 * 2**20).describe()
    )


class Lowered:
    """A program whose compiler takes more memory with other options, and dumps a loop in a command buffer if asked."""

    def __init__(self):
        self.asked = []

    def as_text(self):
        return "module {}"

    def compile(self, compiler_options):
        options = dict(compiler_options)
        self.asked.append(set(options) - {"xla_dump_to"})
        folder = Path(options["xla_dump_to"])
        (folder / "m.thunk_metadata.txt").write_text('profile_annotation: "loop.1"\n    thunk_id: 2\n')
        if "WHILE" in options.get("xla_gpu_enable_command_buffer", ""):
            text = "001: kCommandBuffer [x]\n    002: kWhile [x]\n"
            (folder / "m.thunk_sequence_after_thunk_passes.txt").write_text(text)
        temp = 1000 + 50 * ("xla_gpu_enable_triton_gemm" in options)
        zero = {
            f"{place}{kind}_size_in_bytes": 0 for place in ("", "host_") for kind in ("argument", "output", "alias")
        }
        sizes = SimpleNamespace(**zero, temp_size_in_bytes=temp, host_temp_size_in_bytes=7)
        return SimpleNamespace(memory_analysis=lambda: sizes, as_text=lambda: SLICES + LOOPS)


def test_copies_of_other_rows_do_not_fit():
    wrong = replace(fit(), wrong_slices=(Slice("u16[7,2,8]", False, (32, 0)),))
    assert fit().fits and not wrong.fits and wrong.to_dict()["wrong_slices"] == [
        "reads from u16[7,2,8] at bytes 32, 0"
    ]  # fmt: skip
    assert "got 1 elsewhere (reads from u16[7,2,8] at bytes 32, 0)" in _problem(wrong, None)
    assert "no change" not in _problem(wrong, None) and "no change" in _problem(fit(hbm=80), None)


def test_on_tpus_the_bytes_are_those_that_xla_allocates(tmp_path):
    """`temp_size_in_bytes` of libtpu 0.0.50 is larger. jaxlib 0.10 does not tell what is allocated."""
    compiled = Lowered().compile({"xla_dump_to": str(tmp_path)})
    assert [Figures.of(compiled, platform=name).hbm_bytes for name in ("tpu", "gpu")] == [1000, 1000]
    compiled.memory_analysis().total_allocation_bytes = 700
    assert [Figures.of(compiled, platform=name).hbm_bytes for name in ("tpu", "gpu")] == [700, 1000]
    assert Figures.of(compiled, platform="tpu").host_bytes == 7


def test_variants_are_compiled_once_each(monkeypatch):
    """The loop of the program waits, but not where the option puts the loop into a graph."""
    lowered = Lowered()
    program = SimpleNamespace(lower=lambda: lowered, turn_shares={}, slices=(), lowering=lambda text, cluster: LOWERING)
    monkeypatch.setattr("sppo_jax.fit.lowering.train_program", lambda *_: program)
    monkeypatch.setattr("sppo_jax.fit.targets.compile_only_devices", lambda cluster: [])
    monkeypatch.setattr("sppo_jax.fit.workspace.reserve_workspace", lambda lowered: 5)
    monkeypatch.setattr("sppo_jax.compat.check_offload", lambda *_: None)
    one = config(model__num_layers=2, mesh__pipe=1, mesh__seq=1, sequence__length=2**15, sequence__chunks=4)
    asked = config_from_dict({**one, "hardware": {"cluster": "h100:1x1"}})
    plan, cluster = search(asked).plan, parse_cluster("h100:1x1")
    alone = compile_plan(asked, plan, cluster)
    assert lowered.asked == [set()] and alone.variants == {} and alone.largest.hbm_bytes == 1000
    found = compile_plan(asked, plan, cluster, variants=True)
    assert lowered.asked[1:] == [set(), {"xla_gpu_enable_triton_gemm"}, {"xla_gpu_enable_command_buffer"}]
    assert list(found.variants) == ["products by cuBLAS", "loops in CUDA graphs"]
    assert found.largest == Sizes(hbm_bytes=1050, host_bytes=7) and found.workspace_bytes == 5
    by_name = {name: one.copies.loop_bytes for name, one in found.variants.items()}
    assert found.copies.loop_bytes == 32 and by_name == {"products by cuBLAS": 32, "loops in CUDA graphs": 0}
    assert found.capacity.hbm_bytes == pool_bytes(cluster) < cluster.device.hbm_bytes


def test_variants_are_of_gpus_and_have_graphs_on_one_device():
    assert variants_of("tpu", 1) == {}
    assert list(variants_of("gpu", 1)) == ["products by cuBLAS", "loops in CUDA graphs"]
    assert list(variants_of("gpu", 8)) == ["products by cuBLAS"]


def config(**changes):
    values = {
        "model": {"preset": "llama3-8b"},
        "sequence": {"length": 2**20, "chunks": 64},
        "mesh": {"data": 1, "pipe": 4, "seq": 2},
        "stash": {"inputs": "keep", "attention": "keep", "kv_grad_dtype": "float32"},
        "train": {"steps": 1},
    }
    for name, value in changes.items():
        group, _, key = name.partition("__")
        values[group] = {**values.get(group, {}), key: value}
    return values


def find(tmp_path, cluster, excess=1.0, **changes):
    path = tmp_path / "c.yaml"
    path.write_text(to_yaml(config_from_dict({**config(**changes), "hardware": {"cluster": cluster}})))

    def reload(overrides):
        return load_config(path, overrides)

    return nearest_change(reload, load_config(path), parse_cluster(cluster), excess)


def test_the_nearest_change_unpins_no_more_than_it_must(tmp_path):
    change = find(tmp_path, "h100:1x8")
    assert change.overrides[:2] == ("stash.inputs=auto", "stash.attention=auto")
    assert not any(name.startswith(("mesh", "sequence", "hardware")) for name in change.overrides)
    assert change.hbm_bytes < 79 * GIB and "the nearest change that fits: stash.inputs=auto" in change.describe()


def test_a_compiler_that_asks_for_more_makes_the_change_larger(tmp_path, monkeypatch):
    """Devices count as smaller, and where what fits is half as long, all settings are released and the length falls."""
    plan, sizes = search(config_from_dict({**config(), "hardware": {"cluster": "h100:1x8"}})).plan, []

    def half_fits(changed):
        sizes.append(changed.hardware.hbm_bytes)
        return SimpleNamespace(fits=changed.sequence.length <= 2**19, plan=plan)

    monkeypatch.setattr("sppo_jax.fit.nearest.search", half_fits)
    change = find(tmp_path, "h100:1x8", excess=5)
    smaller = int(parse_cluster("h100:1x8").device.hbm_bytes / (5 * (1 - 0.03)))  # plans leave 3% free already
    assert change.overrides[-2:] == (f"sequence.length={2**19}", f"hardware.hbm_bytes={smaller}")
    assert {"mesh.pipe=auto", "sequence.chunks=auto", "stash.inputs=auto"} <= set(change.overrides)
    assert set(sizes) == {smaller} and len(sizes) > 4


def test_fit_refuses_a_cpu_in_one_line(tmp_path, capsys):
    path = tmp_path / "c.yaml"
    scaled = config(model__rope={"scaling": "yarn", "factor": 128.0, "original_length": 8192})  # no line warns
    path.write_text(to_yaml(config_from_dict({**scaled, "train": {"steps": 1, "devices": "cpu:8"}})))
    assert main(["fit", str(path), "--cluster", "cpu:1x8"]) == 2
    assert "the cluster of sppo fit must have GPUs or TPUs, got cpu:1x8" in capsys.readouterr().err
    assert main(["fit", str(path), "--cluster", "abacus:1x8"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_exposed_copies_are_said_aloud(tmp_path, capsys, monkeypatch):
    path = tmp_path / "c.yaml"
    path.write_text(to_yaml(config_from_dict({**config(), "hardware": {"cluster": "h100:1x8"}})))
    for exposed, lines in ((1, 0), (2, 1)):
        monkeypatch.setattr(
            "sppo_jax.commands.fit.compile_plan", lambda *_, exposed=exposed, **__: fit(exposed=exposed)
        )
        monkeypatch.setattr("sppo_jax.commands.fit.prepare_to_compile", lambda: None)
        assert main(["fit", str(path)]) == 0
        assert capsys.readouterr().err.count("should be exposed (not overlapped with compute), got 2.0%") == lines


@pytest.fixture
def own_environment(monkeypatch):
    """Gives a test an environment that it may change."""
    for name in ("JAX_PLATFORMS", "TPU_SKIP_MDS_QUERY"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv(LOCK, "")
    monkeypatch.delenv(LOCK)
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_autotune_level=4 --xla_gpu_enable_cublaslt=false")


@pytest.mark.parametrize(("own", "then"), [(None, "1"), ("false", "false")])
def test_two_processes_may_load_libtpu_unless_the_user_says_no(own_environment, monkeypatch, own, then):
    if own:
        monkeypatch.setenv(LOCK, own)
    prepare_to_compile()
    assert os.environ[LOCK] == then


def test_a_flag_of_the_user_stays(own_environment, monkeypatch):
    monkeypatch.setattr("sppo_jax.compat.jaxlib_version", lambda: (0, 11, 2))
    prepare_to_compile()
    own = "--xla_gpu_autotune_level=4 --xla_gpu_enable_cublaslt=false"
    assert os.environ["XLA_FLAGS"] == f"{own} --xla_gpu_experimental_gemm_fusion_v2=true"
    assert os.environ["JAX_PLATFORMS"] == "cpu"
    os.environ["XLA_FLAGS"] = "--xla_gpu_experimental_gemm_fusion_v2=false"
    prepare_to_compile()
    assert os.environ["XLA_FLAGS"] == "--xla_gpu_experimental_gemm_fusion_v2=false --xla_gpu_autotune_level=0"


@pytest.mark.parametrize(
    ("place", "version", "refused"), [("host", 10, True), ("host", 12, False), ("keep", 10, False)]
)
def test_fit_refuses_a_jax_that_a_run_refuses(own_environment, tmp_path, capsys, monkeypatch, place, version, refused):
    def reached(*_):
        raise ValueError("the compiler was reached")

    monkeypatch.setattr("sppo_jax.compat.jaxlib_version", lambda: (0, version, 2))
    monkeypatch.setattr("sppo_jax.fit.targets.compile_only_devices", reached)
    path = tmp_path / "c.yaml"
    path.write_text(
        to_yaml(
            config_from_dict(
                config(stash__inputs=place, stash__attention=place, stash__rest="recompute", sequence__length=2**17)
            )
        )
    )
    assert main(["fit", str(path), "--cluster", "h100:4x8"]) == 2
    line = capsys.readouterr().err
    assert ("offload on a GPU needs jaxlib >= 0.11.1" in line) == refused
    assert ("the compiler was reached" in line) != refused


@pytest.mark.parametrize("words", ["No supported config found for HLO", "Failed to get configs for: 19 instructions"])
def test_products_that_need_a_gpu_to_choose_a_kernel_go_to_cublas(words):
    def compile_(compiler_options=None):
        if compiler_options is None:
            raise JaxRuntimeError(f"INTERNAL: {words}")
        return compiler_options

    with pytest.warns(UserWarning, match="all products by cuBLAS"):
        assert compile_lowered(SimpleNamespace(compile=compile_)) == {"xla_gpu_enable_triton_gemm": False}


def test_what_else_the_compiler_refuses_is_not_hidden():
    def compile_():
        raise JaxRuntimeError("RESOURCE_EXHAUSTED")

    with pytest.raises(JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        compile_lowered(SimpleNamespace(compile=compile_))
