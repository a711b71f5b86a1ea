"""The files of a release in empty environments: the sdist builds the wheel, and the wheel alone does what pages say.

Environments are filled from the package index, for each Python that is there. Nothing of this checkout but its newest
commit is used.
"""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from hf_configs import PUBLISHED

ROOT = Path(__file__).parents[1]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
PYTHONS = [name for name in ("python3.11", "python3.12") if shutil.which(name)]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]


def ran(*words, cwd=None, code=0):
    """Returns what a command prints on both streams; it must end with `code`."""
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "XLA_FLAGS", "JAX_PLATFORMS")}
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, cwd=cwd, env=env, timeout=2400)
    assert done.returncode == code, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout + done.stderr


def new_environment(python, folder, *packages):
    """Makes an environment with packages and nothing else; returns its folder of programs."""
    ran(python, "-m", "venv", folder)
    ran(folder / "bin" / "python", "-m", "pip", "install", "--quiet", "--no-compile", *packages)
    return folder / "bin"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel that the sdist of the newest commit builds."""
    top = tmp_path_factory.mktemp("release")
    ran("git", "clone", "--quiet", "--depth", "1", f"file://{ROOT}", top / "clone")
    bin_ = new_environment(sys.executable, top / "venv", *EXTRAS["release"])
    ran(bin_ / "python", "-m", "build", "--sdist", "--outdir", top / "dist", top / "clone")
    (sdist,) = (top / "dist").glob("sppo_jax-*.tar.gz")
    shutil.unpack_archive(sdist, top / "unpacked")
    (source,) = (top / "unpacked").iterdir()
    ran(bin_ / "python", "-m", "build", "--wheel", "--outdir", top / "dist", source)
    (wheel,) = (top / "dist").glob("sppo_jax-*.whl")
    return wheel


@pytest.fixture(scope="module", params=PYTHONS)
def sppo(request, wheel, tmp_path_factory):
    """`sppo` of an environment of one Python with the wheel and what it requires."""
    if subprocess.run([request.param, "-c", ""], capture_output=True).returncode:
        pytest.skip(f"{request.param} has a name here and no interpreter")
    return new_environment(request.param, tmp_path_factory.mktemp(request.param), wheel) / "sppo"


def test_the_wheel_alone_plans_and_writes_configs(sppo, tmp_path):
    said = ran(sppo, "plan", "llama3-8b-128k-8gpu.yaml", "--cluster", "h100:1x8", cwd=tmp_path)
    assert "llama3.1-8b, 131,072 tokens per step, on h100:1x8 (8 devices)" in said
    listed = ran(sppo, "configs", cwd=tmp_path)
    assert all(path.name in listed for path in (ROOT / "configs").rglob("*.yaml"))
    assert "16 sequences of 131,072 tokens" in ran(
        sppo, "plan", "sft-agent-traces-128k.yaml", "--cluster", "h100:1x8", cwd=tmp_path
    )
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text(json.dumps(PUBLISHED["llama3.2-1b"]))
    assert "mine.yaml" in ran(sppo, "init", "hf:llama", "--cluster", "h100:1x8", "--out", "mine.yaml", cwd=tmp_path)
    assert "on h100:1x8 (8 devices)" in ran(sppo, "plan", "mine.yaml", cwd=tmp_path)


def test_the_wheel_alone_trains_the_quickstart(sppo, tmp_path):
    run = ("train", "quickstart.yaml", "train.steps=2", "optimizer.warmup_steps=0", "--run-dir", "run")
    said = ran(sppo, *run, cwd=tmp_path)
    assert "4,096 tokens per step" in said and (tmp_path / "run" / "report.html").exists()


def test_a_planner_alone_is_four_packages(wheel, tmp_path):
    bin_ = new_environment(sys.executable, tmp_path / "venv", "--no-deps", wheel, "numpy", "pyyaml", "tqdm")
    listed = ran(bin_ / "python", "-m", "pip", "list", "--format=freeze").split()
    assert {line.partition("==")[0].lower() for line in listed} - {"pip", "setuptools"} == {
        *("sppo_jax", "numpy", "pyyaml", "tqdm")
    }
    said = ran(bin_ / "sppo", "plan", "llama3-8b-128k-8gpu.yaml", "--cluster", "h100:1x8", cwd=tmp_path)
    assert "verdict         fits" in said
    said = ran(bin_ / "sppo", "check", "--devices", "cpu:2", cwd=tmp_path, code=2)
    assert (
        said.startswith("sppo check must find its packages, got no jax; pip install 'jax>=") and said.count("\n") == 1
    )
