"""1F1B: one whole sequence forward, one backward."""

from collections.abc import Sequence
from dataclasses import replace

from sppo_jax.schedule.seq1f1b import seq1f1b
from sppo_jax.schedule.table import Table


def one_f_one_b(num_stages: int, num_sequences: int, chunk_lengths: Sequence[int], num_groups: int = 1) -> Table:
    """Makes the classic one-forward-one-backward table, in which a sequence is not cut: Seq1F1B of one chunk.

    Args:
        num_stages: pipeline stages.
        num_sequences: sequences of one pipeline in a step.
        chunk_lengths: the length of the sequence, alone.
        num_groups: virtual stages of each stage.

    Raises:
        ValueError: more than one chunk, or num_groups > 1 and the sequences do not form whole groups.
    """
    if len(chunk_lengths) != 1:
        raise ValueError(
            f"schedule 1f1b runs whole sequences, got {len(chunk_lengths)} chunks: "
            "use sequence.chunks=1, or schedule seq1f1b"
        )
    if num_groups > 1 and num_sequences % num_stages:
        raise ValueError(
            f"interleaved 1f1b needs the number of sequences to be a multiple of the {num_stages} stages, "
            f"got {num_sequences}: change sequence.per_pipeline, or use interleave=1"
        )
    return replace(seq1f1b(num_stages, num_sequences, chunk_lengths, num_groups), name="1f1b")
