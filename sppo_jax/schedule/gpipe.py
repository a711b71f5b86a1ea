"""GPipe: everything forward, then everything backward."""

from collections.abc import Sequence

from sppo_jax.schedule.streams import backward_ticks, check_groups, forward_ticks, with_head
from sppo_jax.schedule.table import Table


def gpipe(num_stages: int, num_sequences: int, chunk_lengths: Sequence[int], num_groups: int = 1) -> Table:
    """Makes the table that runs all sequences forward and then all of them backward.

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
    ticks = [
        tick
        for forward in forward_ticks(num_stages, num_groups, sequences, num_chunks)
        for tick in with_head(forward, num_groups)
    ]
    ticks += backward_ticks(num_stages, num_groups, sequences, num_chunks)
    return Table(
        num_stages=num_stages,
        num_groups=num_groups,
        num_sequences=num_sequences,
        chunk_lengths=tuple(chunk_lengths),
        ticks=tuple(ticks),
        name="gpipe",
    )
