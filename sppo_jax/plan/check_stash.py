"""What a plan may say of its stash: the places of activations, and what each place asks of the schedule."""

from sppo_jax.plan.parts import SchedulePlan, StashPlan
from sppo_jax.rules import Facts, check
from sppo_jax.schedule.table import Table
from sppo_jax.schedule.waiting import waiting_room

STASH_PLACES = ("keep", "host", "recompute")
INPUT_PLACES = (*STASH_PLACES, "period")
# What each setting may be, in the order in which they are checked.
PLACES = {
    "inputs": INPUT_PLACES,
    "attention": STASH_PLACES,
    "rest": STASH_PLACES,
    "kv_grad_dtype": ("float32", "bfloat16"),
    "kv": ("keep", "recompute", "rebuild", "host"),
    "waiting": ("keep", "host"),
}


def check_places(stash: StashPlan) -> None:
    """Checks the places of activations, each by itself and together.

    Raises:
        ValueError: says the rule, what was found, and what to change.
    """
    for key, places in PLACES.items():
        if getattr(stash, key) not in places:
            raise ValueError(f"stash.{key} must be one of {', '.join(places)}, got {getattr(stash, key)!r}; choose one")
    check(Facts(places=(stash.inputs, stash.attention, stash.rest)))


def check_stash(stash: StashPlan, schedule: SchedulePlan, table: Table, *, flexible: bool) -> None:
    """Checks the places of activations against the schedule.

    Args:
        stash: the places.
        schedule: the schedule.
        table: its table, or the outline.
        flexible: whether each document has its own team of devices.

    Raises:
        ValueError: says the rule, what was found, and what to change.
    """
    places = stash.inputs, stash.attention, stash.rest
    check(Facts(places=places, kv=stash.kv, groups="flex" if flexible else "static"))
    if stash.kv != "keep":
        _check_kv(stash, table.num_chunks)
    if stash.waiting == "host":
        waiting_room(table)
    if stash.attention_from:
        _check_attention_from(stash, table.num_chunks - 1, flexible)
        _check_parts_ticks(stash.attention_from, schedule, table)


def _check_kv(stash: StashPlan, num_chunks: int) -> None:
    kv = stash.kv
    if stash.inputs == "recompute":
        asked = "rebuild" if kv == "recompute" else kv
        raise ValueError(
            f"stash.kv={asked} must have a stash of every layer, got stash.inputs=recompute; use "
            "stash.inputs=host or keep, or stash.kv=keep"
        )
    if kv == "host" and num_chunks == 1:
        raise ValueError("stash.kv=host must have at least 2 chunks, got 1; use stash.kv=rebuild, or stash.kv=keep")
    if (num_chunks == 1) != (kv == "recompute"):
        count, word = ("exactly 1 chunk", "rebuild") if kv == "recompute" else ("at least 2 chunks", "recompute")
        raise ValueError(
            f"stash.kv={kv} of a plan must have {count}, got {num_chunks}; write {word} there, or plan again"
        )


def _check_attention_from(stash: StashPlan, last: int, flexible: bool) -> None:
    first = stash.attention_from
    if stash.attention == "recompute":
        raise ValueError(
            f"stash.attention_from must be 0 where no attention outputs are stashed, got {first} with "
            "stash.attention=recompute; use stash.attention=host or keep"
        )
    if not 0 < first <= last:
        raise ValueError(f"stash.attention_from must be a chunk's number, 0 to {last}, got {first}; plan again")
    if flexible:
        raise ValueError(
            f"stash.attention_from must be 0 where each document has its own team of devices, got {first}; use "
            "sequence.groups=static"
        )


def _check_parts_ticks(first: int, schedule: SchedulePlan, table: Table) -> None:
    starts, of_bundle = table.chunk_starts, table.bundle_last_chunks
    for tick, shape, bundle in zip(table.ticks, table.tick_shapes, table.tick_bundles, strict=True):
        if bundle is not None and (of_bundle[bundle] < first) != (shape.reach <= starts[first]):
            raise ValueError(
                f"stash.attention_from={first} must part the ticks of the schedule into those that stash attention "
                f"outputs and those that do not, got {schedule.label}, where chunks on both sides share "
                f"buffers (a {tick.op} tick); use schedule.name=breadth-first or sppo, or attention_from=0"
            )
