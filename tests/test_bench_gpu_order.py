"""The GPU benchmark where time is short: what runs first, what is not run, and what a later call takes up."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench import gpu
from bench.gpu_parts import order, report
from bench.gpu_parts.case import Case, Outcome
from bench.gpu_parts.child import PARTS
from bench.gpu_parts.machine import Machine
from bench.gpu_parts.results import Results, read
from bench.gpu_parts.runner import run_case, why_not

ROOT = Path(__file__).parents[1]
GIB = 2**30
# One call of at most 600 s, with some seconds for Python to start and for the report.
CALL_S, SPARE_S = 600, 15
H100 = Machine(device="h100", description="NVIDIA H100", driver="580", hbm_bytes=80 * GIB, host_bytes=125 * GIB)


class Clock:
    """Stands in for the clock and for a case's process, which takes `takes` times what is expected."""

    def __init__(self, takes=1.0, statuses=None):
        self.now_s, self.takes, self.statuses, self.begun = 1000.0, takes, statuses or {}, []

    def __call__(self) -> float:
        return self.now_s

    def run(self, case, machine, mode, *, limit_s) -> Outcome:
        self.begun.append(case.key)
        seconds = case.expected_s * self.takes
        self.now_s += min(seconds, limit_s)
        rows = [{"x": len(self.begun)}]
        if seconds > limit_s:
            return Outcome(key=case.key, status="not run", reason="took longer", rows=rows)
        return Outcome(key=case.key, status=self.statuses.get(case.key, "done"), rows=rows)


def call(clock, cases, path, within_s=float("inf"), *, resume=True, named=False):
    """Makes one call of the benchmark; returns what it left."""
    results = Results.resume(path, H100) if resume else Results.begin(path, H100)
    again = [case for case in cases if gpu._is_left(case, results, named=named)]
    refusals = {case.key: why_not(case, H100) for case in cases}
    end_s = clock.now_s + within_s
    return gpu.run_cases(again, H100, "run", results, refusals, end_s=end_s, run=clock.run, clock=clock)


def all_cases() -> list[Case]:
    return gpu.select(gpu.parse([]))


def cases_of(*seconds: float) -> list[Case]:
    return [
        Case(part="step", name=name, settings={}, expected_s=expected_s, limit_s=10 * expected_s)
        for name, expected_s in zip("abcdef", seconds, strict=False)
    ]


def test_the_first_call_runs_what_decides_most_in_its_order(tmp_path):
    clock, cases = Clock(), all_cases()
    left = call(clock, cases, tmp_path / "r.json", CALL_S - SPARE_S)
    assert tuple(clock.begun[: len(order.FIRST)]) == order.FIRST
    assert clock.now_s <= 1000 + CALL_S - SPARE_S
    able = {case.key for case in cases if not why_not(case, H100)}
    assert set(left) == able - set(clock.begun)


def test_every_first_case_can_run_on_a_machine_of_128_gib_of_host_memory():
    cases = {case.key: case for case in all_cases()}
    # "8B, optimizer on the host" and its like need a larger host.
    assert [why_not(cases[key], H100) for key in order.FIRST] == [""] * len(order.FIRST)


def test_a_case_that_would_pin_a_whole_small_host_is_skipped():
    key = "step/8B at 128K, optimizer on the host"
    case = next(case for case in all_cases() if case.key == key)
    assert why_not(case, H100) == "needs 133 GiB of host memory, this machine has 125.0"


def test_two_more_calls_go_on_and_no_case_runs_twice(tmp_path):
    clock, path = Clock(), tmp_path / "r.json"
    for _ in range(3):
        left = call(clock, all_cases(), path, CALL_S - SPARE_S)
    assert len(set(clock.begun)) == len(clock.begun) > 2 * len(order.FIRST)
    outcomes = read(path).outcomes
    assert [key for key, outcome in outcomes.items() if outcome.status == "not run"] != [] and set(left) == {
        key for key, outcome in outcomes.items() if outcome.status == "not run"
    }
    assert call(clock, all_cases(), path) == [] and len(set(clock.begun)) == len(clock.begun)


def test_what_time_did_not_allow_is_not_run_and_no_failure(tmp_path):
    clock, path = Clock(), tmp_path / "r.json"
    cases = [
        Case(part="exact", name=name, settings={}, expected_s=s, limit_s=500) for name, s in (("a", 30), ("b", 90))
    ]
    assert call(clock, cases, path, 100) == ["exact/b"]
    outcome = read(path).outcomes["exact/b"]
    assert (outcome.status, outcome.reason) == ("not run", "takes about 90 s, 70 s were left")
    assert report.failed_comparisons(read(path)) == []
    assert "| exact/b | not run | takes about 90 s, 70 s were left |" in report.tables(read(path))


def test_a_short_case_runs_where_a_longer_one_has_no_time(tmp_path):
    clock = Clock()
    assert call(clock, cases_of(50, 100, 20), tmp_path / "r.json", 80) == ["step/b"]
    assert clock.begun == ["step/a", "step/c"]


def test_a_case_that_the_end_of_the_time_cuts_is_taken_up_again(tmp_path):
    clock, path = Clock(takes=1.5), tmp_path / "r.json"
    assert call(clock, cases_of(50, 20), path, 80) == ["step/b"]  # 75 s, and 5 s are too few for 20
    clock.takes = 5.0
    assert call(clock, cases_of(50, 20), path, 80) == ["step/b"] and clock.begun[-1] == "step/b"
    assert read(path).outcomes["step/b"].rows == [{"x": 2}]
    assert call(clock, cases_of(50, 20), path, 10) == ["step/b"]
    assert read(path).outcomes["step/b"].rows == [{"x": 2}]  # what it had measured stays
    clock.takes = 1.0
    assert call(clock, cases_of(50, 20), path) == [] and clock.begun == ["step/a", "step/b", "step/b"]


def test_a_case_that_failed_runs_again_only_by_its_name(tmp_path):
    clock, path = Clock(statuses={"step/b": "failed"}), tmp_path / "r.json"
    cases = cases_of(10, 10)
    assert call(clock, cases, path, resume=False) == []
    call(clock, cases, path)
    assert clock.begun == ["step/a", "step/b"]
    call(clock, cases, path, named=True)  # both are named, one had failed
    assert clock.begun == ["step/a", "step/b", "step/b"]


def sleeping(spec: Path) -> list[str]:
    return [sys.executable, "-c", "import time; time.sleep(60)"]


@pytest.mark.parametrize("limit_s, left_s, status", [(1.0, 50.0, "failed"), (50.0, 1.0, "not run")])
def test_a_process_is_cut_by_its_own_limit_or_by_the_end_of_the_time(limit_s, left_s, status):
    case = Case(part="step", name="a", settings={}, expected_s=1.0, limit_s=limit_s)
    outcome = run_case(case, H100, "run", limit_s=left_s, make_command=sleeping)
    assert (outcome.status, outcome.reason) == (status, "took longer than 1 s and was killed")


def compile_seconds() -> dict[str, float]:
    """Returns the seconds that compiling a case's programs took where that was measured, the most by version of jax."""
    found: dict[str, float] = {}
    for path in (ROOT / "bench" / "results").glob("gpu_h200_compiled_*.json"):
        for case in json.loads(path.read_text())["cases"]:
            if case["status"] == "done":
                found[case["key"]] = max(found.get(case["key"], 0.0), sum(row["compile_s"] for row in case["rows"]))
    return found


def test_no_case_is_killed_while_it_compiles():
    compiled = compile_seconds()
    cases = {case.key: case for case in all_cases()}
    known = compiled.keys() & cases.keys()
    assert len(known) > 20
    assert [key for key in known if cases[key].limit_s < 1.2 * compiled[key] + 60] == []
    assert all(case.limit_s >= 2 * case.expected_s for case in cases.values())


def test_cases_that_were_named_run_in_the_order_of_their_names():
    names = ["step/1B at 32K, kept", "system/what is here"]
    chosen = gpu.select(gpu.parse([word for name in names for word in ("--case", name)]))
    assert [case.key for case in chosen] == names


def test_the_order_names_cases_that_exist():
    keys = [case.key for case in all_cases()]
    assert set(order.FIRST) <= set(keys)
    assert [prefix for prefix in order.WORTH if not any(key.startswith(prefix) for key in keys)] == []
    first = {key: next(prefix for prefix in order.WORTH if key.startswith(prefix)) for key in keys if _has(key)}
    assert set(first.values()) == set(order.WORTH), "a shorter prefix hides a longer one"


def _has(key: str) -> bool:
    return any(key.startswith(prefix) for prefix in order.WORTH)


def test_the_page_on_the_first_half_hour_is_that_of_the_order():
    page = (ROOT / "docs" / "first_gpu.md").read_text()
    seconds = {case.key: case.expected_s for case in all_cases()}
    rows = re.findall(r"^\| `([^`]+)` \| (\d+) \|", page, flags=re.MULTILINE)
    assert {key: int(shown) for key, shown in rows} == {key: seconds[key] for key, _ in rows}
    keys = [key for key, _ in rows]
    assert tuple(keys[: len(order.FIRST)]) == order.FIRST and keys == [key for key in seconds if key in keys]
    assert f"In this order, {sum(seconds[key] for key in order.FIRST):.0f} s together." in page
    for command in re.findall(r"```\n(.*?)```", page, flags=re.DOTALL):
        assert len(command) < 2000
        assert all(case in seconds for case in re.findall(r'--case "([^"]+)"', command))


_BLOCK = """
import importlib, sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
from bench import gpu
for part in {parts!r}:
    importlib.import_module(f"bench.gpu_parts.{{part}}").cases(tiny=False)
    print(part)
"""


def test_every_part_is_there_in_an_image_with_jax_and_flax_alone():
    names = (
        "grain",
        "array_record",
        "torch",
        "transformers",
        "tokenizers",
        "safetensors",
        "pyarrow",
        "tqdm",
    )
    script = _BLOCK.format(names=set(names), parts=PARTS)
    found = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert found.stdout.split() == list(PARTS), found.stderr


def test_a_tiny_run_ends_in_time_and_a_second_call_goes_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "")  # so that it is put back
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    words = ["--tiny", "--parts", "system,pool", "--out", str(tmp_path)]
    assert gpu.main([*words, "--within", "6"]) == 0  # less than the first case takes
    path = tmp_path / "gpu_tiny.json"
    assert {o.status for o in read(path).outcomes.values()} == {"not run"}
    text = capsys.readouterr().out
    # Programs outlive the call.
    assert os.environ["JAX_COMPILATION_CACHE_DIR"] == str(tmp_path / "cache")
    assert "not run for lack of time: system/what is here, pool/tiny; run the same command with --resume" in text
    assert gpu.main([*words, "--within", "100", "--resume"]) == 0
    assert {o.status for o in read(path).outcomes.values()} == {"done"}
    assert read(path).rows("pool")[0]["expected_bytes"] == 4 * 64 * 64 * 2
    text = (tmp_path / "gpu_tiny.md").read_text()
    assert "## What is here" in text and "## Pinned host memory" in text
