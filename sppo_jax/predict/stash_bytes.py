"""Bytes of a device's stash: of a token, of the buffers on the device and on the host, and of copies under way."""

from typing import NamedTuple

from sppo_jax.plan.check_stash import STASH_PLACES
from sppo_jax.plan.parts import StashPlan
from sppo_jax.predict.group_layers import group_costs
from sppo_jax.predict.period import CHOICE_BYTES, period_bytes
from sppo_jax.predict.shape import MemoryShape
from sppo_jax.predict.states import state_bytes_of_group
from sppo_jax.predict.tails import holds_tails, inputs_made_again, tail_bytes, token_key_values
from sppo_jax.program.stash import (
    StashClass,
    TokenBytes,
    merged_classes,
    short_rows,
    slot_bytes,
    stash_classes,
)
from sppo_jax.schedule.table import Table


class StashBytes(NamedTuple):
    """Bytes of a stage's stash buffers on one device and its host.

    Attributes:
        device: on the device.
        host: on the host.
        copy: of the largest copy under way.
        last: of `device`, the slots of a class with one stash at a time that stays on the device.
        fetched: the most that comes back from the host for one chunk, where anything does.
    """

    device: int
    host: int
    copy: int
    last: int = 0
    fetched: int = 0


def token_bytes(shape: MemoryShape, stash: StashPlan) -> TokenBytes:
    """Returns the bytes that a virtual stage stashes of a token."""
    if stash.inputs == "period":
        return period_bytes(shape, stash)
    group, size = group_costs(shape), shape.compute_bytes
    of_layer, choices = shape.model.hidden_size * size, CHOICE_BYTES * group.choices
    attention = group.attention_elements * size + shape.sum_bytes * group.lse_elements
    of_place = dict.fromkeys(STASH_PLACES, 0)
    of_place[stash.inputs] += shape.layers * of_layer
    # Choices of experts go where the layer inputs go, and are never made again.
    of_place["keep" if stash.inputs == "recompute" else stash.inputs] += choices
    of_place[stash.attention] += attention
    tails = holds_tails(shape, stash)
    kv = token_key_values(shape) if tails else group.kv_elements
    rest = group.rest_elements * size + shape.sum_bytes * group.rest_sums
    # Without the layers' inputs, the virtual stage's input is what everything is computed from.
    chunk_input = of_layer if stash.inputs == "recompute" else 0
    return TokenBytes(
        kept=of_place["keep"] + (rest if stash.rest == "keep" else 0) + chunk_input,
        shared=of_place["host"],
        rest=rest if stash.rest == "host" else 0,
        kv=kv * size if stash.kv == "host" else 0,
        kept_attention=attention if stash.attention == "keep" else 0,
        shared_attention=attention if stash.attention == "host" else 0,
        states=state_bytes_of_group(shape),
        tails=tail_bytes(shape) if tails else 0,
    )


def stash_bytes(table: Table, shape: MemoryShape, stash: StashPlan) -> StashBytes:
    """Returns the bytes of a device's stash buffers.

    Each class of stashes has a slot more on the device than it needs: what an idle stage writes has to go somewhere.
    """
    token, alone = token_bytes(shape, stash), stash_classes(table, stash, shape.seq)
    merged = merged_classes(table, stash, alone)
    classes, num_short = alone.renamed(merged), short_rows(table, alone, merged)
    counts, num_rows = table.stash_peaks(classes.of_bundle), table.host_rows(classes.of_bundle)
    device = host = copy = last = fetched = 0
    for of_class, count, rows in zip(classes.distinct, counts, num_rows, strict=True):
        (kept, away), back = slot_bytes(of_class, token), fetched_bytes(of_class, shape, stash)
        device, host = device + (count + 1) * kept, host + rows * away
        copy = max(copy, away, back)
        if of_class.uses_host:
            fetched = max(fetched, back)
        elif count == 1:
            last += 2 * kept
    for early, late in merged.items():
        host -= num_short[late] * (slot_bytes(late, token)[1] - slot_bytes(early, token)[1])
    return StashBytes(device, host, copy, last, fetched)


def refetch_bytes(of_class: StashClass, shape: MemoryShape, stash: StashPlan) -> int:
    """Returns the bytes that come back from the host so that a chunk's keys and values are there again.

    That is the keys and values themselves, or the layer inputs to compute them from.
    """
    if stash.kv == "host":
        return of_class.host_kv * token_bytes(shape, stash).kv
    if stash.kv != "rebuild":
        return 0
    if stash.inputs == "period":
        token = token_bytes(shape, stash)
        of_tokens = of_class.host_inputs * (token.shared - token.shared_attention)
        return of_tokens + token.tails * (of_class.host_inputs > 0)
    layers = inputs_made_again(shape) if holds_tails(shape, stash) else shape.layers
    return of_class.host_inputs * layers * shape.model.hidden_size * shape.compute_bytes


def fetched_bytes(of_class: StashClass, shape: MemoryShape, stash: StashPlan) -> int:
    """Returns the bytes that come back from the host for one chunk: its stash, and for its keys and values."""
    token = token_bytes(shape, stash)
    unread = of_class.host_kv * token.kv
    return slot_bytes(of_class, token)[1] - unread + refetch_bytes(of_class, shape, stash)
