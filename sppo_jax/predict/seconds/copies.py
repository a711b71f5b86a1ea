"""The seconds of copies between devices and the host: the stash, waiting chunks, and weights that wait on the host."""

import math

from sppo_jax.plan.parts import StashPlan
from sppo_jax.predict import waiting
from sppo_jax.predict.seconds.costs import CostModel
from sppo_jax.predict.seconds.loop_waits import Write, flops_before_loops, has_unknown_loops
from sppo_jax.predict.seconds.shared_link import with_sends
from sppo_jax.predict.shape import MemoryShape
from sppo_jax.predict.stash_bytes import fetched_bytes, token_bytes
from sppo_jax.program.stash import merged_classes, slot_bytes, stash_classes
from sppo_jax.schedule.table import Table


def tick_copies(
    table: Table, shape: MemoryShape, stash: StashPlan, costs: CostModel
) -> tuple[tuple[float, ...], tuple[Write, ...]]:
    """Returns what `simulate` asks for about the copies of each tick: `copy_seconds` and `loop_writes`."""
    given = table, shape, stash, costs
    return copy_seconds(*given), loop_writes(*given)


def copy_seconds(table: Table, shape: MemoryShape, stash: StashPlan, costs: CostModel) -> tuple[float, ...]:
    """Returns the seconds for which each tick's copies to or from the host last.

    A tick's stash leaves behind the next tick and comes back behind the one before its own; these neighbours are
    alike, so that a tick lasts at least as long as the copies of a tick of its own diagonal. Where keys and values are
    made again, the layer inputs come back a second time; keys and values on the host come back once. Where parameters
    wait on the host, a part of the next group's weights comes as well, in a forward beside what leaves. With several
    hosts, what a tick sends to other hosts may take the link from its copies.
    """
    return with_sends(table, _seconds(table, shape, stash, costs), costs)


def _seconds(table: Table, shape: MemoryShape, stash: StashPlan, costs: CostModel) -> tuple[float, ...]:
    """Returns the seconds of each tick's copies at the rate of the link to the host."""
    token, link_bytes_s = token_bytes(shape, stash), costs.cluster.host_link_bytes_s
    waiting_s = waiting.copy_seconds(table, shape, stash, link_bytes_s)
    weights_s = _weights_seconds(table, costs)
    if not token.away:
        return tuple(
            max(more, weights_s) if tick.is_compute else more for tick, more in zip(table.ticks, waiting_s, strict=True)
        )
    classes = stash_classes(table, stash, shape.seq)
    merged = merged_classes(table, stash, classes)
    moved = [merged.get(one, one) for one in classes.distinct]
    of_class = [
        {"F": slot_bytes(one, token)[1] / link_bytes_s, "B": fetched_bytes(one, shape, stash) / link_bytes_s}
        for one in moved
    ]
    if weights_s:
        of_class = [{"F": max(one["F"], weights_s), "B": one["B"] + weights_s} for one in of_class]
    of_bundle = [of_class[number] for number in classes.of_bundle.tolist()]
    ticks = zip(table.ticks, table.tick_bundles, waiting_s, strict=True)
    return tuple(more if bundle is None else of_bundle[bundle][tick.op] + more for tick, bundle, more in ticks)


def loop_writes(table: Table, shape: MemoryShape, stash: StashPlan, costs: CostModel) -> tuple[Write, ...]:
    """Returns what each tick writes to the host while it has a loop that waits; () where no loop waits.

    A forward has the stash of the forward before it under way, taken to be of its own diagonal as in `copy_seconds`.
    The first one has none, and a head between the two runs beside the copy. A backward writes gradient
    sums, if these wait on the host; none of its compute counts as before its first loop. Either may write a waiting
    chunk. What a lone tick writes is copied by kernels, which hold up no loop.
    """
    before = flops_before_loops(shape, table.num_chunks)
    if not (has_unknown_loops(shape.platform, shape.kernel) and costs.attention) or before is None:
        return ()
    token, link_bytes_s = token_bytes(shape, stash), costs.cluster.host_link_bytes_s
    sums_s, put_s = _weights_seconds(table, costs), waiting.put_seconds(table, shape, stash, link_bytes_s)
    if not (token.away or sums_s or any(put_s)):
        return ()
    classes = stash_classes(table, stash, shape.seq)
    merged = merged_classes(table, stash, classes)
    of_class = [slot_bytes(merged.get(one, one), token)[1] / link_bytes_s for one in classes.distinct]
    token_s = before / costs.cluster.device.linear_flops_s(costs.compute_bytes) / shape.seq
    wait_share = costs.cluster.device.loop_wait_share
    numbers, alone = classes.of_bundle.tolist(), _lone_ticks(table)
    heads_s = _heads_before(table, costs)
    found: list[Write] = []
    for tick, bundle, tokens, put in zip(table.ticks, table.tick_bundles, table.tick_tokens, put_s, strict=True):
        if bundle is None or len(found) in alone:
            found.append(Write())
        elif tick.op == "F":
            left_s = max(0.0, of_class[numbers[bundle]] - heads_s[len(found)])
            found.append(Write(left_s + put, token_s * tokens, wait_share))
        else:
            found.append(Write(sums_s + put, 0.0, wait_share))
    return tuple(found)


def _heads_before(table: Table, costs: CostModel) -> list[float]:
    """Returns the seconds of the head right before each tick; inf for the first tick, beside which nothing is written.

    Of fewer than four forwards the first one is charged all the same; see `_lone_ticks`.
    """
    seconds, few = costs.of_chunks(table.chunk_lengths), sum(tick.op == "F" for tick in table.ticks) < 4
    found = [0.0 if few else math.inf]
    for tick, shape in zip(table.ticks[:-1], table.tick_shapes, strict=False):
        is_head = tick.op == "H"
        found.append(max(seconds(unit, shape) for unit in tick.units if unit is not None) if is_head else 0.0)
    return found


def _lone_ticks(table: Table) -> frozenset[int]:
    """Returns the forward ticks that are in no loop: of one chunk on one stage, those of the first and the last group.

    Of fewer than four groups none is left out. All their ticks are alone, but kernels take compute units, which nothing
    charges, and a search would find these plans faster than they are.
    """
    if not table.passes_groups_in_turn or table.num_sequences * table.num_chunks * table.num_stages > 1:
        return frozenset()
    forwards = [index for index, tick in enumerate(table.ticks) if tick.op == "F"]
    return frozenset((forwards[0], forwards[-1]) if len(forwards) > 3 else ())


def _weights_seconds(table: Table, costs: CostModel) -> float:
    """Returns the seconds in which a part of a group's weights comes from the host; 0 where they are on the device."""
    num_parts = max(table.num_stages, table.wave * table.num_chunks)  # the ticks of a group's turn
    return costs.host_params[0] / table.num_groups / num_parts * 4 / costs.cluster.host_link_bytes_s
