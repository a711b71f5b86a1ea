"""Every example runs, and shows what it says."""

import importlib.util
import json
from pathlib import Path

import jax
import pytest
from quick_flags import QUICK_XLA_FLAGS

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


def test_the_notebook_runs_at_tiny_sizes(tmp_path, monkeypatch):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    # The kernel is a process of its own, with the devices that the notebook asks for.
    settings = {"SPPO_TINY": "1", "SPPO_RUNS": str(tmp_path), "XLA_FLAGS": QUICK_XLA_FLAGS}
    for name, value in {**settings, "JAX_NUMPY_DTYPE_PROMOTION": "standard"}.items():
        monkeypatch.setenv(name, value)
    notebook = nbformat.read(EXAMPLES / "from-256-to-2048-tokens.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)  # figures are those of the page
    nbclient.NotebookClient(notebook, timeout=500, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    drawn = [output.data["image/svg+xml"] for output in outputs if output.output_type == "display_data"]
    assert ["2,048 tokens" in drawn[0], "grow" in drawn[1], len(drawn)] == [True, True, 2]
    figures = json.loads((tmp_path / "figures.json").read_text(encoding="utf-8"))
    assert all([each["distance"] for each in found] == [9, 33] for found in figures["right"].values())
    assert len(figures["right"]) == len(figures["curves"]) == len(figures["cpu_s"]) == 3
    assert all(
        points and seconds > 0
        for points, seconds in zip(figures["curves"].values(), figures["cpu_s"].values(), strict=True)
    )
