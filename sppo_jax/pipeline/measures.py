"""What an evaluation finds of each token, and what a training step measures beside its loss and its gradients.

Letters: B sequences, S tokens.
"""

from typing import NamedTuple

import jax

from sppo_jax.pipeline.layers.token_sums import Totals


class TokenScores(NamedTuple):
    """Scores of each token that has a target: its loss in nats, and whether the model predicts it.

    Args:
        losses_BS: at least float32, 0 where there is no target.
        hits_BS: bool; the target has the highest logit of the whole vocabulary (the lowest token wins a tie, as
            with argmax); False where there is no target.
    """

    losses_BS: jax.Array
    hits_BS: jax.Array


class Measures(NamedTuple):
    """What a training step measures, over all targets of the batch, with the parameters before the step.

    Args:
        num_hits: int32, targets that have the highest logit of the whole vocabulary (the lowest token wins a tie).
        entropy: mean entropy of the predicted distributions, in nats a target; with weights, their weighted sum.
        totals: of what layers share; None where they share nothing.
    """

    num_hits: jax.Array
    entropy: jax.Array
    totals: Totals | None
