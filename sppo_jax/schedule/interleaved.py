"""Interleaved 1F1B and Seq1F1B: each stage holds several groups of layers and chunks go round several times."""

from collections.abc import Sequence
from dataclasses import replace

from sppo_jax.schedule.one_f_one_b import one_f_one_b
from sppo_jax.schedule.seq1f1b import seq1f1b
from sppo_jax.schedule.table import Table


def interleaved_one_f_one_b(
    num_stages: int, num_sequences: int, chunk_lengths: Sequence[int], num_groups: int = 2
) -> Table:
    """Makes the 1F1B table with several virtual stages a stage; see `one_f_one_b` for arguments and errors."""
    _check_interleaved("1f1b", num_groups)
    table = one_f_one_b(num_stages, num_sequences, chunk_lengths, num_groups)
    return replace(table, name="interleaved-1f1b")


def interleaved_seq1f1b(
    num_stages: int, num_sequences: int, chunk_lengths: Sequence[int], num_groups: int = 2
) -> Table:
    """Makes the Seq1F1B table with several virtual stages a stage; see `seq1f1b` for arguments and errors.

    With v groups a tick lasts 1/v of a stage, so the bubble is (P - 1) / v chunk times instead of P - 1.
    """
    _check_interleaved("seq1f1b", num_groups)
    table = seq1f1b(num_stages, num_sequences, chunk_lengths, num_groups)
    return replace(table, name="interleaved-seq1f1b")


def _check_interleaved(plain: str, num_groups: int) -> None:
    if num_groups < 2:
        raise ValueError(
            f"schedule interleaved-{plain} needs interleave >= 2, got {num_groups}: "
            f"set schedule.interleave, or use schedule {plain}"
        )
