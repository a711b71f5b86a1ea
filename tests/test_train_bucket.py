"""A run whose data lie in a bucket: losses as from this machine, killed and resumed, on 1, 2 and 4 processes."""

import json
import random
import signal
import subprocess
import sys

import pytest
import yaml
from distributed_cases import environment as quiet
from distributed_cases import free_port
from s3_server import environment, s3, s3_server, upload  # noqa: F401

STEPS = 20
SETTINGS = {
    "model": {"vocab_size": 257, "hidden_size": 16, "num_layers": 2, "num_heads": 2, "mlp_size": 32},
    "mesh": {"pipe": 1, "data": 4, "seq": 1},
    "sequence": {"length": 64, "chunks": 1, "per_pipeline": 1},
    "train": {"steps": STEPS, "devices": "cpu:4", "eval_sequences": 4},
    "checkpoint": {"every_steps": 6},
}


# A process that kills itself when it reads its tenth batch, once the state behind step 6 is on the disk.
DIES = """
import itertools, os, signal, sys, time
from pathlib import Path
from sppo_jax.cli import main
from sppo_jax.data.loader import Loader
take, batches = Loader.__next__, itertools.count(1)

def taken(self):
    if next(batches) == 10:
        while not (Path(sys.argv[-1]) / "checkpoints" / "6").is_dir():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGKILL)
    return take(self)

Loader.__next__ = taken
sys.exit(main(sys.argv[1:]))
"""


def start(config, run, processes, *, dies=False, **environ):
    """Starts the processes of a run."""
    place = {"SPPO_COORDINATOR": f"127.0.0.1:{free_port()}", "SPPO_NUM_PROCESSES": processes}
    words = [
        sys.executable,
        *(("-c", DIES) if dies else ("-m", "sppo_jax.cli")),
        "train",
        str(config),
        "--run-dir",
        str(run),
    ]
    return [
        subprocess.Popen(
            words,
            env=quiet(**(place | {"SPPO_PROCESS_ID": number} if processes > 1 else {}), **environ),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number in range(processes)
    ]


def finish(workers):
    said = [worker.communicate(timeout=240)[0] for worker in workers]
    assert [worker.returncode for worker in workers] == [0] * len(workers), said
    return "\n".join(said)


def losses(run):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: (row["loss"], row.get("grad_norm")) for row in rows if "loss" in row}


@pytest.fixture
def runs(s3, tmp_path):  # noqa: F811
    """Configs that read the same documents from this machine and from the bucket."""
    rng = random.Random(0)
    (tmp_path / "in").mkdir()
    for number in range(6):
        rows = [{"text": "".join(rng.choices("abcdef \n", k=rng.randrange(20, 300)))} for _ in range(20)]
        (tmp_path / "in" / f"{number}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    upload(s3, tmp_path / "in", "data/in")
    for name, source in (("here", str(tmp_path / "in")), ("away", "s3://data/in")):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(SETTINGS | {"data": {"source": source}}))
    return tmp_path


def check(runs, server, processes):
    """Compares runs of as many processes: another number adds gradients in another order."""
    environ = {**environment(server), "JAX_COMPILATION_CACHE_DIR": str(runs / "compiled")}
    environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    finish(start(runs / "here.yaml", runs / "alone", processes, XDG_CACHE_HOME=str(runs / "a"), **environ))
    for life in range(2):
        own = {"XDG_CACHE_HOME": str(runs / f"life{life}"), **environ}  # each life copies the data again
        workers = start(runs / "away.yaml", runs / "killed", processes, dies=life == 0, **own)
        if life == 0:
            said = [worker.communicate(timeout=240)[0] for worker in workers]
            assert -signal.SIGKILL in [worker.returncode for worker in workers], said
            continue
        assert "resumes from" in finish(workers)
    alone, killed = losses(runs / "alone"), losses(runs / "killed")
    assert sorted(killed) == list(range(1, STEPS + 1)) and killed == alone
    secret = environ["AWS_SECRET_ACCESS_KEY"].encode()
    assert not [path for path in (runs / "killed").rglob("*") if path.is_file() and secret in path.read_bytes()]


@pytest.mark.slow
@pytest.mark.xdist_group("train_bucket")
def test_a_run_from_a_bucket_is_killed_and_resumed_bit_for_bit(runs, s3):  # noqa: F811
    check(runs, s3, 1)


@pytest.mark.slow
@pytest.mark.xdist_group("train_bucket")
@pytest.mark.parametrize("processes", [2, 4])
def test_so_it_is_with_several_processes(runs, s3, processes):  # noqa: F811
    check(runs, s3, processes)
