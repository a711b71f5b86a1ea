"""A weight for each token of a batch: the loss is the sum of weight x nats, over a divisor.

Letters: B sequences, S tokens, R seq members.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from sppo_jax.pipeline.params import layout
from sppo_jax.plan.plan import Plan

WEIGHTS, DIVISOR = "weights", "weights_divisor"
KEYS = WEIGHTS, DIVISOR
# Of what `weighted` returns.
SPECS = layout.STRIPED, P()


def weighted(batch: Mapping, plan: Plan) -> tuple[jax.Array, ...]:
    """Returns the weights [B, S / R, R], as the tokens lie, and what the sum is divided by; nothing without weights."""
    if WEIGHTS not in batch:
        return ()
    return layout.stripe(jnp.asarray(batch[WEIGHTS]), plan), jnp.asarray(batch.get(DIVISOR, np.float32(1)))


def check_weights(batch: Mapping, plan: Plan) -> None:
    """Checks the weights of a batch, and their values too if they are on this host.

    Args:
        batch: `weights`, real [B, S], may be there; `weights_divisor`, a real number above 0, beside it.
        plan: gives B and S.

    Raises:
        ValueError: the rule, what was got, what to change.
    """
    if WEIGHTS not in batch:
        if DIVISOR in batch:
            raise ValueError(f"batch: '{DIVISOR}' must stand beside '{WEIGHTS}', got it alone; leave it out")
        return
    shape = plan.num_sequences, plan.sequence_length
    _check_real(WEIGHTS, batch[WEIGHTS], shape, (shape[0], shape[1] // plan.mesh.seq, plan.mesh.seq))
    if DIVISOR in batch:
        _check_real(DIVISOR, batch[DIVISOR], ())
    found = [batch[key] for key in (*KEYS, "targets") if key in batch]
    if any(isinstance(x, jax.core.Tracer) or not getattr(x, "is_fully_addressable", True) for x in found):
        return
    weights_BS, has_target_BS = (np.asarray(batch[key]).reshape(shape) for key in (WEIGHTS, "targets"))
    wrong = np.argwhere(~np.isfinite(weights_BS) & (has_target_BS >= 0))
    if wrong.size:
        row, token = wrong[0]
        raise ValueError(
            f"batch: '{WEIGHTS}' must be finite, got {weights_BS[row, token]} at token {token} of sequence {row}; give "
            "the token another weight, or the target -1"
        )
    if DIVISOR in batch and not 0 < float(batch[DIVISOR]) < np.inf:
        raise ValueError(f"batch: '{DIVISOR}' must be finite and above 0, got {batch[DIVISOR]}; leave it out for 1")


def _check_real(key: str, got, *shapes: tuple[int, ...]) -> None:
    if not (hasattr(got, "shape") and hasattr(got, "dtype")):
        raise ValueError(
            f"batch: '{key}' must be an array, got a {type(got).__name__}; use numpy.asarray(x, numpy.float32)"
        )
    if tuple(got.shape) not in shapes:
        raise ValueError(
            f"batch: '{key}' must have the shape {shapes[0]}, got {tuple(got.shape)}; change the batch or the plan"
        )
    if not jnp.issubdtype(got.dtype, jnp.floating):
        raise ValueError(f"batch: '{key}' must be real, got {got.dtype}; cast the array to float32")
