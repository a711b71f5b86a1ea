"""Attention: local kernels, and their spread over the `ulysses` and `ring` parts of the `seq` axis.

Usable alone: `dense_attention` on one device, `make_attention` over an axis of a mesh, `spread_attention` in the
caller's own `shard_map`. They are imported on first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a type checker reads these lines
    from sppo_jax.attention.dense import dense_attention
    from sppo_jax.attention.spreading.spread import make_attention, spread_attention

_HOMES = {"dense_attention": "dense", "make_attention": "spreading.spread", "spread_attention": "spreading.spread"}
__all__ = ["dense_attention", "make_attention", "spread_attention"]


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
