"""Flags with which small programs compile soon and run slowly, and the options that undo them."""

from sppo_jax.processes.environment import quick_flags

# What a user's run has.
_NORMAL: dict[str, int | bool] = {
    "xla_backend_optimization_level": 3,
    "xla_cpu_parallel_codegen_split_count": 32,
    "xla_cpu_use_fusion_emitters": True,
}
NORMAL_LEVEL = {name: _NORMAL[name] for name in quick_flags()}
# By default every operation has up to 100 lines of Python with it, most of them pytest's.
NUM_FRAMES = "1"
QUICK_XLA_FLAGS = " ".join(f"--{name}={value}" for name, value in quick_flags().items())
