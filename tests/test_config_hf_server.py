"""hf:OWNER/NAME from end to end: processes whose HF_ENDPOINT is a server of this machine fetch a model from it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hf_configs import SMALL
from hub_server import model_hub  # noqa: F401

pytest.importorskip("huggingface_hub")
REPO = Path(__file__).parents[1]
COMMAND = "import sys; from sppo_jax.cli import main; sys.exit(main(sys.argv[1:]))"
PLAN = ("plan", "hf:owner/name", "--length", "4096", "--cluster", "h100:1x1")
FETCH = """
import sys
from sppo_jax.config.hf import hub
try:
    hub.fetch(hub.folder_of_config("owner/name"), weights=True, say=print)
except ValueError as error:
    sys.exit(str(error))
"""
WEIGHTS = bytes(range(256)) * 4096


@pytest.fixture
def hub(model_hub):  # noqa: F811
    model_hub.commit(
        config_json=json.dumps(SMALL).encode(),
        tokenizer_json=b"{}",
        model_safetensors=WEIGHTS,
        model_bin=b"not read",
        original__a_json=b"{}",
    )
    return model_hub


def start(hub, home, *words, **environ):
    """Starts a process of which the server is the hub."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    env |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "PYTHONPATH": str(REPO), "HF_HUB_DISABLE_XET": "1"} | environ
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, *words], env=env, cwd=home, stdout=pipe, stderr=pipe, text=True)


def end(process):
    out, errors = process.communicate(timeout=120)
    return process.returncode, out, errors


def fetched(hub):
    """Returns the files whose bytes were asked for."""
    return [path.rpartition("/")[2] for method, path, _ in hub.requests if method == "GET" and "/resolve/" in path]


def test_a_plan_asks_for_config_json_alone_and_needs_no_network_again(hub, tmp_path):
    status, out, errors = end(start(hub, tmp_path, "-c", COMMAND, *PLAN))
    assert (status, errors) == (0, "") and "4,096 tokens per step" in out
    assert fetched(hub) == ["config.json"]
    hub.requests.clear()
    status, again, errors = end(start(hub, tmp_path, "-c", COMMAND, *PLAN, HF_HUB_OFFLINE="1"))
    assert (status, again, errors, hub.requests) == (0, out, "", [])


def test_of_two_processes_one_fetches_and_the_other_waits(hub, tmp_path):
    hub.answers_after_s = 0.5
    both = [start(hub, tmp_path, "-c", FETCH) for _ in range(2)]
    assert [end(process)[0] for process in both] == [0, 0]
    assert sorted(fetched(hub)) == ["config.json", "model.safetensors", "tokenizer.json"]
    (folder,) = (tmp_path / "hub" / "models--owner--name" / "snapshots").iterdir()
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS and not (folder / "original").exists()


@pytest.mark.parametrize("token", ["", "hf_mine"])
def test_a_private_model_needs_its_token(hub, tmp_path, token):
    hub.token = "hf_mine"
    status, out, errors = end(start(hub, tmp_path, "-c", FETCH, **({"HF_TOKEN": token} if token else {})))
    if token:
        assert status == 0 and out.startswith("fetching owner/name from the hub: 1 MiB into "), (out, errors)
        return
    assert status == 1 and errors.count("\n") == 1, errors
    assert "for a private model run hf auth login or set HF_TOKEN" in errors


def test_a_hub_without_an_answer_is_one_line(hub, tmp_path):
    hub.shutdown()
    hub.server_close()
    at_once = "import time; time.sleep = lambda seconds: None; " + COMMAND  # it is tried six times, in 23 s
    status, _, errors = end(start(hub, tmp_path, "-c", at_once, *PLAN))
    assert status == 2 and errors.count("\n") == 1, errors
    assert "got owner/name, which is no folder, and which the hub does not give (" in errors
    assert "on a machine with network run hf download owner/name --local-dir name and use hf:name" in errors
