"""The names by which plans and configs ask for a generated table."""

from collections.abc import Callable, Sequence

from sppo_jax.schedule.gpipe import gpipe
from sppo_jax.schedule.interleaved import interleaved_one_f_one_b, interleaved_seq1f1b
from sppo_jax.schedule.one_f_one_b import one_f_one_b
from sppo_jax.schedule.seq1f1b import seq1f1b
from sppo_jax.schedule.sppo import sppo
from sppo_jax.schedule.table import Table

GENERATORS: dict[str, Callable[[int, int, Sequence[int], int], Table]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "sppo": sppo,
    "seq1f1b": seq1f1b,
    "interleaved-1f1b": interleaved_one_f_one_b,
    "interleaved-seq1f1b": interleaved_seq1f1b,
}


def make_table(
    name: str, num_stages: int, num_sequences: int, chunk_lengths: Sequence[int], num_groups: int = 1
) -> Table:
    """Makes the table of a named schedule.

    Args:
        name: a key of GENERATORS.
        num_stages: pipeline stages.
        num_sequences: sequences of one pipeline in a step.
        chunk_lengths: tokens of each chunk, over all devices of a stage.
        num_groups: virtual stages of each stage.

    Raises:
        ValueError: the name is unknown, a count is not positive, or the schedule cannot have this shape.
    """
    check_counts(name, num_stages, num_sequences, len(chunk_lengths), num_groups)
    return GENERATORS[name](num_stages, num_sequences, chunk_lengths, num_groups)


def check_counts(name: str, num_stages: int, num_sequences: int, num_chunks: int, num_groups: int) -> None:
    """Checks the name of a schedule and its counts, each by itself.

    Raises:
        ValueError: the name is unknown, a count is not positive, or the schedule has one virtual stage a stage.
    """
    if name not in GENERATORS:
        raise ValueError(f"unknown schedule {name!r}: choose one of {', '.join(GENERATORS)}")
    for what, value in (
        ("pipeline stages", num_stages),
        ("sequences", num_sequences),
        ("chunks", num_chunks),
        ("virtual stages of a stage", num_groups),
    ):
        if value < 1:
            raise ValueError(f"a schedule needs at least one of its {what}, got {value}")
    if name in ("1f1b", "seq1f1b") and num_groups > 1:
        raise ValueError(
            f"schedule {name} has one virtual stage a stage, got interleave={num_groups}: use interleaved-{name}"
        )
