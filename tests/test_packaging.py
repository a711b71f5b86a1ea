"""What a wheel holds and what it does outside the checkout; the constraints, and the extras that pages name."""

import email
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import distribution
from pathlib import Path

import pytest

from sppo_jax.cli import COMMANDS
from sppo_jax.version import __version__

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# A Hugging Face config.json.
_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
_COPIED = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "sppo_jax", "configs")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder with the wheel of this checkout, installed without its dependencies."""
    source, site = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    for name in _COPIED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
        copy(ROOT / name, source / name)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps")
    done = subprocess.run([*pip, "--target", str(site), str(source)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return site


def sppo(site, folder, *words):
    env = {**os.environ, "PYTHONPATH": str(site)}
    run = (sys.executable, "-m", "sppo_jax.cli", *words)
    return subprocess.run(run, capture_output=True, text=True, cwd=folder, env=env, timeout=120)


def test_the_wheel_plans_a_shipped_config_outside_the_checkout(site, tmp_path):
    assert all((site / "sppo_jax" / name).exists() for name in ("check/losses.json", "hardware/h100.json"))
    assert {path.name for path in (site / "sppo_jax" / "configs").rglob("*.yaml")} == {
        path.name for path in (ROOT / "configs").rglob("*.yaml")
    }
    assert sorted(path.name for path in (site / "sppo_jax" / "flex").rglob("*.csv"))
    assert sppo(site, tmp_path, "--version").stdout == f"sppo_jax {__version__}\n"
    for name in ("quickstart.yaml", "configs/quickstart.yaml"):
        done = sppo(site, tmp_path, "plan", name)
        assert done.returncode == 0 and "4,096 tokens per step" in done.stdout, done.stderr
    done = sppo(site, tmp_path, "plan", "nothing.yaml")
    assert done.returncode == 2 and "got nothing.yaml" in done.stderr


def test_the_wheel_says_who_what_and_which(site):
    (metadata,) = site.glob("sppo_jax-*.dist-info/METADATA")
    said = email.message_from_string(metadata.read_text(encoding="utf-8"))
    assert said["Version"] == __version__ and said["Author"] == "The sppo_jax developers"
    assert "long-context" in said["Keywords"].split(",") and said["License-Expression"] == "Apache-2.0"
    kinds = said.get_all("Classifier")
    assert {"Typing :: Typed", "Programming Language :: Python :: 3.12"} <= set(kinds)
    assert (site / "sppo_jax" / "py.typed").exists()


def test_the_version_has_one_place():
    literal = re.compile(rf"""["']{re.escape(__version__)}["']""")
    files = [ROOT / "pyproject.toml", ROOT / "setup.py", *(ROOT / "sppo_jax").rglob("*.py")]
    assert [path.name for path in files if literal.search(path.read_text(encoding="utf-8"))] == ["version.py"]
    assert PROJECT["dynamic"] == ["version"] and "version" not in PROJECT


# What is beside this package where it only plans, and the words of each command there; the others need jax or scipy.
_ALONE = ("numpy", "pyyaml", "tqdm")
_PLANS = {
    "plan": ["llama3-8b-128k-8gpu.yaml", "--cluster", "h100:1x8"],
    "init": ["hf:llama", "--cluster", "h100:1x8", "--out", "mine.yaml"],
    "configs": [],
    "data": ["quickstart.yaml", "data.source=text.txt"],
    "report": ["run"],
}
_NEEDS = {
    "check": ["--quick", "--devices", "cpu:2"],
    "train": ["quickstart.yaml"],
    "eval": ["run"],
    "convert": ["from-hf", "llama", "out"],
    "fit": ["quickstart.yaml"],
    "profile": [],
    "profile-trace": ["quickstart.yaml"],
    "flex": ["quickstart.yaml"],
}
_RUN_EACH = """
import contextlib, io, json, sys
from sppo_jax.cli import main

said = []
for words in json.loads(sys.argv[1]):
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        said.append([main(words), out.getvalue()])
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def alone(site, tmp_path_factory):
    """Runs commands in one Python that finds the wheel, numpy, pyyaml, tqdm and no other package; an empty folder."""
    packages, folder = tmp_path_factory.mktemp("packages"), tmp_path_factory.mktemp("alone")
    for name in _ALONE:
        found = distribution(name)
        for top in {Path(str(file)).parts[0] for file in found.files} - {".."}:
            (packages / top).symlink_to(found.locate_file(top))
    (folder / "llama").mkdir()
    (folder / "llama" / "config.json").write_text(json.dumps(_LLAMA))
    (folder / "text.txt").write_text("one word and then another\n\n" * 2000)

    def run(*commands):
        env = {**os.environ, "PYTHONPATH": f"{site}:{packages}", "XDG_CACHE_HOME": str(folder / "cache")}
        words = (sys.executable, "-S", "-c", _RUN_EACH, json.dumps(commands))  # -S: no other folder of packages
        done = subprocess.run(words, capture_output=True, text=True, cwd=folder, env=env, timeout=120)
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(done.stdout)

    return run


def test_a_planner_alone_plans_inits_and_reads_data(alone):
    commands = [[name, *words] for name, words in _PLANS.items()]
    plan, init, configs, data, report = alone(*commands)
    assert plan[0] == 0 and "131,072 tokens per step, on h100:1x8" in plan[1], plan
    assert init[0] == 0 and "mine.yaml" in init[1], init
    assert configs[0] == 0 and "llama3-8b-128k-8gpu.yaml" in configs[1]
    assert data[0] == 0 and "tokens to train on in" in data[1], data
    assert report == [2, "RUN_DIR must be a run directory, got run (nothing there); name one that sppo train wrote\n"]
    again = ["plan", "mine.yaml", "--cluster", "h100:1x8"]
    assert alone(again)[0][0] == 0


def test_a_planner_alone_names_what_other_commands_need(alone):
    assert {*_PLANS, *_NEEDS} == set(COMMANDS)
    needed = [line for line in PROJECT["dependencies"] if re.match(r"[a-z]+", line).group() not in _ALONE]
    install = " ".join(f"'{line}'" for line in needed)
    for name, (code, said) in zip(_NEEDS, alone(*([name, *words] for name, words in _NEEDS.items())), strict=True):
        module = {"flex": "scipy", "convert": "flax"}.get(name, "jax")
        assert code == 2, said
        assert said == f"sppo {name} must find its packages, got no {module}; pip install {install}\n"


def test_the_users_own_file_wins(site, tmp_path):
    (tmp_path / "quickstart.yaml").write_text("model: mine\n")
    assert sppo(site, tmp_path, "plan", "quickstart.yaml").returncode == 2


def test_constraints_are_names_and_versions_that_suit_the_extras():
    lines = (ROOT / "constraints-py312.txt").read_text(encoding="ascii").splitlines()
    assert all(re.fullmatch(r"[a-z0-9._-]+==[0-9a-z.+!]+", line, re.IGNORECASE) for line in lines)
    names = {line.split("==")[0].lower().replace("_", "-") for line in lines}
    extras = PROJECT["optional-dependencies"]
    asked = [
        *PROJECT["dependencies"],
        *(line for extra in ("data", "hf", "track", "cuda", "dev") for line in extras[extra]),
    ]
    wanted = {re.match(r"[A-Za-z0-9._-]+", line).group().lower().replace("_", "-") for line in asked}
    assert wanted - names == set()


def test_pages_name_extras_that_exist():
    pages = [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        ROOT / "Dockerfile",
        *(ROOT / "sppo_jax").rglob("*.py"),
    ]
    for page in pages:
        for extras in re.findall(r"(?:-e '|\")\.\[([a-z,-]+)\]", page.read_text(encoding="utf-8")):
            assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"]), page


def test_make_refuses_an_old_python_in_one_line(tmp_path):
    old = tmp_path / "python3.10"
    old.write_text("#!/bin/sh\nexit 1\n")  # what the Makefile asks of a Python, an old one answers with 1
    old.chmod(0o755)
    done = subprocess.run(["make", "quickstart", f"PYTHON={old}"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and not (ROOT / ".venv-python3.10").exists()
    line = done.stderr.splitlines()[0]
    assert line == f"needs Python 3.11 or newer with venv, got {old}; install one, or name one: make PYTHON=PATH"
    assert PROJECT["requires-python"] == ">=3.11", "pip refuses an older Python by this line"
