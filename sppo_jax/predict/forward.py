"""Device bytes of an evaluation: parameters, working weights, keys and values, and what a forward tick works on.

A training step has no gradients, no moments and no stash in its forwards and its heads, if nothing comes behind them.
So these are its holders of two moments, without those.
"""

from sppo_jax.models.counts import layer_costs, num_tables
from sppo_jax.models.state_counts import state_counts
from sppo_jax.plan.parts import StashPlan
from sppo_jax.predict.holders import (
    LOSS_TOKENS,
    MOMENTS,
    Held,
    Holder,
    between_holders,
    prefix_holders,
    sums,
    work_holders,
    working_params,
)
from sppo_jax.predict.memory import Memory, held_by_table
from sppo_jax.predict.shape import MemoryShape
from sppo_jax.predict.stage_params import stage_params_of, table_params
from sppo_jax.predict.stash_bytes import StashBytes
from sppo_jax.predict.states import stretch_bytes
from sppo_jax.schedule.table import Table

_FORWARD, _HEAD = "forward", "head"
_BOTH = frozenset({_FORWARD, _HEAD})
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
        *_work(shape, stash, held),
        Holder("batch", held.batch_bytes / 16 * _RESULT_BYTES, _BOTH),
    ]
    of_forwards = [Holder(name, size, moments & _BOTH) for name, size, moments in found if name != "carries"]
    return [holder for holder in of_forwards if holder.size_bytes and holder.moments]


def weight_holders(shape: MemoryShape, num_groups: int, num_stages: int) -> list[Holder]:
    """Returns a device's parameters, and the working weights of layers.

    Of gathered ones a device's share is there twice more while it is sent: so compiled with two groups of layers.
    """
    stage = stage_params_of(shape, num_groups, num_stages)
    weights = working_params(shape, num_groups, num_stages, "keep") * shape.compute_bytes
    if shape.weights == "gathered":
        weights += weights * 2 // (shape.data * shape.seq)
    return [Holder("params", stage.own * shape.sum_bytes, _BOTH), Holder("weights", weights, _BOTH)]


def _work(shape: MemoryShape, stash: StashPlan, held: Held) -> list[Holder]:
    """Returns what a forward works on: of layers of several kinds what the widest does.

    A layer's arrays come one after another, and the register of the pipeline is one of them. So there are as many at
    once as a step would stash of the rest of a layer, as compiled.
    """
    size, tokens = shape.compute_bytes, held.tick_tokens
    of_kinds = []
    for kind, _ in shape.model.counts(shape.layers):
        mixed = stretch_bytes(kind, tokens, shape.seq, shape.sum_bytes)[0] if state_counts(kind) else 0
        of_kinds.append(tokens * layer_costs(kind).rest_elements * size + mixed)
    experts = [one for one in work_holders(shape, stash, held) if one.name == "experts"]
    return [Holder("work", max(of_kinds), frozenset({_FORWARD})), *experts]


def _tables(shape: MemoryShape, held: Held) -> list[Holder]:
    """Returns the weights of the embedding and the head, and a tile of logits.

    A lone stage has the embedding before the layers of a chunk and the head behind them. Of several chunks one table
    stays between; of a lone one none does.
    """
    tile = min(held.tick_tokens, LOSS_TOKENS) * -(-shape.model.vocab_size // held.num_stages)
    logits = Holder("work", tile * shape.sum_bytes, frozenset({_HEAD}))
    table = table_params(shape.model, held.num_stages) * shape.compute_bytes
    if shape.weights == "gathered":
        return [Holder("work", table, _BOTH), logits]
    table *= shape.works_on_copies
    beside = table * (num_tables(shape.model) - 1) if held.num_stages > 1 else 0
    between = _BOTH if held.num_stages > 1 or not held.is_one_chunk else frozenset({_HEAD})
    return [Holder("weights", table, between), Holder("weights", beside, _BOTH), logits]


def _held(table: Table, shape: MemoryShape, stash: StashPlan) -> Held:
    """Returns what a device holds at once: one prefix, because a group's forwards of a sequence end before the next."""
    nothing = StashBytes(device=0, host=0, copy=0)
    counted = held_by_table(table, shape, stash)
    return counted._replace(kv_prefixes=1, grad_prefixes=0, head_tokens=0, stash=nothing)
