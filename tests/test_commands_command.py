"""What the commands share: simulated devices."""

import os
import subprocess
import sys

from distributed_cases import environment

QUEUED = """
from sppo_jax.commands.command import simulate_devices
simulate_devices(8)
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

def around(x_D):
    for _ in range(8):
        x_D = jax.lax.ppermute(x_D, "ring", [(i, (i + 1) % 8) for i in range(8)]) + jax.lax.psum(x_D, "ring")
    return x_D / 9.0**8

mesh = jax.make_mesh((8,), ("ring",), axis_types=(jax.sharding.AxisType.Auto,))
step = jax.jit(jax.shard_map(around, mesh=mesh, in_specs=P("ring"), out_specs=P("ring")))
x_D = jnp.ones(8)
largest = []
for _ in range(400):
    x_D = step(x_D)
    largest.append(jnp.max(x_D))
print(max(map(float, largest)))
"""


def test_simulated_devices_take_many_programs_at_once():
    """With a thread a device this stands still for ever: programs that wait for each other's devices."""
    own = environment()
    own.pop("PJRT_NPROC", None)
    done = subprocess.run([sys.executable, "-c", QUEUED], env=own, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert abs(float(done.stdout) - 1.0) < 1e-4


def test_simulated_devices_keep_what_the_user_set():
    code = "from sppo_jax.commands.command import simulate_devices; simulate_devices(4)"
    code += "; import os; print(os.environ['XLA_FLAGS'], os.environ['PJRT_NPROC'])"
    own = {**os.environ, "XLA_FLAGS": "--xla_cpu_x=1 --xla_force_host_platform_device_count=2", "PJRT_NPROC": "5"}
    words = subprocess.run([sys.executable, "-c", code], env=own, capture_output=True, text=True).stdout.split()
    assert words[0] == "--xla_cpu_x=1" and words[-1] == "5"
    assert "--xla_force_host_platform_device_count=4" in words
