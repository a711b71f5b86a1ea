"""Every example runs, and shows what it says."""

import importlib.util
from pathlib import Path

import jax
import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def as_users_have_it():
    """Promotes dtypes as jax does by default."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def test_every_example_is_run_by_a_test():
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    text = "".join(path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_*.py"))
    assert names and not [name for name in names if f'"{name}' not in text]


def test_a_plain_nnx_loop_learns_to_count():
    losses = load("nnx_loop").main()
    assert losses[-1] < 0.3 * losses[0]


def test_attention_alone_is_that_of_one_device():
    errors = load("attention_alone").main()
    assert set(errors) == {"ring", "ulysses"} and max(errors.values()) < 1e-4


@pytest.mark.slow
def test_linen_trains_our_decoder_and_our_decoder_linens_block():
    losses, (pipeline, dense) = load("linen_model").main()
    assert losses[-1] < 0.5 * losses[0]
    assert abs(pipeline - dense) < 1e-4 * dense
