"""What the commands share: simulated devices."""

import os
import subprocess
import sys


def test_simulated_devices_keep_what_the_user_set():
    code = "from sppo_jax.commands.command import simulate_devices; simulate_devices(4)"
    code += "; import os; print(os.environ['XLA_FLAGS'])"
    own = {**os.environ, "XLA_FLAGS": "--xla_cpu_x=1 --xla_force_host_platform_device_count=2"}
    words = subprocess.run([sys.executable, "-c", code], env=own, capture_output=True, text=True).stdout.split()
    assert words[0] == "--xla_cpu_x=1" and "--xla_force_host_platform_device_count=4" in words
    assert "--xla_force_host_platform_device_count=2" not in words
