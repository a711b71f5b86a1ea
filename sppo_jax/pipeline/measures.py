"""What a training step measures beside its loss and its gradients."""

from typing import NamedTuple

import jax

from sppo_jax.pipeline.layers.token_sums import Totals


class Measures(NamedTuple):
    """What a training step measures, over all targets of the batch, with the parameters before the step.

    Args:
        num_hits: int32, targets that have the highest logit of the whole vocabulary (the lowest token wins a tie).
        entropy: mean entropy of the predicted distributions, in nats a target.
        totals: of what layers share; None where they share nothing.
    """

    num_hits: jax.Array
    entropy: jax.Array
    totals: Totals | None
