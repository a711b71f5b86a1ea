"""Waves: k sequences of N chunks run as one sequence of k N chunks, so that the costs of chunks rise once a wave."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from sppo_jax.rules import Facts, check
from sppo_jax.schedule.table import Repeat, Table, Tick, Unit


def make_in_waves(
    make: Callable[[str, int, int, Sequence[int], int], Table],
    name: str,
    num_stages: int,
    num_sequences: int,
    chunk_lengths: Sequence[int],
    num_groups: int,
    wave: int,
) -> Table:
    """Makes a table, or an outline, of sequences in waves: each wave is one sequence of `make`'s table.

    Chunk n of wave q is chunk n // k of sequence q k + n % k. So the chunks of equal number, which cost the same,
    follow each other, and each chunk still comes after those before it. Nothing else of the table changes.

    Args:
        make: makes the table of a named schedule whose sequences are the waves.
        name: of the schedule.
        num_stages: pipeline stages.
        num_sequences: sequences of one pipeline in a step.
        chunk_lengths: tokens of each chunk of a sequence, over all devices of a stage.
        num_groups: virtual stages of each stage.
        wave: sequences of a wave, k.

    Raises:
        ValueError: the sequences do not fall into whole waves, or the schedule cannot have this shape.
    """
    check(Facts(schedule=name, sequences=num_sequences, wave=wave))
    joined = [length for length in chunk_lengths for _ in range(wave)]
    try:
        table = make(name, num_stages, num_sequences // wave, joined, num_groups)
    except ValueError as error:
        raise ValueError(
            f"{error} (a wave of {wave} sequences has the {len(joined)} chunks of a sequence of its own)"
        ) from None
    return replace(
        table,
        num_sequences=num_sequences,
        chunk_lengths=tuple(chunk_lengths),
        ticks=_relabelled(table.ticks, wave, len(joined)),
        repeats=tuple(
            Repeat(start, stop, rounds, sequences * wave) for start, stop, rounds, sequences in table.repeats
        ),
        wave=wave,
    )


def _relabelled(ticks: tuple[Tick, ...], wave: int, num_chunks: int) -> tuple[Tick, ...]:
    places = [divmod(chunk, wave) for chunk in range(num_chunks)]

    def unit(op: str, sequence: int, joined: int, virtual_stage: int) -> Unit:
        chunk, place = places[joined]
        return Unit(op, sequence * wave + place, chunk, virtual_stage)

    return tuple(Tick(tick.op, tuple([one and unit(*one) for one in tick.units])) for tick in ticks)
