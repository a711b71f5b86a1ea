"""The dtypes of a model: that in which layers compute, and that of sums and parameters."""

import jax
import jax.numpy as jnp


def compute_dtype(name: str) -> jnp.dtype:
    """Resolves the name of a compute dtype.

    Args:
        name: "float32", "bfloat16", "float64", or "auto": bfloat16 on accelerators, float32 on a CPU.

    Returns:
        The dtype in which layers compute.
    """
    if name == "auto":
        name = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    return jnp.dtype(name)


def accumulator(dtype) -> jnp.dtype:
    """Returns the dtype of sums, statistics and parameters: float64 for float64, float32 for anything narrower."""
    return jnp.dtype(jnp.float64 if jnp.dtype(dtype) == jnp.float64 else jnp.float32)
