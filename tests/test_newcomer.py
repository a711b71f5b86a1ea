"""The newcomer's hour: every command of README and the start pages at sizes of a CPU, from a clone and from a wheel.

An environment is made and filled from the package index for each Python that is there. Nothing of this checkout but its
newest commit is used.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hf_folders import write_folder

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "start").glob("*.md"))]
COMMAND = re.compile(r"^(?:\$ )?((?:sppo|launch/[a-z_.]+|sbatch|sky|kubectl|hf) .*)$", re.MULTILINE)
PYTHONS = [name for name in ("python3.11", "python3.12", "python3.13") if shutil.which(name)]
# Seconds after which a command hangs; some take a quarter of an hour on a busy machine.
LONG_S = 3600
# What a command needs to be one of seconds on a CPU.
SMALL = [
    *("sequence.length=64", "train.steps=2", "train.devices=cpu:1", "hardware.cluster=", "optimizer.warmup_steps=0"),
    *("mesh=", "schedule=", "stash=", "sequence.chunks=", "optimizer.place=", "data.validation_fraction=0"),
]
TINY = "model={vocab_size: 257, hidden_size: 16, num_layers: 2, num_heads: 2, mlp_size: 32}"
# The first line of each command, as a regular expression.
FIRST = {
    "sppo plan": r"llama3\S*, [\d,]+ tokens per step, on \S+ \(\d+ devices?\)",
    "sppo data": r"[\d,.]+ ?M? tokens to train on in [\d,]+ documents, as sequences of 64: ",
    "sppo train": r"(llama|2 layers, 16 wide), 64 tokens per step, on cpu:1x1 \(1 device\)",
    "sppo convert": r"wrote [\d,]+ parameters to out in ",
    "launch/": r".*(ssh|python|gcloud|xpk|sppo).*",
}


def commands_of(page):
    """Returns the commands of a page as words, comments cut off."""
    lines = COMMAND.findall(page.read_text(encoding="utf-8"))
    return [shlex.split(line, comments=True) for line in lines]


def for_a_cpu(words):
    """Returns the words of a command at a size of a CPU; None where what it needs is not on this machine."""
    program, *rest = words
    if program == "hf" or program in ("sbatch", "sky", "kubectl"):
        return None
    if program != "sppo" or rest[0] in ("plan", "convert"):
        return words
    rest = [word for word in rest if not word.startswith(("sequence.length=", "data.source=/"))]
    model = [] if any(word.startswith("model=") for word in rest) else [TINY]
    return ["sppo", *rest, *model, *SMALL, "data.source=books/*.jsonl"]


def make_place(place):
    """Writes a small model and books, as a newcomer has them."""
    write_folder(place / "llama", qkv_bias=False)
    (place / "books").mkdir()
    rows = [{"text": f"Book {number} says one word and then another one. " * 4} for number in range(12)]
    (place / "books" / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def pip(python, *words):
    done = subprocess.run([python, "-m", "pip", "--quiet", *words], capture_output=True, text=True, timeout=LONG_S)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module", params=PYTHONS)
def environment(request, tmp_path_factory):
    """A clone, and an environment of a Python with what the extras of a CPU ask for, but without this project."""
    if subprocess.run([request.param, "-c", ""], capture_output=True).returncode:
        pytest.skip(f"{request.param} has a name here and no interpreter")
    top = tmp_path_factory.mktemp(request.param)
    subprocess.run(["git", "clone", "--quiet", "--depth", "1", f"file://{ROOT}", str(top / "clone")], check=True)
    subprocess.run([request.param, "-m", "venv", str(top / "venv")], check=True)
    pip(top / "venv" / "bin" / "python", "install", f"{top / 'clone'}[data,hf]")
    return top


def test_every_kind_of_command_is_known():
    kinds = {words[0] for page in PAGES for words in commands_of(page)}
    assert kinds <= {"sppo", "hf", "sbatch", "sky", "kubectl"} | {
        f"launch/{path.name}" for path in (ROOT / "launch").iterdir()
    }
    run = [words for page in PAGES for words in commands_of(page) if for_a_cpu(words)]
    assert len(run) >= 14 and all(any(" ".join(words).startswith(known) for known in FIRST) for words in run)


@pytest.mark.slow
@pytest.mark.timeout(4 * LONG_S)  # an environment is filled from the package index
@pytest.mark.parametrize("how", ["clone", "wheel"])
def test_every_command_of_the_first_pages_works(environment, how, tmp_path):
    python = environment / "venv" / "bin" / "python"
    clone = environment / "clone"
    pip(python, "install", "--no-deps", "--force-reinstall", *(["-e"] if how == "clone" else []), str(clone))
    place = clone if how == "clone" else tmp_path / "place"
    place.mkdir(exist_ok=True)
    make_place(place)
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "XLA_FLAGS", "JAX_PLATFORMS")}
    env |= {"PATH": f"{python.parent}:{env['PATH']}", "DRY_RUN": "1", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    for page in PAGES:
        for name in ("run", "out"):
            shutil.rmtree(place / name, ignore_errors=True)
        for words in filter(None, map(for_a_cpu, commands_of(page))):
            if words[0] != "sppo" and how == "wheel":
                continue  # launch/ is in a clone alone
            done = subprocess.run(words, cwd=place, env=env, capture_output=True, text=True, timeout=LONG_S)
            said = (words, done.stdout[-1500:], done.stderr[-1500:])
            assert done.returncode == 0, said
            kind = next(kind for kind in FIRST if " ".join(words).startswith(kind))
            assert re.match(FIRST[kind], done.stdout.splitlines()[0]), said
    shutil.rmtree(place / "llama")
    shutil.rmtree(place / "books")


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-m", "slow", "-n", "0", "-q", "-s"]))
