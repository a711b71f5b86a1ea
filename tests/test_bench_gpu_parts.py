"""Parts of the GPU benchmark without a GPU: what they may take, what they trace, and how they judge."""

import jax.numpy as jnp
import numpy as np
import pytest

from bench.gpu_parts import delta, exact, exact_delta, exact_step, pool, probe, room, step
from bench.gpu_parts.aims import aim_rows
from bench.gpu_parts.case import Outcome
from bench.gpu_parts.machine import Machine, cpu_machine
from bench.gpu_parts.program import Program, compile_together, figures_of, target_here
from bench.gpu_parts.report import tables
from bench.gpu_parts.results import Results, read
from bench.gpu_parts.runner import environment
from sppo_jax import compat
from sppo_jax.attention import flash
from sppo_jax.hardware import DEVICES
from sppo_jax.mixers.delta_work import Cut

GIB = 2**30
H200 = Machine(device="h200", description="NVIDIA H200", driver="580", hbm_bytes=140 * GIB, host_bytes=120 * GIB)


@pytest.mark.parametrize("asked_gib, pinned_gib", [(20, 32), (16, 16), (16.2, 32), (84.2, 128), (0.5, 0.5)])
def test_the_pool_takes_the_next_power_of_two(asked_gib, pinned_gib):
    assert room.pinned_bytes(int(asked_gib * GIB)) == pinned_gib * GIB


@pytest.mark.parametrize("spare", [None, 0.1])
def test_plans_leave_free_what_the_installed_jax_needs(spare, monkeypatch):
    monkeypatch.setattr(room, "installed_spare", lambda device: spare)
    assert room.cluster_of(DEVICES["h100"], 2).spare == spare and room.cluster_of(DEVICES["h100"], 2).num_devices == 2


def test_a_step_fills_the_pools_of_pinned_memory_as_a_run_does(monkeypatch):
    filled = []
    monkeypatch.setattr(step.environment, "set_limits", lambda plan: True)
    monkeypatch.setattr(step, "fill_pools", lambda plan, devices: filled.append(len(devices)))
    step.prepare(step.TINY_STEP, "cpu")
    assert filled == [1]


def test_a_step_on_the_host_needs_what_its_plan_may_pin():
    cases = {case.name: case for case in step.cases(tiny=False)}
    # A filled pool pins a GiB more, and the process takes 8.
    assert cases["1B at 128K, all on the host"].host_gib == 69
    assert cases["1B at 128K, kept"].host_gib == cases["longest"].host_gib == 8


@pytest.mark.parametrize(
    "what, flag",
    [
        ("loops in CUDA graphs", "command_buffer=+WHILE"),
        ("no CUDA graphs", "command_buffer="),
        ("loops of two iterations", "while_loop_double_buffering=true"),
    ],
)
def test_the_same_step_runs_with_other_flags_of_xla(what, flag):
    cases = {case.name: case for case in step.cases(tiny=False)}
    plain, other = (cases[f"1B at 128K, all on the host{end}"] for end in ("", f", {what}"))
    assert other.settings == plain.settings | {"xla": what}
    assert (plain.flags, other.flags) == ("", f"--xla_gpu_enable_{flag}")
    assert other.flags in environment(other, H200, "run")["XLA_FLAGS"]


def test_steps_of_other_orders_and_flags_do_not_mix_in_an_aim(tmp_path):
    results = Results.begin(tmp_path / "r.json", H200)
    seconds = {
        ("kept", ""): 10.0,
        ("all on the host", ""): 10.1,
        ("kept", ", breadth-first"): 20.0,
        ("all on the host", ", breadth-first"): 20.4,
        ("all on the host", ", loops in CUDA graphs"): 1.0,
    }
    rows = [
        {"length": 131072, "num_layers": 16, "mfu": 0.5, "stash": stash, "variant": variant, "step_s": [one_s]}
        for (stash, variant), one_s in seconds.items()
    ]
    results.add(Outcome(key="step/x", status="done", rows=rows))
    aim = next(row for row in aim_rows(results) if "all on the host" in row["aim"])
    assert aim["measured"] == "1.0% to 2.0%"


def test_the_probe_charges_what_a_write_adds_to_a_loop_of_unknown_count():
    turn_s = dict(zip(probe.LOOPS, (0.014, 0.015, 0.0144, 0.0254), strict=True))
    found = probe.waits(turn_s, inner=4)
    assert found["gap_s"] == pytest.approx(0.010) and found["read_s"] == pytest.approx(0.0001)


def test_the_loops_of_the_probe_compute_the_same():
    target = target_here("cpu")
    programs = list(probe.programs(probe.cases(tiny=True)[0].settings, target))
    rng = np.random.default_rng(0)
    x, w = (rng.normal(size=shape.shape).astype(shape.dtype) for shape in programs[0].arguments[:2])
    found = {name: run(x, w, np.full((1,), 4, np.int32)) for name, run in compile_together(programs).items()}
    outs = [np.asarray(out, np.float32) for out, _ in found.values()]
    assert all((out == outs[0]).all() for out in outs)
    assert [len(seen) for _, seen in found.values()] == [0, 1, 0, 1]
    # The row that is read back is what the first turn wrote: the matrices as they were given.
    seen = found["count not known, host writes"][1][0]
    assert (np.asarray(seen, np.float32) == np.asarray(x[0, :1], np.float32)).all()


def test_a_pool_row_says_what_was_expected():
    free = pool._row({}, 20 * GIB, 32 * GIB, (12.0, 1.0))
    assert free["expected_bytes"] == 32 * GIB and free["pinned_bytes_s"] == pytest.approx(32 * GIB / 11.0)
    tight = pool._row({"limit_gib": 21}, 20 * GIB, 21 * GIB, (1.0, 1.0))
    assert tight["expected_bytes"] == 21 * GIB and tight["pinned_bytes_s"] is None
    filled = pool._row({"limit_gib": 21, "filled": True}, 8 * GIB, 21 * GIB, (1.1, 1.0))
    assert filled["expected_bytes"] == 21 * GIB and filled["pinned_bytes_s"] is None


def test_many_merges_read_the_past_in_small_tiles(monkeypatch):
    sizes, right = [], flash.past_tile
    monkeypatch.setattr(flash, "past_tile", lambda *arguments: sizes.append(right(*arguments)) or sizes[-1])
    case = exact.cases(tiny=False)[0]
    target = target_here("cpu")
    for pattern, tile in (("one document", 6144), ("many merges", 512)):
        settings, sizes[:] = case.settings | {"heads": [[4, 1, 64]], "patterns": [pattern]}, []
        next(exact.programs(settings, target)).lower()
        assert set(sizes) == {tile}  # of 4096 keys: one merge, or eight
    assert flash.MAX_TILE == 32768


def test_patterns_hold_what_they_are_named_for():
    assert all(
        sum(special.get("documents", ())) <= prefix + chunk for prefix, chunk, special in exact.PATTERNS.values()
    )
    prefix, chunk, special = exact.PATTERNS["length % 128 = 64, LSE below -88.7"]
    assert (prefix % 128, chunk % 128, special["shift"]) == (64, 64, 5.0)
    prefix, chunk, special = exact.PATTERNS["a last document of one token, LSE below -88.7"]
    assert special["documents"][-1] == 1 and sum(special["documents"]) == prefix + chunk and special["shift"] == 5.0
    *_, documents = exact._arrays([1, 1, 64], exact.PATTERNS["most rows see nothing, LSE of -inf"])
    assert (np.asarray(documents[4096:]) < 0).mean() > 0.9


def test_bit_for_bit_cases_are_traced_with_kernels_in_a_fixed_order():
    cases = {case.name: case for case in exact_step.cases(tiny=False)}
    flag, target = "--xla_gpu_exclude_nondeterministic_ops=true", target_here("cpu")
    for name, fixed in (("step", True), ("breadth-first step", True), ("step, kernels as they come", False)):
        own = exact_step.cases(tiny=True)[0].settings | {"fixed_order": cases[name].settings["fixed_order"]}
        contexts = set()
        for program in exact_step.programs(own, target):
            with program.context():
                is_twin = program.name.endswith(exact_step.TWIN)
                contexts.add((compat._FIXED_ORDER.value, compat._HOST_IS_DEVICE.value == is_twin))
        assert (flag in cases[name].flags, contexts) == (fixed, {(fixed, True)})


def test_a_program_is_traced_in_its_context():
    from contextlib import contextmanager

    inside = []

    @contextmanager
    def context():
        inside.append("in")
        yield
        inside.append("out")

    function = type("Function", (), {"lower": lambda self, *arguments: inside.append(arguments)})()
    Program("p", function, (1,), context=context).lower()
    assert inside == ["in", (1,), "out"]


def test_without_a_fixed_order_a_difference_may_be_as_large_as_rounding():
    a = (np.float32(1.0), {"w": np.ones(4, np.float32)})
    b = (np.float32(1.0), {"w": np.ones(4, np.float32) + 1e-3})
    strict, loose, tight = (
        exact_step._bitwise("x", a, b, bounds)
        for bounds in (None, {"loss": 0.0, "['w']": 2e-3}, {"loss": 0.0, "['w']": 5e-4})
    )
    assert (strict["ok"], loose["ok"], tight["ok"]) == (False, True, False)
    assert loose["differing"] == pytest.approx({"['w']": 1e-3}, rel=1e-3)
    assert exact_step._bitwise("x", a, a, None)["ok"]
    nothing = (np.float32("nan"), {"w": np.ones(4, np.float32)})
    assert not exact_step._bitwise("x", a, nothing, {"loss": 1.0, "['w']": 1.0})["ok"]


def test_a_program_without_figures_loses_nothing_else():
    def fail():
        raise RuntimeError("no buffer assignment")

    cached = type("Cached", (), {"memory_analysis": staticmethod(fail)})()
    assert figures_of(cached) == {"unknown": "RuntimeError: no buffer assignment"}


def test_compiled_results_are_joined_by_their_compiler(tmp_path):
    path = tmp_path / "r.json"
    old = Results.begin(path, H200)
    old.versions = old.versions | {"torch": "0.1", "nvidia-cudnn-cu13": "9.1"}
    old.add(Outcome(key="step/a", status="done", date="2026-11-22"))
    joined = Results.resume(path, H200, compiled_only=True)
    joined.add(Outcome(key="step/b", status="done"))
    dates = {key: outcome.date for key, outcome in read(path).outcomes.items()}
    assert dates["step/a"] == "2026-11-22" and dates["step/b"] > "2026-11-22"
    joined.date = "2026-11-22"
    assert tables(joined).startswith(f"2026-11-22 to {dates['step/b']}, NVIDIA H200")
    with pytest.raises(ValueError, match="joins calls on one machine, got the versions"):
        Results.resume(path, H200)
    old.versions = old.versions | {"jaxlib": "0.1"}
    old.add(Outcome(key="step/a", status="done"))
    with pytest.raises(ValueError, match="got the versions"):
        Results.resume(path, H200, compiled_only=True)


@pytest.mark.parametrize("spans", [1, 8])
def test_the_delta_rule_is_timed_in_so_many_spans(spans):
    with delta._spans(spans):
        assert delta.delta.cut_of(2**18, 4 * 128) == Cut(8, spans, 2**15)
    assert delta.delta.cut_of(2**18, 4 * 128) == Cut(8, 8, 2**15)


def test_a_delta_rule_that_is_off_or_gives_no_number_fails():
    right = {"out": jnp.ones(4)}
    rows = [exact_delta._row("x", {"out": (1 + by) * jnp.ones(4)}, right, 1e-4) for by in (1e-5, 1e-3, np.nan)]
    assert [row["ok"] for row in rows] == [True, False, False] and rows[1]["error"] == pytest.approx(1e-3, rel=1e-3)


def test_the_guess_of_a_backward_is_four_forwards_and_counts_two():
    forward, backward = (delta._guess(kind, times, 1e6, 512, 1e15) for kind, times in (("F", 1.0), ("B", 2.0)))
    assert forward == pytest.approx({"guessed_s": 25.12e-6, "guessed_flops_s": 1e14, "guessed_step_s": 20e-6})
    assert backward == pytest.approx({"guessed_s": 100.48e-6, "guessed_flops_s": 5e13, "guessed_step_s": 80e-6})


def test_the_delta_rule_is_shown_beside_what_is_guessed(tmp_path):
    results = Results.begin(tmp_path / "r.json", H200)
    row = {"what": "run", "way": "forward", "seconds": 0.02, "flops_s": 3e12, "step_s": 4e-5}
    guess = {"guessed_s": 0.01, "guessed_flops_s": 6e13, "guessed_step_s": 2e-5}
    results.add(Outcome(key="delta/x", status="done", rows=[row | guess]))
    compared = {"what": "rule", "ok": False, "worst": "out", "error": 2e-3, "most": 1e-4}
    results.add(Outcome(key="exact/x", status="done", rows=[compared]))
    text = tables(results)
    assert "| run, forward | 0.02 (0.01) | 3 (60) | 40 (20) |" in text
    assert "| rule | NO | 0.002 of its size, in out; at most 1e-04 |" in text


def test_a_tiny_case_needs_no_gpu():
    from bench.gpu_parts.runner import why_not

    for part in (exact, pool, probe, step):
        assert [why_not(case, cpu_machine()) for case in part.cases(tiny=True)] == [""] * len(part.cases(tiny=True))
