"""The three number formats of a model: compute, parameters and accumulation."""

import jax
import jax.numpy as jnp


def compute_dtype(name: str) -> jnp.dtype:
    """Resolve the name of a compute dtype.

    Args:
        name: "float32", "bfloat16", "float64", or "auto": bfloat16 on accelerators, float32 on a CPU.

    Returns:
        The dtype in which layers compute.
    """
    if name == "auto":
        name = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    return jnp.dtype(name)


def at_least_float32(dtype: jnp.dtype) -> jnp.dtype:
    """Return float64 for float64 and float32 for anything narrower: the dtype of statistics, sums and parameters."""
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)
