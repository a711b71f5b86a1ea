"""Anti-diagonals of a table: the units that share a tick's static shape and its share of offloaded tokens."""

from typing import NamedTuple

from sppo_jax.plan.table import Table, Unit, remembered, unit_ticks

# Compute ticks that must lie between writing a stash and reading it back for the copies to hide.
MIN_HOST_GAP = 3


@remembered
def unit_diagonals(table: Table) -> dict[tuple[int, int, int], int]:
    """Returns the diagonal of each (sequence, chunk, virtual stage).

    The diagonal is the number of forward ticks from the first one of the sequence to that of the unit; its
    backward lies on the same diagonal. In a generated table of one group, it is chunk + stage.
    """
    ordinal: dict[Unit, int] = {}
    for number, tick in enumerate(tick for tick in table.ticks if tick.kind == "F"):
        ordinal.update({unit: number for unit in tick.units if unit is not None})
    return {
        (unit.sequence, unit.chunk, unit.virtual_stage): number - ordinal[Unit("F", unit.sequence, 0, 0)]
        for unit, number in ordinal.items()
    }


@remembered
def diagonal_groups(table: Table) -> tuple[int, ...]:
    """Returns the group of each diagonal; groups are numbered from 0 in the order of their first diagonal.

    Diagonals whose units stand in one tick, forward or backward, share that tick's shape, so they are one
    group. With one sequence at a time every diagonal is a group; with several in a stream of N chunks,
    diagonals that differ by a multiple of N are.
    """
    diagonals = unit_diagonals(table)
    parent = list(range(max(diagonals.values()) + 1))

    def root(diagonal: int) -> int:
        while parent[diagonal] != diagonal:
            diagonal = parent[diagonal]
        return diagonal

    for tick in table.ticks:
        if not tick.is_compute:
            continue
        first, *others = [root(diagonals[_key(unit)]) for unit in tick.units if unit is not None]
        for other in others:
            # The smaller root wins, so that numbering by roots follows the first diagonals.
            low, high = sorted((root(first), root(other)))
            parent[high] = low
    roots = [root(diagonal) for diagonal in range(len(parent))]
    numbers = {value: number for number, value in enumerate(sorted(set(roots)))}
    return tuple(numbers[value] for value in roots)


@remembered
def group_gaps(table: Table) -> tuple[int, ...]:
    """Returns, for each group, the fewest compute ticks (F and B, counted together) from a unit's F to its B."""
    groups, diagonals = diagonal_groups(table), unit_diagonals(table)
    number, compute = 0, {}
    for index, tick in enumerate(table.ticks):
        if tick.is_compute:
            compute[index] = number
            number += 1
    ticks = unit_ticks(table)
    gaps = [number] * (max(groups) + 1)
    for key, diagonal in diagonals.items():
        gap = compute[ticks[Unit("B", *key)]] - compute[ticks[Unit("F", *key)]]
        gaps[groups[diagonal]] = min(gaps[groups[diagonal]], gap)
    return tuple(gaps)


@remembered
def hides_copies(table: Table) -> tuple[bool, ...]:
    """Returns, for each group, whether its stashes wait long enough for copies to the host and back to hide."""
    return tuple(gap >= MIN_HOST_GAP for gap in group_gaps(table))


@remembered
def longest_chunks(table: Table) -> tuple[int, ...]:
    """Returns the longest chunk of each diagonal group, in tokens over all devices of a stage."""
    groups, lengths = diagonal_groups(table), table.chunk_lengths
    longest = [0] * (max(groups) + 1)
    for (_, chunk, _), diagonal in unit_diagonals(table).items():
        group = groups[diagonal]
        if lengths[chunk] > longest[group]:
            longest[group] = lengths[chunk]
    return tuple(longest)


@remembered
def tick_groups(table: Table) -> tuple[int | None, ...]:
    """Returns the diagonal group of each tick; None for a head tick."""
    groups, diagonals = diagonal_groups(table), unit_diagonals(table)
    # All units of a tick are in one group, by construction of the groups.
    return tuple(
        groups[diagonals[_key(next(unit for unit in tick.units if unit is not None))]] if tick.is_compute else None
        for tick in table.ticks
    )


@remembered
def tick_tokens(table: Table) -> tuple[int, ...]:
    """Returns the static token count of each tick: the longest chunk among all units of its diagonal groups.

    It depends on the group alone, so the forward and the backward tick of a unit have one shape. A head tick
    has that of the forward tick before it.
    """
    longest = longest_chunks(table)
    tokens: list[int] = []
    forward = 0
    for tick, group in zip(table.ticks, tick_groups(table), strict=True):
        tokens.append(forward if group is None else longest[group])
        if tick.kind == "F":
            forward = tokens[-1]
    return tuple(tokens)


class TickShape(NamedTuple):
    """What all stages' units of a tick have in common.

    Args:
        tokens: the tokens of the tick, padding included, over all devices of a stage.
        reach: tokens of the sequence up to the end of the tick's furthest chunk.
    """

    tokens: int
    reach: int


@remembered
def tick_shapes(table: Table) -> tuple[TickShape, ...]:
    """Returns the shape of each tick."""
    ends = table.chunk_starts[1:]
    return tuple(
        TickShape(tokens, max(ends[unit.chunk] for unit in tick.units if unit is not None))
        for tick, tokens in zip(table.ticks, tick_tokens(table), strict=True)
    )


def _key(unit: Unit) -> tuple[int, int, int]:
    return unit.sequence, unit.chunk, unit.virtual_stage
