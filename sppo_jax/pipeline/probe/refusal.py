"""How a probe of a user's layer compares and refuses."""

from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

# How far a token by itself may be from the same token beside another, by rounding: a share of the largest value.
_ROUNDING = {"bfloat16": 0.05, "float16": 0.01, "float32": 1e-3, "float64": 1e-9}


def close(a: np.ndarray, b: np.ndarray, dtype: Any) -> bool:
    """Returns whether two arrays are the same but for the rounding of a compute dtype."""
    share = _ROUNDING[jnp.dtype(dtype).name]
    return bool(np.allclose(a, b, rtol=0, atol=share * np.max(np.abs(a), initial=0.0), equal_nan=True))


def shape_text(got: jax.ShapeDtypeStruct) -> str:
    """Returns a shape and a dtype in words."""
    return f"{list(got.shape)} in {got.dtype}"


def refuse(rule: str, got: str, change: str) -> NoReturn:
    """Raises a ValueError of a line."""
    raise ValueError(f"{rule}, got {got}; {change}")
