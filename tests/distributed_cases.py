"""What the tests of several processes share: a free port, and real processes that join over gloo."""

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from quick_flags import QUICK_XLA_FLAGS

REPO = Path(__file__).parents[1]
_QUIET = ("SPPO_", "SLURM_", "OMPI_", "PMI_", "PMIX_", "JAX_", "XLA_")

HEAD = """
import json, os, sys, time
from sppo_jax.processes import distributed
from sppo_jax.processes.environment import simulate_devices
from sppo_jax.config import config_from_dict

def config(**train):
    model = {"vocab_size": 24, "hidden_size": 16, "num_layers": 4, "num_heads": 2, "mlp_size": 32}
    return config_from_dict({"model": model, "sequence": {"length": 64}, "train": {"steps": 3, **train}})

def join(num_devices=4, **train):
    simulate_devices(distributed.local_devices(num_devices))
    distributed.start(config(devices=f"cpu:{num_devices}", **train))
"""


def free_port(num_ports: int = 1) -> int:
    """Returns the first of some free ports in a row, below those that Linux gives to outgoing connections."""
    for port in random.SystemRandom().sample(range(20_000, 32_000), 100):
        with contextlib.suppress(OSError), contextlib.ExitStack() as servers:
            for offset in range(num_ports):
                servers.enter_context(socket.create_server(("", port + offset)))
            return port
    raise AssertionError("of 100 ports none was free")


def environment(**changes: object) -> dict[str, str]:
    """Returns this environment without what would place it in a cluster; programs compile soon and run slowly."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_QUIET)}
    paths = f"{REPO}{os.pathsep}{REPO / 'tests'}"
    kept |= {"PYTHONPATH": paths, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", "XLA_FLAGS": QUICK_XLA_FLAGS}
    return kept | {k: str(v) for k, v in changes.items()}


def start_processes(code: str, num_processes: int, *words: object, **environ: object) -> list[subprocess.Popen]:
    """Starts processes that run `code` behind HEAD, each knowing its place."""
    place = {"SPPO_COORDINATOR": f"127.0.0.1:{free_port()}", "SPPO_NUM_PROCESSES": num_processes}
    return start_in([place | {"SPPO_PROCESS_ID": k} | environ for k in range(num_processes)], code, *words)


def start_in(environs: Sequence[Mapping[str, object]], code: str, *words: object) -> list[subprocess.Popen]:
    """Starts a process with each of these environments; they run `code` behind HEAD."""
    command = [sys.executable, "-c", HEAD + textwrap.dedent(code), *map(str, words)]
    return [
        subprocess.Popen(
            command,
            env=environment(**environ),
            cwd=REPO,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for environ in environs
    ]


def finish(processes: list[subprocess.Popen], timeout_s: float = 120) -> list[tuple[int, str, str]]:
    """Returns exit code, output and errors of each; none is left behind.

    Raises:
        AssertionError: a process did not end in time. The text has the Python stacks of all that still ran.
    """
    try:
        results = []
        for process in processes:
            out, errors = process.communicate(timeout=timeout_s)
            results.append((process.returncode, out, errors))
        return results
    except subprocess.TimeoutExpired:
        for process in processes:
            process.send_signal(signal.SIGABRT)
        texts = [text for process in processes for text in process.communicate()]
        raise AssertionError(f"processes must end in {timeout_s} s, got\n" + "\n".join(texts)) from None
    finally:
        for process in processes:
            process.kill()
