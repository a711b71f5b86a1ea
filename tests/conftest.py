"""Eight simulated CPU devices for every test, set up before jax is imported."""

import gc
import os
import signal

import pytest
from hypothesis import settings
from quick_flags import NUM_FRAMES, QUICK_XLA_FLAGS

from sppo_jax.processes.environment import simulate_devices

simulate_devices(8)
# Tests leave several programs in flight. With a thread a device these can wait for each other without end. With more,
# collectives that have no fixed order show it, as they would on a machine of many cores.
os.environ.setdefault("PJRT_NPROC", "64")
os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
# Small programs spend most time in compiling. A case that says so is compiled at the normal level.
os.environ["XLA_FLAGS"] += f" {QUICK_XLA_FLAGS}"
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = NUM_FRAMES
# Else every process that a test starts would compile the package's Python again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Tracing makes many objects that live long. By default Python looks through them so often that it takes a third longer.
gc.set_threshold(200_000, 20, 20)

# Under nohup this signal is ignored, and every program that a test starts would ignore it too.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# An example has no time limit, because a loaded machine exceeds any limit.
settings.register_profile("no_deadline", deadline=None)
settings.load_profile("no_deadline")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """One worker runs a file, which makes and compiles once what its tests share; files of one group share more."""
    for item in items:
        if not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group(item.path.stem))


def pytest_collection_finish(session):
    """Refuses a pytest under which xdist spreads the tests of a group, which then make their fixtures twice."""
    gc.freeze()  # what is imported stays
    grouped = (item for item in session.items if item.get_closest_marker("xdist_group"))
    if getattr(session.config.option, "loadgroup", False) and any("@" not in item.nodeid for item in grouped):
        raise pytest.UsageError(f"pytest-xdist must see groups of tests, got none under pytest {pytest.__version__}")


@pytest.fixture(scope="session", autouse=True)
def cache_home(tmp_path_factory):
    """Keeps what tests tokenize out of the user's cache."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def x64():
    """Enables float64 for the length of one test."""
    import jax

    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


@pytest.fixture(scope="module")
def compiled_once(tmp_path_factory):
    """Programs that several runs share, of whichever modules and test processes, are compiled once."""
    import jax

    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    jax.config.update("jax_compilation_cache_dir", str(base / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    yield
    jax.config.update("jax_compilation_cache_dir", None)
