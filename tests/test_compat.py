"""What differs between versions of jax: where host offload may run, and what the compiler is told."""

import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from distributed_cases import environment

from sppo_jax import compat
from sppo_jax.compat import (
    MIN_JAXLIB_FOR_GPU_OFFLOAD,
    backend_problem,
    check_cudnn,
    check_offload,
    compiler_options,
    cudnn_version,
    deviceless_flags,
    in_host_memory,
    jaxlib_version,
    to_device,
    to_host,
    warn_of_graphs,
)

GRAPHS = "xla_gpu_enable_command_buffer"


@pytest.mark.parametrize("backend", ["gpu", "cuda", "rocm"])
@pytest.mark.parametrize("version", [(0, 10, 2), (0, 11, 0), (0, 9, 9)])
def test_offload_on_a_gpu_is_refused_where_its_gradients_may_be_wrong(backend, version):
    got = ".".join(map(str, version))
    with pytest.raises(ValueError, match=f"jaxlib >= 0.11.1.*, got {got}; .*stash.inputs=keep"):
        check_offload(backend, True, version)
    check_offload(backend, False, version)


@pytest.mark.parametrize("version", [(0, 11, 1), (0, 11, 2), (0, 12, 0), (1, 0, 0)])
def test_offload_on_a_gpu_is_allowed_from_the_first_sound_version(version):
    check_offload("gpu", True, version)


@pytest.mark.parametrize("backend", ["cpu", "tpu"])
def test_offload_elsewhere_is_allowed(backend):
    check_offload(backend, True, (0, 10, 2))


def test_the_installed_version_is_judged_by_default():
    version = jaxlib_version()
    assert len(version) == 3 and all(isinstance(part, int) for part in version)
    if version < MIN_JAXLIB_FOR_GPU_OFFLOAD:
        with pytest.raises(ValueError, match="offload on a GPU"):
            check_offload("cuda", True)
    else:
        check_offload("cuda", True)


def a_device(platform="gpu", runtime="a_runtime"):
    return SimpleNamespace(platform=platform, client=SimpleNamespace(runtime_type=runtime))


@pytest.mark.parametrize("version", [(9, 10, 0), (9, 10, 1), (9, 13, 0), (9, 13, 1), (9, 14, 0), (9, 14, 2)])
def test_a_cudnn_that_fails_is_refused_in_one_line(version):
    got = ".".join(map(str, version))
    with pytest.raises(ValueError, match=f"must not run on.*, got {got}; run pip install .*model.kernel=block") as line:
        check_cudnn(a_device(), version)
    assert "\n" not in str(line.value)
    check_cudnn(a_device("cpu"), version)
    check_cudnn(a_device(runtime="compile_only_runtime"), version)


@pytest.mark.parametrize("version", [(9, 9, 0), (9, 10, 2), (9, 12, 0), (9, 15, 0), (9, 17, 1)])
def test_an_old_cudnn_is_warned_of(version):
    with pytest.warns(UserWarning, match=f"9.18 or newer .*got {'.'.join(map(str, version))}; run pip install"):
        check_cudnn(a_device(), version)


@pytest.mark.parametrize("version", [(9, 18, 0), (9, 28, 1), (10, 0, 0)])
def test_a_new_cudnn_is_taken(version, recwarn):
    check_cudnn(a_device(), version)
    assert not recwarn.list


@pytest.mark.parametrize("number,version", [(92801, (9, 28, 1)), (91300, (9, 13, 0)), (100203, (10, 2, 3))])
def test_the_loaded_cudnn_is_judged_by_default(number, version, monkeypatch):
    from jax._src import lib

    library = SimpleNamespace(__name__="jax_cuda12_plugin._versions", cudnn_get_version=lambda: number)
    monkeypatch.setattr(lib, "cuda_versions", library)
    assert cudnn_version() == version
    if version == (9, 13, 0):
        with pytest.raises(ValueError, match="got 9.13.0; run pip install 'nvidia-cudnn-cu12>=9.18', or"):
            check_cudnn(a_device())


def test_without_cuda_there_is_no_cudnn_to_judge(monkeypatch):
    from jax._src import lib

    monkeypatch.setattr(lib, "cuda_versions", None)
    assert cudnn_version() is None
    check_cudnn(a_device())


def test_a_missing_cudnn_is_said_in_one_line(monkeypatch):
    from jax._src import lib

    def missing():
        raise RuntimeError("dlopen failed\nno libcudnn.so.9")

    monkeypatch.setattr(lib, "cuda_versions", SimpleNamespace(cudnn_get_version=missing))
    with pytest.raises(ValueError, match="must find cuDNN, got: dlopen failed no libcudnn.so.9; run pip install"):
        check_cudnn(a_device())


def test_devices_without_host_memory_are_refused():
    class Device:
        platform = "npu"
        client = SimpleNamespace(runtime_type="a_runtime")

        def addressable_memories(self):
            return [SimpleNamespace(kind="device")]

    sharding = SimpleNamespace(mesh=SimpleNamespace(devices=np.array([Device()])))
    with pytest.raises(ValueError, match=r"must have devices with pinned_host memory, got npu with device; use optim"):
        in_host_memory(sharding)


def test_the_compiler_is_told_something_only_on_a_gpu():
    assert compiler_options("cpu", True, 8) is None
    assert set(compiler_options("cuda", False, 1)) == {"xla_gpu_enable_latency_hiding_scheduler"}
    assert "xla_gpu_enable_latency_hiding_scheduler" in compiler_options("cuda", True, 1)
    more = set(compiler_options("cuda", True, 1, many_copies=True)) - set(compiler_options("cuda", True, 1))
    assert more == {"xla_gpu_experimental_parallel_async_compute_limit"}
    old, new = (
        set(compiler_options("cuda", True, 1, tables=True, version=version)) for version in ((0, 11, 2), (0, 12))
    )
    assert new - old == {"xla_gpu_experimental_enable_dynamic_slice_table_offsets"}  # XLA refuses what it does not know


def test_several_gpus_have_no_cuda_graphs_unless_the_user_asks(monkeypatch, recwarn):
    # XLA takes the text: "NONE" it refuses.
    assert jax.jit(lambda x: x + 1, compiler_options={GRAPHS: ""})(1.0) == 2.0
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    several, one = (compiler_options("gpu", False, count) for count in (8, 1))
    assert several == {**one, GRAPHS: ""} and GRAPHS not in one
    warn_of_graphs("gpu", 8)
    monkeypatch.setenv("XLA_FLAGS", f"--xla_force_host_platform_device_count=8 --{GRAPHS}=")
    assert compiler_options("gpu", False, 8) == one
    warn_of_graphs("gpu", 8)
    assert not recwarn.list  # the same program as without the flag


def test_cuda_graphs_that_the_user_asks_for_are_warned_of_on_several_gpus(monkeypatch, recwarn):
    monkeypatch.setenv("XLA_FLAGS", f"--{GRAPHS}=FUSION --{GRAPHS}=+WHILE")
    assert GRAPHS not in compiler_options("gpu", False, 8)
    warn_of_graphs("gpu", 1)
    warn_of_graphs("cpu", 8)
    assert not recwarn.list
    with pytest.warns(UserWarning, match=rf"program of 8 GPUs .*, got --{GRAPHS}=\+WHILE .*; remove the flag") as line:
        warn_of_graphs("gpu", 8)
    assert len(line) == 1 and "\n" not in str(line[0].message)


def test_copies_change_the_type_and_keep_the_numbers():
    x = jnp.arange(6.0).reshape(2, 3)
    np.testing.assert_array_equal(jax.jit(lambda x: to_device(to_host(x)))(x), x)
    assert "<host>" in str(jax.eval_shape(to_host, x)) or "host" in str(jax.make_jaxpr(to_host)(x))
    assert "<host>" in str(jax.make_jaxpr(to_host)(x).out_avals[0])
    assert "<host>" not in str(jax.make_jaxpr(lambda x: to_device(to_host(x)))(x).out_avals[0])


def test_the_devices_of_these_tests_take_many_programs_at_once():
    """With a thread a device, as simulated devices have by themselves, this stands still without end."""

    def around(x_D):
        for _ in range(8):
            x_D = jax.lax.ppermute(x_D, "ring", [(i, (i + 1) % 8) for i in range(8)]) + jax.lax.psum(x_D, "ring")
        return x_D / 9.0**8

    mesh = jax.make_mesh((8,), ("ring",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("ring")
    step, x_D = jax.jit(jax.shard_map(around, mesh=mesh, in_specs=spec, out_specs=spec)), jnp.ones(8)
    largest = []
    for _ in range(400):
        x_D = step(x_D)
        largest.append(jnp.max(x_D))
    np.testing.assert_allclose([float(x) for x in largest], 1.0, rtol=1e-4)


@pytest.mark.parametrize("version", [(0, 10, 2), (0, 11, 0), (0, 12, 0), (1, 0, 0)])
def test_most_versions_compile_without_a_gpu_as_with_one(version):
    assert deviceless_flags(version) == {"--xla_gpu_autotune_level": 0}


@pytest.mark.parametrize("version", [(0, 11, 1), (0, 11, 2)])
def test_two_versions_fuse_products_as_a_newer_one_does_without_a_gpu(version):
    assert deviceless_flags(version) == {"--xla_gpu_autotune_level": 0, "--xla_gpu_experimental_gemm_fusion_v2": "true"}


@pytest.mark.parametrize(
    "platforms",
    ["cuda", "there-is-none,cpu", *(pytest.param(name, marks=pytest.mark.slow) for name in ("rocm", "there-is-none"))],
)
def test_a_platform_that_is_not_there_is_wrong_input(platforms, tmp_path):
    """In a process of its own, because a backend starts once."""
    command = [sys.executable, "-m", "sppo_jax.cli", "profile", "--quick", "--out", tmp_path / "profile.json"]
    own = environment(JAX_PLATFORMS=platforms, XLA_FLAGS="")
    done = subprocess.run(command, env=own, capture_output=True, text=True)
    if done.returncode == 0 and platforms in ("cuda", "rocm"):
        pytest.skip(f"this machine has {platforms}")
    assert done.returncode == 2, done.stderr
    line = done.stderr.splitlines()[-1]  # a plugin without its libraries logs more
    assert f"got JAX_PLATFORMS={platforms} (" in line and "unset JAX_PLATFORMS" in line
    assert backend_problem(RuntimeError("Unable to initialize")) is None


def test_in_its_context_host_memory_is_device_memory():
    found = []

    def look(x):
        found.append(jax.typeof(compat.to_host(x)).memory_space)
        return x

    jax.jit(look).trace(jnp.zeros(2))
    with compat.host_is_device():
        jax.jit(look).trace(jnp.zeros(2))
    assert found == [jax.memory.Space.Host, jax.memory.Space.Device]


@pytest.mark.parametrize(
    ("version", "text"),
    [
        ((0, 10, 2), "on GPUs it cannot offload to the host"),
        ((0, 11, 1), "jaxlib 0.11.1 on Python 3."),
    ],
)
def test_the_install_says_what_its_jax_cannot_do(version, text):
    line = compat.installed_text(version)
    assert text in line and "\n" not in line and ("cannot" in line) == (version == (0, 10, 2))
