"""Eight simulated CPU devices for every test, set up before jax is imported."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
# A loaded machine may run eight simulated devices one after another: the default limit on a collective is too short.
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
        "--xla_cpu_collective_call_terminate_timeout_seconds=600",
    ]
).strip()
os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"

import pytest  # noqa: E402


@pytest.fixture(scope="session", autouse=True)
def cache_home(tmp_path_factory):
    """Keep what tests tokenize out of the user's cache."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def x64():
    """Enable float64 for the length of one test."""
    import jax

    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)
