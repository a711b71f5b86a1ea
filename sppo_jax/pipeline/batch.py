"""What a step takes of a batch, and the checks of it.

A batch may have a weight for each token: the loss is the sum of weight x nats, over a divisor.

Letters: B sequences, S tokens, R seq members.
"""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from sppo_jax.attention.validate import KEYS, check_arrays, check_one_document, validate_batch
from sppo_jax.flex.contract import check_columns
from sppo_jax.flex.rows import PACKED_ROWS
from sppo_jax.flex.shape import plan_shape
from sppo_jax.pipeline.params import layout
from sppo_jax.plan.plan import Plan
from sppo_jax.rules import Facts, check

WEIGHTS, DIVISOR = "weights", "weights_divisor"
OF_WEIGHTS = WEIGHTS, DIVISOR
# Of what `weighted` returns.
WEIGHT_SPECS = layout.STRIPED, P()


def taken(batch: Mapping, keys: Sequence[str]) -> dict:
    """Returns the arrays that a step takes; without packed rows every token is in its own.

    Args:
        batch: the arrays.
        keys: of those that the step takes.
    """
    found = {key: batch[key] for key in keys if key in batch}
    if PACKED_ROWS in keys and PACKED_ROWS not in found:
        like = batch[KEYS[0]]
        rows = jnp.arange(like.shape[0], dtype=jnp.int32).reshape(-1, *[1] * (like.ndim - 1))
        found[PACKED_ROWS] = jnp.broadcast_to(rows, like.shape)
    return found


def check_batch(
    batch: Mapping, plan: Plan, vocab_size: int, windows: bool, states: bool, *, of_sequences: bool
) -> None:
    """Checks a batch, and its values too if they are on this host.

    Args:
        batch: the arrays.
        plan: the plan.
        vocab_size: of the model.
        windows: whether some layers have a sliding window.
        states: whether some layers have a state.
        of_sequences: whether a loss is of the sums over each packed sequence.

    Raises:
        ValueError: the rule, what was got, what to change.
    """
    shape = (plan.num_sequences, plan.sequence_length)
    shapes = shape, (shape[0], shape[1] // plan.mesh.seq, plan.mesh.seq)
    keys = (*KEYS, PACKED_ROWS) if of_sequences and PACKED_ROWS in batch else KEYS
    check_arrays(batch, *shapes, keys=keys)
    if PACKED_ROWS in keys and plan.groups == "static":
        raise ValueError(
            f"batch: '{PACKED_ROWS}' must be left out without teams, as each row is a packed one, got it with "
            "sequence.groups=static; leave it out"
        )
    if any(isinstance(batch[key], jax.core.Tracer) for key in keys):
        return
    if any(isinstance(x, jax.Array) and not x.is_fully_addressable for x in batch.values()):
        return
    whole = {key: batch[key].reshape(shape) for key in keys}
    validate_batch(
        whole,
        vocab_size=vocab_size,
        num_sequences=plan.num_sequences,
        sequence_length=plan.sequence_length,
        contiguous=plan.kernel != "blockwise" or windows,
        consecutive=plan.kernel != "blockwise" and windows,
        natural=plan.groups == "static",
        padded_behind=states,
    )
    if plan.has_one_document:
        check_one_document(np.asarray(whole["document_ids"]))
    if plan.groups == "flex":
        check_columns(whole, plan_shape(plan), dealing=plan.kernel != "blockwise")
    if PACKED_ROWS in keys:
        _check_packed_rows(np.asarray(whole[PACKED_ROWS]))


def _check_packed_rows(packed_rows_BS: np.ndarray) -> None:
    small, large, most = int(packed_rows_BS.min()), int(packed_rows_BS.max()), len(packed_rows_BS) - 1
    if small < 0 or large > most:
        raise ValueError(
            f"batch: '{PACKED_ROWS}' must lie in 0..{most}, got {small}..{large}; number the rows of the packed batch"
        )


def check_sums(plan: Plan, over: str) -> None:
    """Checks that the sums of a penalty are whole before a backward needs them.

    Args:
        plan: the plan.
        over: whose tokens a loss is of, see `models.moe.balance.Penalty`.

    Raises:
        ValueError: the schedule has backwards before all forwards.
    """
    check(
        Facts(
            balance_over=over,
            groups=plan.groups,
            sequences=plan.sequences_per_pipeline,
            schedule=plan.schedule.name,
            wave=plan.schedule.wave,
            forwards_first=not plan.outline().has_forwards_among_backwards,
        )
    )


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
    found = [batch[key] for key in (*OF_WEIGHTS, "targets") if key in batch]
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
