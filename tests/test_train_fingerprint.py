"""Fingerprints see any change of any bit, and no change of mesh."""

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from distributed_cases import HEAD, environment, finish, free_port
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sppo_jax.train.checkpoints.fingerprint import fingerprints

DTYPES = ["float32", "bfloat16", "int32", "uint8", "float64"]


def values(dtype, shape=(6, 8)):
    drawn = np.random.default_rng(0).normal(size=shape) * 50
    return np.abs(drawn).astype(jnp.dtype(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_bit_of_one_element_changes_it(dtype, x64):
    x = values(dtype)
    (before,) = fingerprints([jnp.asarray(x)]).values()
    raw = x.view(f"uint{8 * x.dtype.itemsize}").copy()
    for place in [(0, 0), (3, 5), (5, 7)]:
        for bit in (0, 8 * x.dtype.itemsize - 1):
            flipped = raw.copy()
            flipped[place] ^= flipped.dtype.type(1 << bit)
            assert fingerprints([jnp.asarray(flipped.view(x.dtype))]) != {"0": before}


def test_elements_that_change_places_change_it():
    x = jnp.arange(12.0).reshape(3, 4)
    (before,) = fingerprints([x]).values()
    assert all(list(fingerprints([y]).values()) != [before] for y in (x[::-1], x[:, ::-1], x.at[0, 0].set(1.0)))


@pytest.mark.parametrize("spec", [("a", None), (None, "b"), ("a", "b"), (("a", "b"), None)])
def test_every_mesh_gives_the_same(spec):
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("a", "b"))
    x = jnp.asarray(values("float32", (16, 8)))
    spread = jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))
    assert fingerprints({"x": spread, "n": jnp.int32(3)}) == fingerprints({"x": x, "n": jnp.int32(3)})


def test_arrays_are_named_by_their_path():
    assert set(fingerprints({"params": {"up": jnp.ones(2)}, "step": jnp.int32(1)})) == {"params/up", "step"}


NAMES = ["up", "down", "gate", "query", "key", "value", "out", "embedding"]
ON_HOST = """
from sppo_jax.compat import in_host_memory
from sppo_jax.train.checkpoints.fingerprint import fingerprints
join()
import jax, jax.numpy as jnp
mesh = jax.sharding.Mesh(jax.devices(), ("a",))
home = in_host_memory(jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("a")))
names = NAMES
make = jax.jit(lambda k: jnp.arange(k, dtype=jnp.float32), static_argnums=0, out_shardings=home)
print(json.dumps(fingerprints({name: make(4 * (k + 1)) for k, name in enumerate(names)})))
"""


def test_processes_that_hash_names_differently_agree():
    """Arrays on the host are summed one after the other, each by a program of all processes."""
    place = {"SPPO_COORDINATOR": f"127.0.0.1:{free_port()}", "SPPO_NUM_PROCESSES": 2}
    command = [sys.executable, "-c", f"{HEAD}\nNAMES = {NAMES}{ON_HOST}"]
    processes = [
        subprocess.Popen(
            command,
            env=environment(**place, SPPO_PROCESS_ID=number, PYTHONHASHSEED=seed),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number, seed in enumerate((1, 7))
    ]
    (code, first, errors), (_, second, _) = finish(processes)
    assert code == 0, errors
    want = fingerprints({name: jnp.arange(4 * (k + 1), dtype=jnp.float32) for k, name in enumerate(NAMES)})
    assert json.loads(first.splitlines()[-1]) == json.loads(second.splitlines()[-1]) == want  # behind gloo's words
