"""Waves: k sequences of N chunks run as one sequence of k N chunks, so that the costs of chunks rise once a wave."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from sppo_jax.plan.layers import divisors
from sppo_jax.plan.table import Repeat, Table, Tick, Unit

UNCUT = ("1f1b", "interleaved-1f1b")


def check_wave(name: str, num_sequences: int, wave: int) -> None:
    """Checks that the sequences of a pipeline fall into whole waves.

    Args:
        name: of the schedule.
        num_sequences: sequences of a pipeline.
        wave: sequences of a wave.

    Raises:
        ValueError: they do not, or the schedule does not cut sequences; names the nearest divisors.
    """
    if wave < 1 or num_sequences % wave:
        near = nearest_divisors(num_sequences, wave)
        raise ValueError(
            f"schedule.wave must divide the {num_sequences} sequences of a pipeline (nearest: {near}), got {wave}; "
            "change schedule.wave or the number of sequences"
        )
    if wave > 1 and name in UNCUT:
        raise ValueError(
            f"schedule.wave must be 1 with schedule.name={name}, which does not cut sequences, got {wave}; use "
            f"schedule.name={name.replace('1f1b', 'seq1f1b')}"
        )


def nearest_divisors(num_sequences: int, wave: int) -> str:
    """Returns the nearest sizes of waves below and above a size that does not divide the sequences, as text."""
    possible = divisors(num_sequences)
    below, above = ([size for size in possible if size < wave], [size for size in possible if size > wave])
    return " or ".join(map(str, [*below[-1:], *above[:1]]))


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
    check_wave(name, num_sequences, wave)
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

    def unit(kind: str, sequence: int, joined: int, virtual_stage: int) -> Unit:
        chunk, place = places[joined]
        return Unit(kind, sequence * wave + place, chunk, virtual_stage)

    return tuple(Tick(tick.kind, tuple([one and unit(*one) for one in tick.units])) for tick in ticks)
