"""What a start on several GPUs sets, what it leaves alone, and that XLA knows every flag."""

import importlib.machinery
import os
import subprocess
import sys
import warnings
from dataclasses import replace

import pytest
from distributed_cases import REPO, environment
from exactness import small_plan

from sppo_jax.plan.stall_limit import stall_limit_s
from sppo_jax.processes import environment as env
from sppo_jax.processes import gpu_start

GiB = 2**30
LOADING = "CUDA_MODULE_LOADING"


@pytest.fixture
def unset(monkeypatch):
    """A plugin for GPUs is installed, nothing is set, and no backend has started, it seems."""
    for name in ("XLA_FLAGS", LOADING, "NCCL_DEBUG", "JAX_PLATFORMS", env.HOST_LIMIT, env.FRACTION, env.OLD_FRACTION):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(gpu_start, "_has_gpu_plugin", lambda: True)
    monkeypatch.setattr(gpu_start, "jaxlib_version", lambda: (0, 12, 0))
    monkeypatch.setattr(env, "_running_platform", lambda: None)


def a_plan(*, step_s=2000.0, host_gb=220, mesh=(1, 2, 4)):
    plan = small_plan((16,) * 4, mesh=mesh)
    return replace(plan, predicted=replace(plan.predicted, step_s=step_s, host_bytes=(host_gb * GiB,) * mesh[1]))


def flags():
    return dict(word.split("=") for word in os.environ["XLA_FLAGS"].split())


@pytest.mark.parametrize("given, limit_s", [("auto", 8880), (60.0, 8880), (20000.0, 20000), (0.0, 86400)])
def test_limits_of_waiting_are_above_the_watchdogs(given, limit_s, unset):
    plan = a_plan()  # 4 steps, and 8 x 220 GiB at 2 GiB/s
    env.set_waiting_limits(plan, given)
    assert flags() == dict.fromkeys(gpu_start.WAITING_FLAGS, str(limit_s + 300))
    assert int(flags()[gpu_start.WAITING_FLAGS[0]]) > max(stall_limit_s(plan), stall_limit_s(plan, given))
    env.set_limits(plan)  # as make_mesh does later: the first call counts
    assert flags() == dict.fromkeys(gpu_start.WAITING_FLAGS, str(limit_s + 300))


def test_without_a_plan_gpus_may_wait_for_a_day(unset):
    env.set_limits(None)
    assert set(flags().values()) == {"86400"} and os.environ[LOADING] == "EAGER"


def test_what_the_user_has_set_stays(unset, monkeypatch):
    mine = f"{gpu_start.WAITING_FLAGS[1]}=77"
    monkeypatch.setenv("XLA_FLAGS", mine)
    monkeypatch.setenv(LOADING, "LAZY")
    env.set_limits(a_plan())
    assert flags()[gpu_start.WAITING_FLAGS[1]] == "77" and len(flags()) == 3 and os.environ[LOADING] == "LAZY"


@pytest.mark.parametrize("why", ["one GPU", "no plugin", "a CPU is asked for", "a backend runs"])
def test_nothing_is_set_where_no_gpus_wait_for_each_other(why, unset, monkeypatch):
    if why == "no plugin":
        monkeypatch.setattr(gpu_start, "_has_gpu_plugin", lambda: False)
    if why == "a CPU is asked for":
        monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    if why == "a backend runs":
        monkeypatch.setattr(env, "_running_platform", lambda: "gpu")
    env.set_limits(a_plan(mesh=(1, 1, 1) if why == "one GPU" else (1, 2, 4)))
    assert os.environ["XLA_FLAGS"] == "" == os.environ[LOADING]


@pytest.mark.parametrize(
    "version, known", [((0, 10, 2), True), ((0, 11, 2), True), ((0, 12, 1), True), ((0, 13, 0), False)]
)
def test_a_newer_xla_gets_no_flag_that_it_may_not_know(version, known, unset, monkeypatch):
    monkeypatch.setattr(gpu_start, "jaxlib_version", lambda: version)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        env.set_limits(a_plan())
    assert bool(os.environ["XLA_FLAGS"]) == known and len(caught) == (not known)
    if not known:
        assert "XLA may end a process whose GPUs wait 30 s" in str(caught[0].message)


def test_xla_knows_the_flags():
    """XLA ends a process with a flag that it does not know; one library parses them for all platforms."""
    text = " ".join(f"{name}=900" for name in gpu_start.WAITING_FLAGS)
    code = "import jax; print(jax.devices()[0].platform)"
    for given, ends in ((text, False), (text.replace("terminate_timeout=", "terminate_timeout_seconds="), True)):
        own = environment(JAX_PLATFORMS="cpu", XLA_FLAGS=given)
        done = subprocess.run(
            [sys.executable, "-c", code], env=own, cwd=REPO, capture_output=True, text=True, timeout=120
        )
        assert (done.returncode != 0) == ends == ("Unknown flag" in done.stderr), done.stderr
        assert done.stdout == ("" if ends else "cpu\n")


@pytest.mark.parametrize(
    "name, found", [("xla_cuda13", True), ("xla_rocm7", True), ("xla_other", False), (None, False)]
)
def test_a_plugin_for_gpus_is_found_where_jax_finds_it(name, found, tmp_path, monkeypatch):
    if name:
        (tmp_path / "jax_plugins" / name).mkdir(parents=True)
    spec = importlib.machinery.ModuleSpec("jax_plugins", None, is_package=True)
    spec.submodule_search_locations.append(str(tmp_path / "jax_plugins"))
    monkeypatch.setattr(gpu_start, "find_spec", lambda _: spec if name else None)
    assert gpu_start._has_gpu_plugin() == found


def test_flags_with_which_collectives_hang_are_refused_on_several_gpus(unset, monkeypatch):
    env.set_waiting_limits(a_plan())
    assert os.environ["NCCL_DEBUG"] == "WARN"
    flag = "--xla_gpu_experimental_enable_nvshmem=true"
    monkeypatch.setenv("XLA_FLAGS", flag)
    with pytest.raises(ValueError, match=f"XLA_FLAGS must not have a flag .*got {flag}; remove the flag"):
        env.set_waiting_limits(a_plan())
    env.set_waiting_limits(a_plan(mesh=(1, 1, 1)))
