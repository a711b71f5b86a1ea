"""Where activations wait for their backward, and what share of them goes to the host."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from sppo_jax.config import StashConfig
from sppo_jax.planner.costs import CostModel
from sppo_jax.planner.memory import Shape, longest_chunks, offload_bytes, stash_bytes
from sppo_jax.planner.plan import StashPlan
from sppo_jax.schedule.diagonals import MIN_HOST_GAP, diagonal_groups, group_gaps, unit_diagonals
from sppo_jax.schedule.table import Table
from sppo_jax.units import format_bytes

# The values that the planner gives alpha; each distinct one is a segment to compile.
ALPHA_LEVELS = (0.0, 0.25, 0.5, 1.0)
_MIN_HOST_LAYERS = 2


@dataclass(frozen=True, kw_only=True)
class StashChoice:
    """A stash policy and the reasons for its places and for alpha."""

    stash: StashPlan
    reasons: dict[str, str]


def choose_places(config: StashConfig, table: Table, layers: int) -> StashChoice:
    """Resolves the places; alpha is left at 0.

    Args:
        config: the request.
        table: the schedule.
        layers: layers of a virtual stage.

    Raises:
        ValueError: a place is asked for that the layers or the other places do not allow.
    """
    num_diagonals = len(diagonal_groups(table))
    can_host = layers >= _MIN_HOST_LAYERS and max(group_gaps(table)) >= MIN_HOST_GAP
    asked = {"inputs": config.inputs, "attention": config.attention, "rest": config.rest}
    if "host" in asked.values() and layers < _MIN_HOST_LAYERS:
        raise ValueError(
            f"stash on the host needs at least {_MIN_HOST_LAYERS} layers a virtual stage to hide copies behind, "
            f"got {layers}: use fewer stages (mesh.pipe, schedule.interleave), or stash keep"
        )
    default = "host" if can_host else "keep"
    inputs = default if config.inputs == "auto" else config.inputs
    attention = default if config.attention == "auto" else config.attention
    if config.attention == "auto" and inputs == "recompute":
        attention = "recompute"
    rest = "recompute" if config.rest == "auto" else config.rest
    stash = StashPlan(
        inputs=inputs,
        attention=attention,
        rest=rest,
        alpha=(0.0,) * num_diagonals,
        kv_grad_dtype="float32" if config.kv_grad_dtype == "auto" else config.kv_grad_dtype,
    )
    why = (
        f"a chunk waits {max(group_gaps(table))} ticks at most and a virtual stage has {layers} layers, "
        f"so inputs and attention outputs {'can' if can_host else 'cannot'} go to the host behind compute; "
        "the rest is cheap to recompute"
    )
    return StashChoice(stash=stash, reasons={"stash": why if "auto" in asked.values() else "as requested"})


def choose_alpha(
    choice: StashChoice, requested: str | float | Sequence[float], table: Table, shape: Shape, costs: CostModel
) -> StashChoice:
    """Resolves alpha, one value for each diagonal of the table.

    The largest share of a chunk's tokens of which the copy hides behind the chunk's own forward is
    `min(1, bandwidth * seconds / bytes)`, less what `rest` takes if it is on the host. It is rounded down to one
    of ALPHA_LEVELS, lowered further until the host memory holds it, and 0 where a stash is read back at once.

    Args:
        choice: the places.
        requested: "auto", one value for all diagonals, or a value each.
        table: the schedule.
        shape: shape of the model on its stages.
        costs: seconds of units, and the cluster.

    Raises:
        ValueError: a list of the wrong length.
    """
    stash, device, host_bytes = choice.stash, costs.cluster.device, costs.cluster.device_host_bytes
    groups, gaps = diagonal_groups(table), group_gaps(table)
    if isinstance(requested, Sequence) and not isinstance(requested, str):
        if len(requested) != len(groups):
            raise ValueError(
                f"stash.alpha as a list has one value for each of the {len(groups)} diagonals of the schedule, "
                f"got {len(requested)}: give {len(groups)} values, one number, or auto"
            )
        return _with_alpha(choice, tuple(float(value) for value in requested), "as requested")
    if "host" not in (stash.inputs, stash.attention):
        return _with_alpha(choice, stash.alpha, "neither inputs nor attention outputs go to the host")
    late = sum(gaps[group] < MIN_HOST_GAP for group in groups)
    zeros = f"0 on the {late} of {len(groups)} diagonals that are read back within {MIN_HOST_GAP - 1} ticks"
    if not isinstance(requested, str):
        by_group = [float(requested) if gap >= MIN_HOST_GAP else 0.0 for gap in gaps]
        return _with_alpha(choice, tuple(by_group[group] for group in groups), f"{requested} as requested; {zeros}")
    hidden = _hidden_shares(stash, table, shape, costs)
    for cap in reversed(ALPHA_LEVELS):
        levels = [_round_down(min(cap, share)) for share in hidden]
        stash = replace(stash, alpha=tuple(levels[group] for group in groups))
        if stash_bytes(table, shape, stash)[1] <= host_bytes:
            break
    why = f"the largest share whose copy at {device.host_link_bytes_s / 1e9:.3g} GB/s hides behind the chunk; {zeros}"
    if cap < 1:
        why += f"; at most {cap}, for the host has {format_bytes(host_bytes)} a device"
    return _with_alpha(choice, stash.alpha, why)


def _hidden_shares(stash: StashPlan, table: Table, shape: Shape, costs: CostModel) -> list[float]:
    """Returns, for each diagonal group, the share of tokens whose copy hides behind its shortest forward."""
    groups, gaps, longest = diagonal_groups(table), group_gaps(table), longest_chunks(table)
    starts = list(accumulate(table.chunk_lengths, initial=0))
    forward_s = [float("inf")] * len(gaps)
    for (_, chunk, _), diagonal in unit_diagonals(table).items():
        group = groups[diagonal]
        seconds = costs.seconds("F", starts[chunk], table.chunk_lengths[chunk], longest[group])
        forward_s[group] = min(forward_s[group], seconds)
    shared, rest = offload_bytes(shape, stash)
    shares = []
    for group, gap in enumerate(gaps):
        tokens = longest[group] / shape.seq
        room = costs.cluster.device.host_link_bytes_s * forward_s[group] - rest * tokens
        shares.append(min(1.0, max(0.0, room / (shared * tokens))) if gap >= MIN_HOST_GAP else 0.0)
    return shares


def _round_down(share: float) -> float:
    return max(level for level in ALPHA_LEVELS if level <= share)


def _with_alpha(choice: StashChoice, alpha: tuple[float, ...], reason: str) -> StashChoice:
    return StashChoice(stash=replace(choice.stash, alpha=alpha), reasons={**choice.reasons, "alpha": reason})


def check_host_layers(stash: StashPlan, layers: int) -> None:
    """Checks that a virtual stage has the layers behind which copies hide, if anything goes to the host.

    Raises:
        ValueError: it has fewer.
    """
    shared = max(stash.alpha) > 0 and "host" in (stash.inputs, stash.attention)
    if (shared or stash.rest == "host") and layers < _MIN_HOST_LAYERS:
        raise ValueError(
            f"stash on the host needs at least {_MIN_HOST_LAYERS} layers a virtual stage to hide copies behind, "
            f"got {layers}: use fewer stages (mesh.pipe, schedule.interleave), or stash keep"
        )
