"""The GPU benchmark without a GPU: every part at tiny sizes, cases that die, and what is refused."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench import gpu
from bench.flex_counts import count_pairs
from bench.gpu_parts import exact, flex, overlap, probe, report
from bench.gpu_parts.aims import aim_rows
from bench.gpu_parts.case import Case, Outcome
from bench.gpu_parts.child import PARTS
from bench.gpu_parts.machine import Machine, choose_gpu, cpu_machine
from bench.gpu_parts.program import Target
from bench.gpu_parts.results import Results, read
from bench.gpu_parts.runner import environment, run_case, why_not
from sppo_jax.flex.contract import check_columns, far_cells
from sppo_jax.flex.shape import plan_shape
from sppo_jax.hardware import DEVICES
from sppo_jax.search.make import make_plan

GIB = 2**30
H200 = Machine(device="h200", description="NVIDIA H200", driver="580", hbm_bytes=140 * GIB, host_bytes=120 * GIB)


def case(name="a", **changes) -> Case:
    return Case(**{"part": "step", "name": name, "settings": {}, "expected_s": 1.0, "limit_s": 20.0, **changes})


@pytest.mark.slow
def test_tiny_runs_every_part_and_writes_all_results(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "programs"))
    assert gpu.main(["--tiny", "--out", str(tmp_path)]) == 0
    results = read(tmp_path / "gpu_tiny.json")
    assert {outcome.part for outcome in results.outcomes.values()} == set(PARTS)
    assert [o.reason for o in results.outcomes.values() if o.status != "done"] == []
    assert all(outcome.rows for outcome in results.outcomes.values())
    assert all(row["ok"] for row in results.rows("exact")) and len(results.rows("exact")) >= 6
    assert [(row["what"], row["ok"]) for row in results.rows("flex")] == [
        ("groups=flex", True),
        ("groups=static", True),
    ]
    step = next(row for row in results.rows("step") if "step_s" in row)
    assert len(step["step_s"]) == 3 and len(step["loss"]) == 4 and step["num_chunks"] == 4
    assert [row["what"] for row in results.rows("probe")] == [*probe.LOOPS, "waits"] * 2
    assert len(results.rows("system")) > 10 and results.rows("pool")[0]["asked_bytes"] == 4 * 64 * 64 * 2
    assert {row["framework"] for row in results.rows("peer")} == {"torch", "jax"}
    text = (tmp_path / "gpu_tiny.md").read_text()
    assert all(
        f"## {title}" in text
        for title in (
            "Ceilings",
            "Comparisons",
            "Attention",
            "The gated delta rule",
            "Train steps",
            "Peers",
            "Flexible teams",
        )
    )
    assert text in capsys.readouterr().out
    assert (tmp_path / "gpu_tiny.svg").read_text().startswith("<svg")


def dying(script: str):
    """Make commands that run a script in the place of a case; FILE is where its rows go."""

    def make(spec: Path) -> list[str]:
        rows = json.loads(spec.read_text())["rows"]
        return [sys.executable, "-c", f"FILE = {rows!r}\nopen(FILE, 'w').write('{{\"x\": 1}}\\n')\n{script}"]

    return make


@pytest.mark.parametrize(
    "script, reason",
    [
        ("import os; os.kill(os.getpid(), 9)", "killed by SIGKILL; perhaps the host's memory ran out"),
        ("import os; os.kill(os.getpid(), 11)", "killed by SIGSEGV"),
        ("raise MemoryError('no more')", "out of memory: MemoryError: no more"),
        ("print('RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes'); 1 / 0", "out of memory: RESOURCE_EXHAUSTED"),
        ("raise ValueError('this\\nand that')", "ValueError: this"),
        ("import sys; sys.exit(3)", "exit code 3 without a word"),
        ("import time; time.sleep(60)", "took longer than 1 s and was killed"),
    ],
)
def test_a_case_that_dies_leaves_its_rows_and_a_reason(script, reason):
    outcome = run_case(case(limit_s=1.0 if "sleep" in script else 20.0), H200, "run", make_command=dying(script))
    assert outcome.status == "failed" and outcome.reason.startswith(reason) and outcome.rows == [{"x": 1}]


def test_a_case_that_dies_costs_no_other_case(tmp_path, capsys):
    def run(case, machine, mode, *, limit_s):
        script = "import os; os.kill(os.getpid(), 9)" if case.name == "b" else ""
        return run_case(case, machine, mode, limit_s=limit_s, make_command=dying(script))

    cases, path = [case("a"), case("b"), case("c")], tmp_path / "r.json"
    assert (
        gpu.run_cases(cases, H200, "run", Results.begin(path, H200), dict.fromkeys(c.key for c in cases), run=run) == []
    )
    assert [o.status for o in read(path).outcomes.values()] == ["done", "failed", "done"]
    assert "[2/3] step/b failed: killed by SIGKILL" in capsys.readouterr().out
    assert "| step/b | failed | killed by SIGKILL" in report.tables(read(path))


def test_results_of_another_machine_are_not_joined(tmp_path):
    path = tmp_path / "r.json"
    Results.begin(path, H200).add(Outcome(key="step/a", status="done"))
    with pytest.raises(ValueError, match="joins calls on one machine, got the device .* after NVIDIA H200"):
        Results.resume(path, cpu_machine())
    path.write_text("{}")
    with pytest.raises(ValueError, match="needs results that this benchmark wrote"):
        Results.resume(path, H200)


def test_cases_that_cannot_run_say_why():
    assert (
        why_not(case(packages=("no_such_package",)), H200)
        == "needs the package no_such_package, which is not installed"
    )
    assert why_not(case(hbm_gib=200), H200) == "needs 200 GiB of device memory, this machine has 140.0"
    assert why_not(case(host_gib=121), H200) == "needs 121 GiB of host memory, this machine has 120.0"
    assert why_not(case(packages=("json",), hbm_gib=139, host_gib=100), H200) == ""
    assert why_not(case(devices=2), H200) == "needs 2 devices, this machine has 1 idle"
    assert why_not(case(devices=2), replace(H200, others=("3",))) == ""
    assert why_not(case(devices=8), cpu_machine()) == ""  # simulated


@pytest.mark.parametrize(
    "listed, visible, why",
    [
        ("", None, "got none"),
        ("0, NVIDIA H200, 143771, 3, 580", "1", "got none"),
        ("0, NVIDIA H200, 143771, 9000, 580", None, "got NVIDIA H200 with 8.8 GiB in use"),
        ("0, NVIDIA H200, 8000, 3, 580", None, "16 GiB of device memory, got 7.8 GiB"),
        ("0, Tesla K80, 80000, 3, 580", None, "unknown device"),
    ],
)
def test_machines_on_which_nothing_can_run_are_refused(listed, visible, why):
    with pytest.raises(ValueError, match=why):
        choose_gpu(listed, visible, 120 * GIB)


def test_the_first_idle_gpu_is_taken():
    listed = "0, NVIDIA H200, 143771, 9000, 580.1\n1, NVIDIA H200, 143771, 4, 580.1"
    machine = choose_gpu(listed, None, 120 * GIB)
    assert (machine.index, machine.device, machine.driver) == ("1", "h200", "580.1")
    with pytest.raises(ValueError, match="24 GiB of host memory, got 8.0 GiB"):
        choose_gpu(listed, "1", 8 * GIB)


def test_a_case_of_several_devices_sees_idle_gpus_of_one_kind():
    used = ((1, "NVIDIA H200", 4), (2, "NVIDIA H200", 9000), (3, "NVIDIA H100", 4), (5, "NVIDIA H200", 4))
    listed = "\n".join(f"{index}, {name}, 143771, {mib}, 580.1" for index, name, mib in used)
    machine = choose_gpu(listed, None, 120 * GIB)
    assert (machine.index, machine.others) == ("1", ("5",))
    seen = [environment(case(devices=count), machine, "run")["CUDA_VISIBLE_DEVICES"] for count in (1, 2)]
    assert seen == ["1", "1,5"]
    flags = [environment(case(devices=count), cpu_machine(), "run")["XLA_FLAGS"] for count in (1, 4)]
    assert ["device_count=4" in own for own in flags] == [False, True]


def test_the_rows_of_part_flex_have_team_and_stream_cells():
    for own in flex.cases(tiny=False):
        target = Target(DEVICES["h200"], (None,) * own.devices)
        plan = make_plan(flex._config(own.settings, target, "flex"), target.cluster)
        batches, shape = flex.placed_batches(own.settings, plan), plan_shape(plan)
        check_columns(batches["flex"], shape, dealing=True)
        far = far_cells(batches["flex"]["document_ids"], shape)[0]
        assert far.any() and not far.all()
        assert count_pairs(batches["flex"], shape).sum() == count_pairs(batches["static"], shape).sum()


@pytest.mark.parametrize(
    "words, why",
    [
        (["--parts", "exact,speed"], "--parts takes system, exact, .*, got 'speed'"),
        (["--case", "step/1B at 32k, kept"], "got 'step/1B at 32k, kept'; the nearest is 'step/1B at 32K, kept'"),
        (["--within", "0"], "--within must be more than 0, got 0"),
        (["--within", "nan"], "--within must be more than 0, got nan"),
        (["--tiny", "--compile", "h200"], "got both"),
        (["--compile", "tpu"], "--compile takes one of a100-40g, .*, got 'tpu'"),
        ([], "the benchmark needs one idle GPU, got none"),
    ],
)
def test_wrong_words_are_one_line_and_exit_code_2(words, why, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))  # no nvidia-smi
    assert gpu.main([*words, "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and __import__("re").search(why, error)
    assert list(tmp_path.iterdir()) == []


def test_a_part_whose_package_is_missing_is_refused(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(gpu, "why_not", lambda case, machine: "needs the package torch, which is not installed")
    assert gpu.main(["--tiny", "--case", "peer/torch, tiny", "--out", str(tmp_path)]) == 2
    assert "peer/torch, tiny, which needs the package torch" in capsys.readouterr().err


def test_a_wrong_kernel_fails_its_comparison(monkeypatch):
    from bench.gpu_parts.program import target_here
    from sppo_jax.attention.spreading import sequence

    right = sequence.backward

    def wrong(*arguments):
        dq, sums = right(*arguments)
        return dq * 1.05, sums

    settings, rows = exact.cases(tiny=True)[0].settings | {"patterns": ["packed documents"]}, []
    monkeypatch.setattr(sequence, "backward", wrong)
    exact.run(settings, target_here("cpu").device.name, rows.append)
    assert [(row["ok"], row["worst"]) for row in rows] == [(False, "dq")] * 2


@pytest.mark.parametrize("errors, untouched, ok", [((0.01, 0.01), True, True), ((0.03, 0.01), True, False)])
def test_an_error_may_be_twice_that_of_dense_bfloat16(errors, untouched, ok):
    got = dict.fromkeys(exact.NAMES, errors[1]) | {"dv": errors[0]}
    bounds = dict.fromkeys(exact.NAMES, 0.01)
    assert exact._row("x", got, bounds, untouched)["ok"] is ok
    assert exact._row("x", got, bounds, False)["ok"] is False
    assert exact._row("x", got | {"dq": float("nan")}, bounds, True)["ok"] is False


def test_failed_comparisons_are_the_exit_code(tmp_path):
    results = Results.begin(tmp_path / "r.json", H200)
    results.add(Outcome(key="exact/a", status="done", rows=[{"what": "kept, twice", "ok": True, "bitwise": True}]))
    assert report.failed_comparisons(results) == []
    row = {"what": "host", "ok": False, "bitwise": True, "differing": {"loss": 0.5}}
    results.add(Outcome(key="exact/b", status="done", rows=[row]))
    results.add(Outcome(key="exact/c", status="failed", reason="killed by SIGSEGV"))
    wrong = {
        "what": "groups=flex",
        "ok": False,
        "worst": "loss",
        "times_dense": 9.0,
        "step_s": [1.0],
        "tokens_per_s": 1,
    }
    results.add(Outcome(key="flex/d", status="done", rows=[wrong]))
    results.add(Outcome(key="flex/e", status="skipped", reason="needs 8 devices, this machine has 1 idle"))
    assert report.failed_comparisons(results) == ["exact/b: host", "flex/d: groups=flex", "exact/c"]
    assert "| host | NO | 0.5 of its size, in loss; 1 arrays differ |" in report.tables(results)


def test_a_trace_is_read_by_the_streams_of_its_gpu():
    def named(kind, pid, tid, name):
        return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}

    trace = [
        named("process_name", 1, 0, "/device:GPU:0"),
        named("process_name", 2, 0, "/host:CPU"),
        named("thread_name", 1, 7, "Stream #7(Compute)"),
        named("thread_name", 1, 8, "Stream #8(MemcpyD2H)"),
        named("thread_name", 1, 9, "XLA Ops"),
        named("thread_name", 2, 7, "Stream of thoughts"),
        {"ph": "X", "pid": 1, "tid": 7, "ts": 0, "dur": 100, "name": "gemm"},
        {"ph": "X", "pid": 1, "tid": 8, "ts": 50, "dur": 100, "name": "MemcpyD2H"},
        {"ph": "X", "pid": 1, "tid": 7, "ts": 190, "dur": 10, "name": "fmha"},
        {"ph": "X", "pid": 1, "tid": 9, "ts": 0, "dur": 500, "name": "whole module"},
        {"ph": "X", "pid": 2, "tid": 7, "ts": 0, "dur": 500, "name": "dispatch"},
    ]
    found = overlap.analyse(list(overlap.device_events(trace)))
    assert (found["traced_s"], found["kernels_s"], found["copies_s"]) == pytest.approx((200e-6, 110e-6, 100e-6))
    assert found["copies_beside_kernels"] == pytest.approx(0.5)
    assert (found["idle_beside_copies_s"], found["idle_alone_s"]) == pytest.approx((50e-6, 40e-6))
    assert [item["name"] for item in found["longest"]] == ["gemm", "MemcpyD2H", "fmha"]


def test_intervals_agree_with_counting_each_moment():
    rng = np.random.default_rng(0)
    for _ in range(50):
        sides = [[(int(b), int(b + d)) for b, d in rng.integers(1, 20, (6, 2))] for _ in range(2)]
        a, b = (overlap.union(side) for side in sides)
        moments = [{t for begin, end in side for t in range(begin, end)} for side in sides]
        assert overlap.length(a) == len(moments[0]) and overlap.length(overlap.overlap(a, b)) == len(
            moments[0] & moments[1]
        )
        assert overlap.length(overlap.gaps(a)) == a[-1][1] - a[0][0] - len(moments[0])


def test_aims_are_judged_by_what_was_measured(tmp_path):
    results = Results.begin(tmp_path / "r.json", H200)
    results.add(Outcome(key="health/x", status="done", rows=[{"what": "matmul 8192", "flops_s": 800e12}]))
    rows = [
        {"what": "cudnn behind 0", "queries": 8192, "way": way, "flops_s": flops_s}
        for way, flops_s in (("forward", 600e12), ("backward", 400e12))
    ]
    results.add(Outcome(key="attention/x", status="done", rows=rows))
    step = {"length": 131072, "num_layers": 16, "tokens_per_s": 2000.0, "mfu": 0.51}
    rows = [step | {"stash": "planned", "step_s": [10.0]}, step | {"stash": "kept", "step_s": [10.0]}]
    rows.append(step | {"stash": "all on the host", "step_s": [10.2]})
    results.add(Outcome(key="step/x", status="done", rows=rows))
    torch = {"framework": "torch", "length": 131072, "num_layers": 16, "tokens_per_s": 1000.0, "status": "ran"}
    results.add(Outcome(key="peer/torch, x", status="done", rows=[torch]))
    found = {row["aim"].split(" at ")[0]: (row["measured"], row["holds"]) for row in aim_rows(results)}
    assert found["attention forward"] == ("75.0% to 75.0%", "yes")
    assert found["attention backward"] == ("50.0% to 50.0%", "NO")
    assert found["causal MFU"] == ("51.0% to 51.0%", "yes")
    assert found["all on the host costs less than 3% of kept"] == ("2.0% to 2.0%", "yes")
    assert found["tokens/s"] == ("2.00 to 2.00", "yes")


def test_what_was_compiled_is_summed_up(tmp_path):
    machine = {"device": "h200", "description": "h200, compiled for and not run", "hbm_bytes": 139 * GIB}
    results = Results.begin(tmp_path / "r.json", H200)
    results.machine = {**results.machine, **machine}
    sizes = {"copied_bytes": 0, "exposed_bytes": 0, "compile_s": 1.0}
    for key, hbm_gib, calls in (("step/a", 70, 4), ("step/b", 20, 0), ("peer/jax, longest", 200, 3)):
        row = {"program": "p", "hbm_bytes": hbm_gib * GIB, "host_bytes": GIB, "flash_calls": calls, **sizes}
        results.add(Outcome(key=key, status="done", rows=[row]))
    text = report.tables(results)
    assert "2 programs compiled for h200, none run; 1 call fused" in text
    assert "HBM and host are arguments + outputs + temporaries - aliases." in text
    assert "largest take 70 GiB of 139 GiB HBM and 1 GiB of" in text and "| peer/jax, longest: p | 200 GiB |" in text


def test_the_search_for_the_longest_sequence_ends_where_memory_does(monkeypatch):
    from types import SimpleNamespace

    from bench.gpu_parts import step

    compiled, rows = [], []

    def program(length):
        lowered = SimpleNamespace(compile=lambda: compiled.append(length) or length)
        return SimpleNamespace(lower=lambda: lowered, turn_shares={})

    def figures(length, turn_shares, platform):
        return SimpleNamespace(to_dict=lambda: {"hbm_bytes": length * GIB, "host_bytes": 0})

    monkeypatch.setattr(step, "programs", lambda settings, target: map(program, settings["longest"]))
    monkeypatch.setattr(step, "Figures", SimpleNamespace(of=figures))
    step.run({"longest": [4, 8, 16], "host_gib": 1}, "cpu", rows.append)  # the planner's CPU has 8 GiB
    assert [(row["length"], row["fits"]) for row in rows] == [(4, True), (8, True), (16, False)]
    step.run({"longest": [9, 10], "host_gib": 1}, "cpu", rows.append)
    assert compiled == [4, 8, 16, 9]
