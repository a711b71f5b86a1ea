"""Flags with which small programs compile soon and run slowly, and the options that undo them."""

from sppo_jax.version import jaxlib_version

# By default a program's code is split into 32 parts, for as many cores.
_QUICK = {"xla_backend_optimization_level": "0", "xla_cpu_parallel_codegen_split_count": "1"}
# What a user's run has.
NORMAL_LEVEL: dict[str, int | bool] = {
    "xla_backend_optimization_level": 3,
    "xla_cpu_parallel_codegen_split_count": 32,
}
# Small programs take three times as long to compile with these emitters. Later versions of XLA do not know the name.
if jaxlib_version() < (0, 11):
    _QUICK["xla_cpu_use_fusion_emitters"] = "false"
    NORMAL_LEVEL["xla_cpu_use_fusion_emitters"] = True
# By default every operation has up to 100 lines of Python with it, most of them pytest's.
NUM_FRAMES = "1"
QUICK_XLA_FLAGS = " ".join(f"--{name}={value}" for name, value in _QUICK.items())
