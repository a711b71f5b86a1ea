"""Seq1F1B: one chunk forward, one chunk backward, over the chunks of several sequences."""

from collections.abc import Sequence

from sppo_jax.schedule.streams import backward_ticks, check_groups, forward_ticks, with_head
from sppo_jax.schedule.table import Table, Tick, Unit


def seq1f1b(num_stages: int, num_sequences: int, chunk_lengths: Sequence[int], num_groups: int = 1) -> Table:
    """Makes the table that alternates backward and forward ticks once the first sequence is through.

    Forward ticks run until the first sequence has left the last virtual stage, since its last chunk is the
    first to go backward. Then one backward tick and one forward tick take turns, and when no forward tick is
    left the backward ticks finish. With P stages, N chunks and M sequences, one group, this takes N M + P - 1
    ticks of each kind, and stage s holds at most min(N + 2 (P - 1 - s), N M) chunks.

    Args:
        num_stages: pipeline stages.
        num_sequences: sequences of one pipeline in a step.
        chunk_lengths: tokens of each chunk.
        num_groups: virtual stages of each stage.

    Raises:
        ValueError: num_groups > 1 and the chunks do not form whole groups.
    """
    num_chunks = len(chunk_lengths)
    check_groups(num_stages, num_groups, num_sequences, num_chunks)
    sequences = range(num_sequences)
    forward = forward_ticks(num_stages, num_groups, sequences, num_chunks)
    backward = backward_ticks(num_stages, num_groups, sequences, num_chunks)
    through = Unit("F", 0, num_chunks - 1, num_stages * num_groups - 1)
    warm = next(index for index, tick in enumerate(forward) if through in tick.units) + 1
    ticks: list[Tick] = []
    for tick in forward[:warm]:
        ticks += with_head(tick, num_groups)
    for index in range(max(len(backward), len(forward) - warm)):
        ticks += backward[index : index + 1]
        for tick in forward[warm + index : warm + index + 1]:
            ticks += with_head(tick, num_groups)
    return Table(
        num_stages=num_stages,
        num_groups=num_groups,
        num_sequences=num_sequences,
        chunk_lengths=tuple(chunk_lengths),
        ticks=tuple(ticks),
        name="seq1f1b",
    )
