"""SPPO's order: each sequence alone, forward over its chunks and back again."""

from collections.abc import Sequence

from sppo_jax.schedule.streams import backward_ticks, check_groups, forward_ticks, with_head
from sppo_jax.schedule.table import Table, Tick


def sppo(num_stages: int, num_sequences: int, chunk_lengths: Sequence[int], num_groups: int = 1) -> Table:
    """Makes the table that runs all chunks of a sequence forward, then backward, then goes to the next sequence.

    Only one sequence is in flight, so every stage holds the keys and values of one.

    Args:
        num_stages: pipeline stages.
        num_sequences: sequences of one pipeline in a step.
        chunk_lengths: tokens of each chunk.
        num_groups: virtual stages of each stage.

    Raises:
        ValueError: num_groups > 1 and the chunks of a sequence do not form whole groups.
    """
    num_chunks = len(chunk_lengths)
    check_groups(num_stages, num_groups, 1, num_chunks)
    ticks: list[Tick] = []
    for sequence in range(num_sequences):
        for forward in forward_ticks(num_stages, num_groups, [sequence], num_chunks):
            ticks += with_head(forward, num_groups)
        ticks += backward_ticks(num_stages, num_groups, [sequence], num_chunks)
    return Table(
        num_stages=num_stages,
        num_groups=num_groups,
        num_sequences=num_sequences,
        chunk_lengths=tuple(chunk_lengths),
        ticks=tuple(ticks),
        name="sppo",
    )
