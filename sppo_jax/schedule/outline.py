"""Outlines of generated tables: what a table repeats from wave to wave (one sequence or several) is written once."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, repeat
from typing import TypeVar

from sppo_jax.schedule.generators import BREADTH_FIRST, ONE_AT_A_TIME, check_counts, make_table
from sppo_jax.schedule.table import MIN_HOST_GAP, Repeat, Table
from sppo_jax.schedule.waves import make_in_waves

Value = TypeVar("Value")


@dataclass(frozen=True)
class Round:
    """What a stream of ticks of one op repeats once every stage is busy.

    The first P - 1 ticks fill the pipeline. From then on a stage computes in each tick, until no chunk is left to enter
    stage 0; the units of a tick are those of the tick one round before, for later sequences.

    Args:
        sequences: the fewest sequences whose chunks fill whole convoys.
        ticks: ticks in which these enter.
    """

    sequences: int
    ticks: int


def round_of(num_stages: int, num_chunks: int, num_groups: int) -> Round:
    """Returns the round of the streams of a table; see `streams.forward_ticks`."""
    sequences = 1 if num_groups == 1 else num_stages // math.gcd(num_stages, num_chunks)
    return Round(sequences, sequences * num_chunks * num_groups)


def make_outline(
    name: str, num_stages: int, num_sequences: int, chunk_lengths: Sequence[int], num_groups: int = 1, wave: int = 1
) -> Table:
    """Makes the outline of a named schedule's table, as long as a few sequences whatever their number.

    Diagonals, their bundles and static shapes are those of the whole table; `simulate` and `peaks` count the rounds. Of
    the gaps of bundles it is the same whether they reach MIN_HOST_GAP. What has no round to leave out has no repeats.

    Args:
        name: a key of GENERATORS.
        num_stages: pipeline stages.
        num_sequences: sequences of one pipeline in a step.
        chunk_lengths: tokens of each chunk, over all devices of a stage.
        num_groups: virtual stages of each stage.
        wave: sequences that run as one; rounds are of whole waves.

    Raises:
        ValueError: as `make_table`.
    """
    if wave != 1:
        return make_in_waves(make_outline, name, num_stages, num_sequences, chunk_lengths, num_groups, wave)
    num_chunks = len(chunk_lengths)
    check_counts(name, num_stages, num_sequences, num_chunks, num_groups)
    one = Round(1, 0) if name == BREADTH_FIRST else round_of(num_stages, num_chunks, num_groups)
    written = _least_sequences(name, num_stages, num_chunks, num_groups, one)
    left_out = (num_sequences - written) // one.sequences
    # What a generator refuses is refused with the sequences that were asked for.
    refused = num_sequences % one.sequences or one.sequences * num_chunks > max(num_stages, num_chunks)
    if left_out < 1 or refused:
        return make_table(name, num_stages, num_sequences, chunk_lengths, num_groups)
    table = make_table(name, num_stages, written, chunk_lengths, num_groups)
    repeats = tuple(
        Repeat(start, stop, left_out + 1, one.sequences) for start, stop in _rounds_within(name, table, one.ticks)
    )
    return replace(table, num_sequences=num_sequences, repeats=repeats)


def all_rounds(values: Sequence[Value], repeats: Sequence[Repeat]) -> Iterable[Value]:
    """Returns the values of all ticks in the order in which they run, given those of the ticks that are written."""
    parts: list[Iterable[Value]] = []
    place = 0
    for start, stop, rounds, _ in repeats:
        parts += [values[place:start], chain.from_iterable(repeat(values[start:stop], rounds))]
        place = stop
    return chain(*parts, values[place:])


def first_rounds(outline: Table) -> Table:
    """Returns the table of the sequences that an outline writes: each of its rounds once."""
    left_out = {(repeat.rounds - 1) * repeat.sequences for repeat in outline.repeats}
    return replace(outline, num_sequences=outline.num_sequences - max(left_out, default=0), repeats=())


def _least_sequences(name: str, num_stages: int, num_chunks: int, num_groups: int, one: Round) -> int:
    """Returns the fewest sequences, in whole rounds, with which the ticks in which all stages are busy are a round."""
    if name in ONE_AT_A_TIME:
        return 1
    ticks = num_stages - 1 + one.ticks
    if name == "gpipe":
        # A sequence waits for those behind it, so that with fewer the gaps might be too short for the host.
        ticks = max(ticks, MIN_HOST_GAP * num_chunks * num_groups)
    else:
        # Forward ticks take turns with backward ticks once the first sequence is through.
        last = num_chunks - 1
        ticks += (last // num_stages * num_groups + num_groups) * num_stages + last % num_stages
    return -(-ticks // one.ticks) * one.sequences


def _rounds_within(name: str, table: Table, round_ticks: int) -> list[tuple[int, int]]:
    """Returns where the first whole rounds of an outline begin and end."""
    if name in ONE_AT_A_TIME:
        return [(0, len(table.ticks))]
    fill = table.num_stages - 1
    found = []
    # Where forward and backward ticks take turns, a backward tick is the first of the two.
    for op in "FB" if name == "gpipe" else "B":
        of_op = [index for index, tick in enumerate(table.ticks) if tick.op == op]
        found.append((of_op[fill], [*of_op, len(table.ticks)][fill + round_ticks]))
    return found
