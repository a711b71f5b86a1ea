"""Where activations wait for their backward, and what share of them goes to the host."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product

from sppo_jax.config import Config
from sppo_jax.files.format_bytes import format_bytes
from sppo_jax.hardware import usable_host_bytes
from sppo_jax.plan.check_stash import INPUT_PLACES, STASH_PLACES
from sppo_jax.plan.parts import StashPlan, has_share
from sppo_jax.predict.holders import optimizer_bytes
from sppo_jax.predict.seconds.costs import CostModel
from sppo_jax.predict.seconds.shared_link import network_bytes
from sppo_jax.predict.shape import MemoryShape
from sppo_jax.predict.stash_bytes import stash_bytes, token_bytes
from sppo_jax.program.stash import recomputes_attention
from sppo_jax.rules import Facts, check
from sppo_jax.schedule.table import MIN_HOST_GAP, Table, TickShape
from sppo_jax.search.because import Because, joined

# Where diagonals differ, the planner rounds their shares down to these values: each distinct one is a segment to
# compile. A share that all diagonals have, and the largest that the host has room for, are solved to a hundredth.
ALPHA_LEVELS = (0.0, 0.25, 0.5, 1.0)
_PARTS = 100

# A period runs again whole, so the rest of a layer is never stashed.
_NO_PERIOD = (("period", "keep"), ("period", "host"))
Places = tuple[str, str, str]  # of layer inputs, attention outputs and the rest
# Those to consider, preferred in this order where times are equal.
_PLACES: tuple[Places, ...] = (
    ("keep", "keep", "keep"),
    ("keep", "keep", "recompute"),
    ("keep", "recompute", "recompute"),
    ("recompute", "recompute", "recompute"),
    ("host", "host", "keep"),
    ("host", "host", "recompute"),
    ("host", "recompute", "recompute"),
    ("host", "host", "host"),
    ("period", "host", "recompute"),
    ("period", "recompute", "recompute"),
)


def place_options(config: Config) -> list[Places]:
    """Returns the places to consider.

    Args:
        config: the request.

    Raises:
        ValueError: a place is asked for that the other places do not allow.
    """
    stash, groups, is_mixed = config.stash, config.sequence.groups, len(set(config.model.type_names)) > 1
    asked = (stash.inputs, stash.attention, stash.rest)
    # Keys and values that come again need a stash of every layer; see `StashPlan`.
    needs_stash = stash.kv in ("rebuild", "host") and stash.inputs == "auto"
    open_places = [places for places in _PLACES if not needs_stash or places[0] != "recompute"]
    takes_period = stash.inputs == "period" or (is_mixed and groups == "static")

    def as_asked(places: Places) -> bool:
        fits = all(want in ("auto", place) for want, place in zip(asked, places, strict=True))
        return fits and (takes_period or places[0] != "period")

    found = [places for places in open_places if as_asked(places)]
    if not found:
        found = [places for places in product(INPUT_PLACES, STASH_PLACES, STASH_PLACES) if as_asked(places)]
        # Without the layers' inputs everything is computed from the virtual stage's input.
        found = [places for places in found if places[0] != "recompute" and (places[0], places[2]) not in _NO_PERIOD]
    check(Facts(places=asked, is_mixed=is_mixed, groups=groups))
    if stash.alpha != "auto" and stash.alpha != 0 and any(map(has_share, found)):
        # A share for the host is asked for.
        found = [places for places in found if has_share(places)]
    return found


def choose_alpha(
    stash: StashPlan, requested: str | float | Sequence[float], table: Table, shape: MemoryShape, costs: CostModel
) -> tuple[StashPlan, str]:
    """Resolves alpha, one value for each diagonal of the table.

    With "hidden" it is the largest share of a chunk's tokens of which the copy hides behind the chunk's own forward,
    `min(1, bandwidth * seconds / bytes)`, less what `rest` takes if it is on the host; where diagonals differ, rounded
    down to one of ALPHA_LEVELS. With "all" it is 1, hidden or not, and so it is where a breadth-first schedule sends
    `rest` to the host: different shares in one pass would cut the loops of ticks, and what stays of each pass took up
    to a half more memory than is predicted. Either is at most the largest share that the host memory holds, and 0
    where a stash is read back at once.

    Args:
        stash: the places.
        requested: "hidden", "all", one value for all diagonals, or a value each.
        table: the schedule.
        shape: shape of the model on its stages.
        costs: seconds of units, and the cluster.

    Returns:
        The stash with alpha, and the reason.

    Raises:
        ValueError: a list of the wrong length.
    """
    cluster, optimizer = costs.cluster, optimizer_bytes(shape, table.num_groups, table.num_stages)[1]
    host_bytes = max(0, usable_host_bytes(costs.cluster) - optimizer)
    bundles, hides = table.diagonal_bundles, table.overlaps_copies
    if isinstance(requested, Sequence) and not isinstance(requested, str):
        if len(requested) != len(bundles):
            raise ValueError(
                f"stash.alpha as a list must have one value for each of the {len(bundles)} diagonals of the schedule, "
                f"got {len(requested)}; give {len(bundles)} values, one number, or auto"
            )
        return replace(stash, alpha=tuple(float(value) for value in requested)), Because.ASKED()
    if not stash.has_share:
        stash = replace(stash, alpha=(0.0,) * len(bundles))
        return stash, Because.NOT_ON_HOST()
    late = sum(not hides[bundle] for bundle in bundles)
    zeros = Because.READ_BACK_SOON(count=late, num_diagonals=len(bundles), ticks=MIN_HOST_GAP - 1) if late else ""
    if not isinstance(requested, str):
        by_bundle = [float(requested) if hidden else 0.0 for hidden in hides]
        asked = joined(Because.SHARE_ASKED(share=requested), zeros)
        return replace(stash, alpha=tuple(by_bundle[bundle] for bundle in bundles)), asked
    whole_goes = stash.rest == "host" and table.passes_groups_in_turn and table.num_groups > 1
    if requested == "hidden" and not whole_goes:
        shares = _hidden_shares(stash, table, shape, costs)
        why = joined(Because.HIDDEN_SHARE(rate_gb_s=cluster.host_link_bytes_s / 1e9), zeros)
    else:
        shares = [float(hidden) for hidden in hides]
        why = joined(Because.WHOLE_WITH_REST() if whole_goes else Because.WHOLE_SAVES(), zeros)
    levels = _levels(shares)

    def capped(cap: float) -> StashPlan:
        values = {share: min(cap, level) for share, level in levels.items()}
        of_bundle = [values[share] for share in shares]
        return replace(stash, alpha=tuple(map(of_bundle.__getitem__, bundles)))

    # Every unit in a slot of its own is the most that a host can need.
    most, token = table.num_sequences * table.num_chunks * table.num_groups, token_bytes(shape, stash)
    if most * (table.most_tokens / shape.seq * token.away + token.tails) <= host_bytes:
        return capped(1.0), why
    cap = _largest_cap(lambda cap: stash_bytes(table, shape, capped(cap)).host - host_bytes)
    if cap < 1:
        why = joined(why, Because.HOST_FULL(cap=cap, size=format_bytes(host_bytes)))
    return capped(cap), why


def largest_alpha(table: Table) -> tuple[float, ...]:
    """Returns the largest alpha that a table allows: 1, but 0 where a stash is read back at once."""
    hides = table.overlaps_copies
    return tuple(float(hides[bundle]) for bundle in table.diagonal_bundles)


def _hidden_shares(stash: StashPlan, table: Table, shape: MemoryShape, costs: CostModel) -> list[float]:
    """Returns, for each bundle of diagonals, the share of tokens whose copy hides behind its shortest forward."""
    starts, lengths, token = table.chunk_starts, table.chunk_lengths, token_bytes(shape, stash)
    cluster, sent_bytes = costs.cluster, network_bytes(costs)
    copied: dict[tuple[int, int], float] = {}

    def copied_bytes(chunk: int, tokens: int) -> float:
        """Returns the bytes that a forward has time to copy."""
        if (chunk, tokens) not in copied:
            # The tick behind which a copy hides may have no ends.
            unit = "F", starts[chunk], lengths[chunk], TickShape(tokens, 0, table.num_groups == 1)
            forward_s = costs.seconds(*unit)
            beside_sends = cluster.slot_bytes_s * forward_s - sent_bytes(*unit)
            copied[chunk, tokens] = min(cluster.host_link_bytes_s * forward_s, beside_sends)
        return copied[chunk, tokens]

    def share(chunks: tuple[int, ...], of_tick: int, recomputes: bool) -> float:
        tokens = of_tick / shape.seq
        spare_bytes = min(copied_bytes(chunk, of_tick) for chunk in chunks) - (token.rest + token.kv) * tokens
        spare_bytes -= token.tails
        return min(1.0, max(0.0, spare_bytes / (token.stashed(recomputes).shared * tokens)))

    # Many bundles are alike.
    alike = list(zip(table.bundle_chunks, table.bundle_tokens, strict=True))
    shares = {bundle: share(*bundle, recomputes_attention(stash, last_chunk=bundle[0][-1])) for bundle in set(alike)}
    return [shares[bundle] if hides else 0.0 for bundle, hides in zip(alike, table.overlaps_copies, strict=True)]


def _levels(shares: Sequence[float]) -> dict[float, float]:
    """Returns the value of alpha for each share: one share to a hundredth, several in levels."""
    found = set(shares)
    if len(found - {0.0}) == 1:
        return {share: int(share * _PARTS) / _PARTS for share in found}
    return {share: max(level for level in ALPHA_LEVELS if level <= share) for share in found}


def _largest_cap(over: Callable[[float], int]) -> float:
    """Returns the largest cap of alpha, to a hundredth, with which the host holds its part; 0 if it holds none.

    Args:
        over: by how many bytes a cap is too much for the host; about linear in the cap.
    """
    most = over(1.0)
    if most <= 0:
        return 1.0
    none = over(0.0)
    guess = int(_PARTS * none / (none - most)) if none < 0 else 0
    low, high = 0, _PARTS  # low may not fit, where the host does not even hold what alpha does not tell
    for middle in (guess, guess + 1):
        if low < middle < high:
            low, high = (middle, high) if over(middle / _PARTS) <= 0 else (low, middle)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if over(middle / _PARTS) <= 0 else (low, middle)
    return low / _PARTS
