"""The stopwatch for TPUs without a TPU: every part at tiny sizes, its words, and machines that are refused."""

import json
import re

import pytest

from bench import gpu, tpu
from bench.gpu_parts.case import Case, Outcome
from bench.gpu_parts.machine import absent_tpus, choose_tpus
from bench.gpu_parts.report import tables
from bench.gpu_parts.results import Results, read
from bench.gpu_parts.runner import environment, why_not
from bench.tpu_parts import hop, kernel
from sppo_jax.hardware import DEVICES
from sppo_jax.hardware.tpu_chips import REACHED

GIB = 2**30
SLICE = absent_tpus("v5p:2x2x1")


@pytest.mark.slow
def test_tiny_runs_every_part_and_writes_all_results(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "programs"))
    assert tpu.main(["--tiny", "--out", str(tmp_path)]) == 0
    results = read(tmp_path / "tpu_tiny.json")
    assert {outcome.part for outcome in results.outcomes.values()} == set(tpu.PARTS)
    assert [o.reason for o in results.outcomes.values() if o.status != "done"] == []
    assert [(row["cores"], row["way"].partition(",")[0]) for row in results.rows("kernel")] == [
        (cores, way) for cores in (1, 2) for way in ("forward", "backward")
    ]
    assert [row["what"] for row in results.rows("hop")][:3] == [hop.HOP, hop.KERNEL, hop.BOTH]
    (step,) = results.rows("step")
    assert len(step["step_s"]) == 3 and step["plan"]["kernel"] == "pallas" and step["num_chunks"] == 2
    text = (tmp_path / "tpu_tiny.md").read_text()
    assert all(f"## {title}" in text for title in ("The attention kernel", "Hops of a ring", "Host copies"))
    assert text in capsys.readouterr().out


@pytest.mark.parametrize(
    "words, why",
    [
        (["--parts", "kernel,speed"], "--parts takes system, kernel, hop, copies, step, got 'speed'"),
        (["--case", "kernel/1 x 4 heads of 129"], "the nearest is 'kernel/1 x 4 heads of 128'"),
        (["--compile", "h200"], "--compile takes a slice of TPUs such as v5p:2x2x1, got 'h200'"),
        (["--compile", "v5p:2x2x0"], "--compile takes a slice of TPUs such as v5p:2x2x1, got 'v5p:2x2x0'"),
        (["--tiny", "--compile", "v5p:2x2x1"], "got both"),
    ],
)
def test_wrong_words_are_one_line_and_exit_code_2(words, why, capsys, tmp_path):
    assert tpu.main([*words, "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and re.search(why, error)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("listed", ["", "cpu,cpu,8", "gpu,NVIDIA H100,1"])
def test_machines_without_tpus_are_refused(listed):
    with pytest.raises(ValueError, match="the benchmark needs TPUs that no process uses, got "):
        choose_tpus(listed, 100 * GIB)


def test_all_tpus_of_a_machine_are_taken(monkeypatch):
    machine = choose_tpus("tpu,TPU v5,4", 100 * GIB)
    assert (machine.device, machine.platform, machine.others) == ("v5p", "tpu", ("1", "2", "3"))
    case = Case(part="hop", name="a", settings={}, expected_s=1, limit_s=1, devices=4, folder="tpu_parts")
    assert why_not(case, machine) == ""
    assert why_not(case, choose_tpus("tpu,TPU v5 lite,1", GIB)) == "needs 4 devices, this machine has 1 idle"
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    assert "JAX_PLATFORMS" not in environment(case, machine, "run")
    assert environment(case, SLICE, "compile")["JAX_PLATFORMS"] == "cpu"


def test_every_case_has_a_module_and_fits_a_slice():
    cases = gpu.select(gpu.parse([], tpu.TPUS), tpu.TPUS)
    assert [case.part for case in cases] == sorted((case.part for case in cases), key=list(tpu.PARTS).index)
    assert len({case.key for case in cases}) == len(cases) and json.dumps([case.settings for case in cases])
    assert all(why_not(case, SLICE) == "" for case in cases if case.part != "copies")


def test_what_is_charged_is_what_the_planner_charges():
    """A chunk behind a long prefix takes little more than its whole blocks, and one core twice as long as two."""
    settings = kernel.cases(tiny=False)[0].settings
    both, one = (kernel.charged_s(settings, DEVICES["v5p"], cores, "forward") for cores in (2, 1))
    _, pairs = kernel._chunk(settings)
    assert one == 2 * both
    assert 1 < both / (4 * pairs * 4364 / 2**20 / 3.5e9 / REACHED) < 1.2
    assert kernel.charged_s(settings, DEVICES["cpu"], 2, "forward") is None


def test_seconds_stand_beside_what_is_charged(tmp_path):
    results = Results.begin(tmp_path / "r.json", SLICE)
    row = {"what": "1 x 4 heads of 128", "way": "forward, cores: 2", "cores": 2, "seconds": 2e-3, "flops_s": 2e14}
    results.add(Outcome(key="kernel/a", status="done", rows=[row | {"charged_s": 1.5e-3}]))
    hops = [{"what": "hop", "seconds": 1e-3, "bytes_s": 9e10}, {"what": "hidden", "share": 0.9}]
    results.add(Outcome(key="hop/b", status="done", rows=hops))
    compiled = dict.fromkeys(("hbm_bytes", "host_bytes", "flash_calls", "copied_bytes", "exposed_bytes"), 0)
    results.add(Outcome(key="step/c", status="done", rows=[{"program": "step", "compile_s": 1.0} | compiled]))
    text = tables(results, tpu.TPU_SECTIONS)
    assert "HBM is what XLA allocates; host is arguments + outputs + temporaries - aliases." in text
    assert "| 1 x 4 heads of 128, forward, cores: 2 | 2 | 200 | 0.75 |" in text
    assert "| hop/b | hop | 1 | 90 |  |" in text and "| hop/b | hidden |  |  | 90% |" in text
