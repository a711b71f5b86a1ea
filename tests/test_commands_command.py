"""What the commands share: simulated devices."""

import os
import subprocess
import sys


def test_simulated_devices_keep_what_the_user_set():
    code = "from sppo_jax.processes.environment import simulate_devices; simulate_devices(4)"
    code += "; import os; print(os.environ['XLA_FLAGS'])"
    patience = "--xla_cpu_collective_call_terminate_timeout_seconds"
    own = {**os.environ, "XLA_FLAGS": f"--xla_cpu_x=1 --xla_force_host_platform_device_count=2 {patience}=30"}
    words = subprocess.run([sys.executable, "-c", code], env=own, capture_output=True, text=True).stdout.split()
    assert words[0] == "--xla_cpu_x=1" and "--xla_force_host_platform_device_count=4" in words
    assert "--xla_force_host_platform_device_count=2" not in words
    assert [word for word in words if word.startswith(patience)] == [f"{patience}=30"]
