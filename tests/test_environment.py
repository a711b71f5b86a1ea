"""What is set in the environment before jax's backend starts, and what is told where it is too late."""

import json
import os
import subprocess
import sys
import warnings
from dataclasses import replace

import jax
import numpy as np
import pytest
import yaml
from distributed_cases import REPO, environment
from exactness import small_plan
from jaxlib.xla_client import generate_pjrt_gpu_plugin_options

from sppo_jax import compat, value_and_grad
from sppo_jax.config import config_from_dict
from sppo_jax.hardware import DEVICES, make_cluster, parse_cluster, pool_bytes
from sppo_jax.models import build_model
from sppo_jax.plan.host_arrays import HostArrays
from sppo_jax.plan.parts import MeshShape, Predicted
from sppo_jax.processes import distributed, gpu_start
from sppo_jax.processes import environment as env
from sppo_jax.processes.environment import simulate_devices
from sppo_jax.processes.prepare import prepare_process

GiB = 2**30
SETTINGS = {
    "model": {"vocab_size": 24, "hidden_size": 16, "num_layers": 4, "num_heads": 2, "mlp_size": 32},
    "data": {"source": "tokens.npy"},
    "sequence": {"length": 64},
    "train": {"steps": 1},
}
VARIABLES = ("JAX_PLATFORMS", "XLA_FLAGS", env.HOST_LIMIT, env.FRACTION, env.OLD_FRACTION)
# Sums that jaxlib gets wrong on CPUs: the last of many products of a matrix and a vector (0.10.2), and the sums of a
# batched product with a broadcast operand (all versions so far).
SUMS = """
import jax, jax.numpy as jnp, numpy as np
jax.config.update("jax_enable_x64", True)
def last(dtype, rows):
    x = jnp.zeros((rows, 3), dtype).at[:, 0].set(jnp.arange(rows, dtype=dtype))
    matrix = jnp.eye(3, dtype=dtype)
    return float(jax.jit(jax.vmap(lambda row: jnp.sum((matrix @ row) ** 2)))(x)[-1])
def broadcast(dtype):
    x = np.random.default_rng(0).normal(size=(5, 60, 60)).astype(dtype)
    sums = jax.jit(lambda x: jnp.sum((x @ jnp.full(x.shape, 0.5, dtype)) * x, axis=-1))(x)
    return np.allclose(sums, ((x @ np.full(x.shape, 0.5, dtype)) * x).sum(-1), rtol=1e-3, atol=1e-2)
print(last(jnp.float64, 16_385) == 16_384.0**2, last(jnp.float32, 32_769) == 32_768.0**2)
print(broadcast(np.float64), broadcast(np.float32))
"""
RIGHT = "True True\nTrue True\n"


def run(code, **environ):
    """Runs code in a process of its own, without what this one has set for XLA; returns its output and errors."""
    own = environment(**{"XLA_FLAGS": ""} | environ)
    done = subprocess.run([sys.executable, "-c", code], env=own, cwd=REPO, capture_output=True, text=True, timeout=300)
    return done.stdout, done.stderr


@pytest.fixture
def unset(monkeypatch):
    """Nothing is set, the machine has 2000 GB, and no backend has started, it seems."""
    jax.devices()  # as many as the other tests need, before the variables go
    for name in VARIABLES:
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(env, "_running_platform", lambda: None)
    monkeypatch.setattr(env, "machine_gb", lambda: 2000)
    for name in ("variables", "waiting_flags"):  # test_gpu_start.py has the limits of waiting
        monkeypatch.setattr(gpu_start, name, lambda *_: {})


def a_plan(*, host_gb, hbm_gb=70, mesh=(2, 2, 2)):
    data, pipe, seq = mesh
    predicted = Predicted(
        step_s=1.0,
        bubble_fraction=0.0,
        hbm_bytes=(hbm_gb * GiB,) * pipe,
        host_bytes=(*(0,) * (pipe - 1), host_gb * GiB),
    )
    plan = small_plan((16,) * 4, mesh=mesh)
    assert plan.mesh == MeshShape(data=data, pipe=pipe, seq=seq)
    return replace(plan, predicted=predicted)


def given():
    return {name: os.environ[name] for name in VARIABLES if os.environ.get(name)}


def test_sums_are_right_where_sppo_jax_is_imported_first():
    out, errors = run("import sppo_jax" + SUMS, JAX_PLATFORMS="cpu")
    assert out == RIGHT, errors
    out, errors = run("import jax, sppo_jax" + SUMS, JAX_PLATFORMS="cpu")  # no backend has started yet
    assert out == RIGHT and "WRONG SUMS" not in errors, errors


def test_a_backend_that_has_started_is_told_of_wrong_sums():
    code = "import jax; jax.devices()\nimport sppo_jax\nimport sppo_jax.compat"
    errors = run(code, JAX_PLATFORMS="cpu")[1]
    concerned = (0, 10, 2) <= env.jaxlib_version() <= (0, 12, 0)
    assert errors.count("WRONG SUMS") == concerned, errors
    if concerned:
        assert "<string>:2: UserWarning: jaxlib 0.10.2 to 0.12.0" in errors  # the line of the import
        assert "import sppo_jax before" in errors and f"XLA_FLAGS={env.YNN_FLAG}= " in errors
    assert "WRONG SUMS" not in run(code, JAX_PLATFORMS="cpu", XLA_FLAGS=f"{env.YNN_FLAG}=")[1]


@pytest.mark.parametrize(
    "version, set_",
    [((), False), ((0, 10, 1), False), ((0, 10, 2), True), ((0, 12, 0), True), ((0, 12, 1), False)],
)
def test_the_fusions_are_off_for_the_versions_concerned(version, set_, unset, monkeypatch):
    monkeypatch.setattr(env, "jaxlib_version", lambda: version)
    env.avoid_wrong_sums()
    assert os.environ["XLA_FLAGS"] == (f"{env.YNN_FLAG}=" if set_ else "")


@pytest.mark.parametrize("platform, told", [("cpu", True), ("gpu", False), ("tpu", False)])
def test_wrong_sums_are_told_of_where_cpus_compute(platform, told, unset, monkeypatch):
    monkeypatch.setattr(env, "jaxlib_version", lambda: (0, 10, 2))
    monkeypatch.setattr(env, "_running_platform", lambda: platform)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        env.avoid_wrong_sums()
    assert len(caught) == told and os.environ["XLA_FLAGS"] == ""


def test_a_flag_of_the_user_stays(unset, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1  --xla_ab=2")
    env.add_xla_flag("--xla_a", 3)
    assert os.environ["XLA_FLAGS"].split() == ["--xla_a=1", "--xla_ab=2"]
    env.add_xla_flag("--xla_a", 3, replace=True)
    env.add_xla_flag("--xla_b", "")
    assert os.environ["XLA_FLAGS"].split() == ["--xla_ab=2", "--xla_a=3", "--xla_b="]
    monkeypatch.setattr(env, "jaxlib_version", lambda: (0, 10, 2))
    monkeypatch.setenv("XLA_FLAGS", f"{env.YNN_FLAG}=x")
    env.avoid_wrong_sums()
    assert os.environ["XLA_FLAGS"] == f"{env.YNN_FLAG}=x"


@pytest.fixture
def flags(unset, monkeypatch):
    """Sets XLA_FLAGS; returns the warnings about them."""
    env._unknown_flags.cache_clear()

    def warned(text, call=env.set_memory_fraction):
        monkeypatch.setenv("XLA_FLAGS", text)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
        return [str(warning.message) for warning in caught]

    return warned


@pytest.mark.parametrize(
    ("plugin", "driver", "platforms", "told"),
    [(True, False, "", True), (False, False, "", False), (True, True, "", False), (True, False, "cuda", False)],
)
def test_jax_for_cuda_without_a_driver_is_a_line(plugin, driver, platforms, told, unset, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    monkeypatch.setattr(env, "_has_cuda_plugin", lambda: plugin)
    monkeypatch.setattr(env, "_driver_loads", lambda: driver)
    with warnings.catch_warnings(record=True) as lines:
        warnings.simplefilter("always")
        env.skip_cuda_without_driver()
    assert os.environ["JAX_PLATFORMS"] == ("cpu" if told else platforms)
    assert [str(line.message).count("NVIDIA's driver") for line in lines] == [1] * told


@pytest.mark.parametrize("call", [env.set_memory_fraction, lambda: env.set_limits(None)])
def test_a_flag_that_xla_does_not_know_is_named_with_the_nearest_that_it_knows(call, flags):
    told = flags("--xla_cpu_enable_fast_mat=true --xla_dump_to=/tmp/x --xla_nonsense_of_ours", call)
    assert len(told) == 2
    assert "got --xla_cpu_enable_fast_mat, which jaxlib " in told[0] and "\n" not in told[0]
    assert "(the nearest flag is --xla_cpu_enable_fast_math); XLA will end the process" in told[0]
    assert "got --xla_nonsense_of_ours, " in told[1] and "nearest" not in told[1]


def test_the_name_of_a_field_of_xla_is_no_flag(flags):
    (told,) = flags("--xla_gpu_executable_terminate_timeout_seconds=60")
    assert "(the nearest flag is --xla_gpu_executable_terminate_timeout)" in told


@pytest.mark.parametrize(
    "text",
    [
        "--xla_cpu_enable_fast_math=false --xla_gpu_autotune_level=0",
        "/a/file/of/flags --xla_nonsense_of_ours",
        "--xla_nonsense_of_ours='",  # XLA will say so itself
        "",
    ],
)
def test_flags_that_xla_knows_or_reads_elsewhere_are_left_to_it(text, flags):
    assert flags(text) == []


def test_nothing_is_searched_for_the_flags_that_sppo_sets(flags, monkeypatch):
    monkeypatch.setattr(env, "_libraries", lambda: pytest.fail("no library need be searched"))
    monkeypatch.setattr(env, "jaxlib_version", lambda: (0, 10, 2))
    monkeypatch.setenv("XLA_FLAGS", "")
    simulate_devices(2)
    env.avoid_wrong_sums()
    env.compile_soon()
    assert os.environ["XLA_FLAGS"].count("--") == 6 and flags(os.environ["XLA_FLAGS"]) == []


def test_programs_compile_soon_where_the_user_says_nothing_else(unset, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=3")
    monkeypatch.setattr(
        env, "jaxlib_version", lambda: (0, 11, 0)
    )  # XLA ends a process with a flag that it does not know
    env.compile_soon()
    assert os.environ["XLA_FLAGS"] == "--xla_backend_optimization_level=3 --xla_cpu_parallel_codegen_split_count=1"


def test_a_search_for_flags_that_finds_no_names_is_silent(flags, monkeypatch, tmp_path):
    monkeypatch.setattr(env, "_libraries", lambda: [env.Path("/nonexistent/library.so")])
    assert flags("--xla_nonsense_of_ours") == []
    (tmp_path / "library.so").write_bytes(b"no names of flags")
    for libraries in ([], [tmp_path / "library.so"]):
        monkeypatch.setattr(env, "_libraries", lambda libraries=libraries: libraries)
        env._unknown_flags.cache_clear()
        assert flags("--xla_nonsense_of_ours") == []


def test_no_flags_are_searched_once_a_backend_runs(flags, monkeypatch):
    monkeypatch.setattr(env, "_running_platform", lambda: "cpu")
    assert flags("--xla_nonsense_of_ours") == []


def test_what_is_warned_of_is_what_ends_the_process():
    code = "from sppo_jax.processes import environment as env; env.set_memory_fraction(); import jax; jax.devices()"
    errors = run(code, JAX_PLATFORMS="cpu", XLA_FLAGS="--xla_cpu_enable_fast_mat=true")[1]
    warned, _, fatal = errors.partition("XLA will end the process")
    assert "UserWarning: XLA_FLAGS must hold flags that XLA knows" in warned
    assert "Unknown flag in XLA_FLAGS: --xla_cpu_enable_fast_mat" in fatal, errors


def test_no_backend_is_started_by_looking():
    code = "import sppo_jax, sys; from sppo_jax.processes import environment as env; print(env._running_platform())"
    code += "; print('jax' in sys.modules); import jax; print(env._running_platform())"
    code += "; jax.devices(); print(env._running_platform())"
    assert run(code, JAX_PLATFORMS="cpu")[0].split() == ["None", "False", "None", "cpu"]


def test_jax_takes_the_share_of_gpu_memory_that_plans_fill(unset, monkeypatch):
    """Without a GPU that plans know, the most; else what the number of devices leaves."""
    env.set_memory_fraction()
    assert generate_pjrt_gpu_plugin_options()["memory_fraction"] == 0.95


@pytest.mark.parametrize(
    "mesh, num_processes, cluster",
    [
        ((1, 1, 1), 1, "h100:1x1"),
        ((1, 1, 4), 1, "h100:1x4"),
        ((1, 1, 8), 1, "h100:1x8"),
        ((1, 1, 8), 8, "h100:1x8"),  # one process a device
        ((1, 4, 8), 4, "h100:4x8"),
        (None, 1, "h100:1x8"),
        (None, 4, "h100:4x8"),
    ],
)
def test_the_pool_is_what_the_planner_counts_on(mesh, num_processes, cluster, unset, monkeypatch):
    monkeypatch.setattr(env, "local_cluster", lambda: make_cluster(DEVICES["h100"], 8))
    monkeypatch.setattr(compat, "distributed_place", lambda: (0, num_processes))
    env.set_limits(mesh and a_plan(host_gb=0, mesh=mesh))
    known = parse_cluster(cluster)
    assert int(float(given()[env.FRACTION]) * known.device.hbm_bytes) == pool_bytes(known)


@pytest.mark.parametrize("name", [env.FRACTION, env.OLD_FRACTION])
def test_a_share_of_the_user_stays(name, unset, monkeypatch):
    monkeypatch.setenv(name, "0.5")
    env.set_memory_fraction()
    assert given() == {name: "0.5"} and generate_pjrt_gpu_plugin_options()["memory_fraction"] == 0.5


@pytest.mark.parametrize(
    "plan, num_processes, limit",
    [
        (dict(host_gb=30), 1, "30"),  # each device has a pool with this limit, in any number of processes
        (dict(host_gb=30), 4, "30"),
        (dict(host_gb=3000), 1, "3001"),  # no pool holds that in one piece, and the run is refused
        (dict(host_gb=64), 1, None),  # as XLA's default
        (dict(host_gb=0), 1, None),
        (None, 1, "2000"),
    ],
    ids=["one process", "four processes", "too much", "XLA's default", "no stash", "no plan yet"],
)
def test_the_host_limit_follows_the_plan(plan, num_processes, limit, unset, monkeypatch):
    monkeypatch.setattr(compat, "distributed_place", lambda: (0, num_processes))
    env.set_limits(plan and a_plan(**plan))
    assert given() == {env.FRACTION: "0.95"} | ({env.HOST_LIMIT: limit} if limit else {})


@pytest.mark.parametrize(
    "given_gb, told",
    [
        ("30", ""),
        (
            "29",
            "needs 30 GiB of pinned host memory per device, XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=29 lets XLA pin 29, too",
        ),
        ("31", "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=31 makes XLA pin 31; set XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=30 or"),
        ("2000", "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=2000 makes XLA pin 32; set "),  # the next power of two
    ],
)
def test_a_host_limit_of_the_user_stays_and_is_warned_of(given_gb, told, unset, monkeypatch):
    monkeypatch.setenv(env.HOST_LIMIT, given_gb)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert env.set_limits(a_plan(host_gb=30))
    assert os.environ[env.HOST_LIMIT] == given_gb
    assert len(caught) == bool(told) and all(told in str(one.message) for one in caught), caught


def test_a_run_fills_pools_of_plans_that_keep_something_on_the_host(unset):
    assert env.pool_requests(a_plan(host_gb=30)) == (30 * GiB,) and env.pool_requests(a_plan(host_gb=0)) == ()


def test_the_limit_has_room_for_the_copy_of_a_save(unset):
    plan = replace(a_plan(host_gb=30), host_arrays=HostArrays(stash_bytes=30 * GiB, save=(5 * GiB, 6 * GiB)))
    assert env.host_limit_gb(plan) == 41
    assert env.host_limit_gb(replace(a_plan(host_gb=0), host_arrays=HostArrays(save=(40 * GiB,)))) == 80


@pytest.mark.parametrize("platforms, set_", [("cpu", False), ("tpu,cpu", False), ("cuda,cpu", True), ("GPU", True)])
def test_nothing_is_set_where_there_are_no_gpus(platforms, set_, unset, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    env.set_limits(a_plan(host_gb=30))
    assert (env.HOST_LIMIT in given(), env.FRACTION in given()) == (set_, set_)


def test_nothing_is_set_once_a_backend_runs(unset, monkeypatch):
    monkeypatch.setattr(env, "_running_platform", lambda: "gpu")
    env.set_limits(a_plan(host_gb=30))
    assert not given()


@pytest.mark.parametrize(
    "plan, limit, pool_gb, told",
    [
        (dict(host_gb=90), "", 75, ["pins at most 64; set XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=90 "]),
        (dict(host_gb=90), "80", 75, ["pins at most 80; set XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=90 "]),
        (dict(host_gb=90), "90", 75, []),
        (dict(host_gb=90), "90", 60, ["takes at most 60 GiB; set XLA_CLIENT_MEM_FRACTION=0.95 "]),
        (dict(host_gb=90), "90", None, []),
        (dict(host_gb=0), "", 75, []),
    ],
    ids=["absent", "too little", "enough", "a small pool", "no pool", "no stash"],
)
def test_a_backend_that_has_started_is_told_of_limits(plan, limit, pool_gb, told, unset, monkeypatch):
    monkeypatch.setenv(env.HOST_LIMIT, limit)
    monkeypatch.setenv(env.FRACTION, "0.9")
    monkeypatch.setattr(env, "compiler_takes_more", lambda: False)
    monkeypatch.setattr(compat, "device_pool_bytes", lambda: pool_gb and pool_gb * GiB)
    for platform in ("gpu", "cpu"):
        monkeypatch.setattr(env, "_running_platform", lambda platform=platform: platform)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            env.check_memory_limits(a_plan(**plan))
        texts = [str(warning.message) for warning in caught]
        assert len(texts) == (len(told) if platform == "gpu" else 0)
        assert all(words in text for words, text in zip(told, texts, strict=False)), texts


@pytest.mark.parametrize("version, pool_gb, told", [((0, 11, 2), 75, 1), ((0, 11, 2), 78, 0), ((0, 12, 0), 75, 0)])
def test_an_older_jax_is_told_of_a_plan_that_fills_the_pool(version, pool_gb, told, unset, monkeypatch):
    """Of a pool of 75 GiB 10% are 7.5, and the plan takes 70 of it."""
    monkeypatch.setattr("sppo_jax.hardware.capacity.jaxlib_version", lambda: version)
    monkeypatch.setenv(env.FRACTION, "0.9")
    monkeypatch.setattr(compat, "device_pool_bytes", lambda: pool_gb * GiB)
    monkeypatch.setattr(env, "_running_platform", lambda: "gpu")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        env.check_memory_limits(a_plan(host_gb=0))
    assert ["plan again with hardware.hbm_spare=0.1, or install jax >= 0.12" in str(one.message) for one in caught] == (
        [True] * told
    )


def test_a_limit_that_is_no_number_is_refused(unset, monkeypatch):
    monkeypatch.setenv(env.HOST_LIMIT, "64G")
    monkeypatch.setenv(env.FRACTION, "0.9")
    monkeypatch.setattr(env, "_running_platform", lambda: "gpu")
    with pytest.raises(ValueError, match="LIMIT_GB must be a whole number of GB, got '64G'"):
        env.check_memory_limits(a_plan(host_gb=30))


def test_a_process_with_gpus_that_is_not_prepared_is_told_once(unset, monkeypatch):
    monkeypatch.setattr(env, "_running_platform", lambda: "gpu")
    monkeypatch.setattr(compat, "device_pool_bytes", lambda: GiB)
    plan, model = a_plan(host_gb=90, mesh=(1, 1, 1)), build_model(config_from_dict(SETTINGS), abstract=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(2):
            value_and_grad(plan, model)
    told = [str(one.message) for one in caught]
    assert len(told) == 1 and "call sppo_jax.prepare_process(plan) first" in told[0], told


def test_preparing_says_what_it_has_set(unset):
    plan = a_plan(host_gb=30)
    assert prepare_process(plan, trains=False) == {env.FRACTION: "0.95", env.HOST_LIMIT: "30"}
    assert prepare_process(plan, trains=False) == {}


def test_importing_any_module_and_making_a_mesh_change_one_flag_of_the_environment():
    code = f"""
import importlib, os, pkgutil
before = dict(os.environ)
import sppo_jax
for module in pkgutil.walk_packages(sppo_jax.__path__, "sppo_jax."):
    importlib.import_module(module.name)
from sppo_jax.config import config_from_dict
config = config_from_dict({SETTINGS!r})
plan = sppo_jax.make_plan(config)
sppo_jax.make_mesh(plan)
sppo_jax.value_and_grad(plan, sppo_jax.build_model(config, abstract=True))
after = {{name: value for name, value in os.environ.items() if before.get(name) != value}}
assert after in ({{}}, {{"XLA_FLAGS": "{env.YNN_FLAG}="}}), after
assert before.keys() <= os.environ.keys()
print("the same")
"""
    out, errors = run(code)
    assert out.split() == ["the", "same"], errors


def test_value_and_grad_checks_the_limits(unset, monkeypatch):
    monkeypatch.setattr(env, "_running_platform", lambda: "gpu")
    monkeypatch.setenv(env.FRACTION, "0.9")
    plan = a_plan(host_gb=0, hbm_gb=1, mesh=(1, 1, 1))
    monkeypatch.setattr(compat, "device_pool_bytes", lambda: GiB - 1)
    with pytest.warns(UserWarning, match="needs 1 GiB of a GPU") as caught:
        value_and_grad(plan, build_model(config_from_dict(SETTINGS), abstract=True))
    assert caught[0].filename == __file__


def test_processes_that_ask_for_devices_before_they_plan_allow_all(unset, monkeypatch):
    """The mesh of several processes follows from their devices."""
    seen, devices = {}, jax.local_devices()
    monkeypatch.setattr(distributed, "num_processes", lambda: 2)
    monkeypatch.setattr(distributed, "exchange", lambda text: [text, text])
    monkeypatch.setattr(jax, "local_devices", lambda: seen.update(given()) or devices)
    distributed.cluster(config_from_dict(SETTINGS))
    assert seen == {env.FRACTION: "0.95", env.HOST_LIMIT: "2000"}


def test_eval_sets_the_share_before_it_asks_for_devices(unset, monkeypatch):
    from sppo_jax.commands import eval as command
    from sppo_jax.train import evaluate_saved
    from sppo_jax.train.checkpoints import read as checkpoint_read

    def stop(saved, overrides):
        raise ValueError(f"at the first question for devices: {given()}")

    monkeypatch.setattr(checkpoint_read, "find_checkpoint", lambda path: path)
    monkeypatch.setattr(checkpoint_read, "read_run", lambda path: {})
    monkeypatch.setattr(command, "_simulate", lambda saved, overrides: None)
    monkeypatch.setattr(evaluate_saved, "plan_for_devices", stop)
    with pytest.raises(ValueError, match=r"devices: \{'XLA_CLIENT_MEM_FRACTION': '0.95'\}"):
        command.run(["run"])


def test_train_sets_the_limits_before_the_backend_starts(tmp_path):
    """A process of its own, stopped right behind the first question for devices, which jax finds by itself.

    It believes in a driver, without which a run with CUDA's wheels leaves out GPUs and their limits.
    """
    np.save(tmp_path / "tokens.npy", (np.arange(1000) % 23).astype(np.uint16))
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(SETTINGS))
    code = f"""
import json, os, sys
from unittest import mock
from sppo_jax import cli
from sppo_jax.processes import environment
from sppo_jax.config import load_config
from sppo_jax.search.make import make_plan
from sppo_jax.train import setup
os.chdir({str(tmp_path)!r})
values = make_plan(load_config("tiny.yaml")).to_dict()
values["predicted"]["host_bytes"] = [100 * 2**30] * values["mesh"]["pipe"]
json.dump(values, open("plan.json", "w"))
words = ["train", "tiny.yaml", "--run-dir", "run", "--plan", "plan.json"]
with mock.patch.object(environment, "machine_gb", lambda: 2000), \\
     mock.patch.object(environment, "_driver_loads", lambda: True), \\
     mock.patch.object(setup, "local_rows", side_effect=ValueError("stop")):
    code = cli.main(words)
print(json.dumps([code, environment._running_platform(), dict(os.environ)]))
"""
    out, errors = run(code)
    assert out, errors
    code, platform, environ = json.loads(out.splitlines()[-1])
    assert platform and (code, errors.splitlines()[-1]) == (2, "stop")
    assert environ[env.FRACTION] == "0.95" and environ[env.HOST_LIMIT] == "101", errors  # and a copy of the tiny state
