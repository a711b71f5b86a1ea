"""Device bytes of an evaluation: parameters, working weights, keys and values, and what a forward tick works on.

A training step has no gradients, no moments and no stash in its forwards and its heads, if nothing comes behind them.
So these are its holders of two moments, without those.
"""

from sppo_jax.plan.parts import StashPlan
from sppo_jax.predict.holders import (
    LOSS_TOKENS,
    MOMENTS,
    Held,
    Holder,
    between_holders,
    params_of_tables,
    prefix_holders,
    sums,
    work_holders,
    working_params,
)
from sppo_jax.predict.memory import Memory, held_by_table
from sppo_jax.predict.shape import MemoryShape
from sppo_jax.predict.stage_params import stage_params_of, table_params
from sppo_jax.predict.stash_bytes import StashBytes
from sppo_jax.schedule.table import Table

_FORWARD, _HEAD = "forward", "head"
_BOTH = frozenset({_FORWARD, _HEAD})
# A tile's logits in the dtype of sums, and their exponentials.
_LOGIT_ARRAYS = 2
# Bytes of a token's result: its loss, and whether its target is the most likely token; of each there are two arrays.
_RESULT_BYTES = 2 * (4 + 1)


def predict_forward_memory(table: Table, shape: MemoryShape, stash: StashPlan) -> Memory:
    """Predicts the bytes of one device in an evaluation: those of its holders in the fuller of two moments.

    Args:
        table: of a plan whose sequences have their forwards one after another; its backwards do not run.
        shape: of the model on a stage.
        stash: says whether layers with a window have tails; nothing is stashed.
    """
    holders = tuple(forward_holders(shape, stash, _held(table, shape, stash)))
    of_moment = sums(holders)
    peak = max(MOMENTS, key=of_moment.__getitem__)
    hbm = dict.fromkeys((holder.name for holder in holders), 0)
    for name, size_bytes, moments in holders:
        if peak in moments:
            hbm[name] += int(size_bytes)
    return Memory(hbm=hbm, host=0, holders=holders)


def forward_holders(shape: MemoryShape, stash: StashPlan, held: Held) -> list[Holder]:
    """Returns all holders of one device in an evaluation; arguments as `holders.holders_of`."""
    found = [
        *weight_holders(shape, held.num_groups, held.num_stages),
        *_tables(shape, held),
        *prefix_holders(shape, stash, held),
        *between_holders(shape, held),
        *work_holders(shape, stash, held),
        Holder("batch", held.batch_bytes / 16 * _RESULT_BYTES, _BOTH),
    ]
    return [Holder(name, size, moments & _BOTH) for name, size, moments in found if size and moments & _BOTH]


def weight_holders(shape: MemoryShape, num_groups: int, num_stages: int) -> list[Holder]:
    """Returns a device's parameters, and the working weights of layers."""
    stage = stage_params_of(shape, num_groups, num_stages)
    weights = working_params(shape, num_groups, num_stages, "keep") * shape.compute_bytes
    return [Holder("params", stage.own * shape.sum_bytes, _BOTH), Holder("weights", weights, _BOTH)]


def _tables(shape: MemoryShape, held: Held) -> list[Holder]:
    """Returns the weights of the embedding and the head, and a tile of logits."""
    tile = min(held.tick_tokens, LOSS_TOKENS) * -(-shape.model.vocab_size // held.num_stages)
    logits = Holder("work", tile * _LOGIT_ARRAYS * shape.sum_bytes, frozenset({_HEAD}))
    if shape.weights == "resident":
        of_tables = params_of_tables(shape, held.num_stages) * shape.works_on_copies
        return [Holder("weights", of_tables * shape.compute_bytes, _BOTH), logits]
    return [Holder("work", table_params(shape.model, held.num_stages) * shape.compute_bytes, _BOTH), logits]


def _held(table: Table, shape: MemoryShape, stash: StashPlan) -> Held:
    """Returns what a device holds at once: one prefix, because a group's forwards of a sequence end before the next."""
    nothing = StashBytes(device=0, host=0, copy=0)
    counted = held_by_table(table, shape, stash)
    return counted._replace(kv_prefixes=1, grad_prefixes=0, head_tokens=0, stash=nothing)
