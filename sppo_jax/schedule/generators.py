"""The named schedules: each makes a whole table from the numbers of stages, sequences and chunks."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from sppo_jax.rules import BREADTH_FIRST
from sppo_jax.schedule.streams import backward_ticks, check_convoys, forward_ticks, with_head
from sppo_jax.schedule.table import Table, Tick, Unit
from sppo_jax.schedule.waves import make_in_waves


def gpipe(num_stages: int, num_sequences: int, chunk_lengths: Sequence[int], num_groups: int = 1) -> Table:
    """Makes the table that runs all sequences forward and then all of them backward.

    Args:
        num_stages: pipeline stages.
        num_sequences: sequences of one pipeline in a step.
        chunk_lengths: tokens of each chunk.
        num_groups: virtual stages of each stage.

    Raises:
        ValueError: num_groups > 1 and the chunks do not form whole convoys.
    """
    num_chunks = len(chunk_lengths)
    check_convoys(num_stages, num_groups, num_sequences, num_chunks)
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


def sppo(num_stages: int, num_sequences: int, chunk_lengths: Sequence[int], num_groups: int = 1) -> Table:
    """Makes the table that runs all chunks of a sequence forward, then backward, then goes to the next sequence.

    Only one sequence is in flight, so every stage holds the keys and values of one.

    Args:
        num_stages: pipeline stages.
        num_sequences: sequences of one pipeline in a step.
        chunk_lengths: tokens of each chunk.
        num_groups: virtual stages of each stage.

    Raises:
        ValueError: num_groups > 1 and the chunks of a sequence do not form whole convoys.
    """
    num_chunks = len(chunk_lengths)
    check_convoys(num_stages, num_groups, 1, num_chunks)
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


def breadth_first(num_stages: int, num_sequences: int, chunk_lengths: Sequence[int], num_groups: int = 2) -> Table:
    """Makes the table in which all chunks of a sequence pass a group of layers before any of them passes the next.

    With P stages and N chunks, chunk i passes group k of stage s at tick k max(N, P) + i + s, and goes backward in the
    mirror image. A chunk waits between two groups. A stage works on one group at a time, so the keys and values of one
    group suffice (`StashPlan.kv`). As in `sppo`, one sequence is in flight.

    Args:
        num_stages: pipeline stages.
        num_sequences: sequences of one pipeline in a step.
        chunk_lengths: tokens of each chunk.
        num_groups: virtual stages of each stage, at least 2.

    Raises:
        ValueError: there is one group, so that there is no order of groups.
    """
    if num_groups < 2:
        raise ValueError(
            f"schedule breadth-first must have schedule.interleave of at least 2, got {num_groups}; raise "
            "schedule.interleave, or use schedule.name=sppo"
        )
    travelling = max(num_stages, len(chunk_lengths))
    ticks: list[Tick] = []
    for sequence in range(num_sequences):
        counts = num_stages, num_groups, [sequence], len(chunk_lengths), travelling
        for forward in forward_ticks(*counts):
            ticks += with_head(forward, num_groups)
        ticks += backward_ticks(*counts)
    return Table(
        num_stages=num_stages,
        num_groups=num_groups,
        num_sequences=num_sequences,
        chunk_lengths=tuple(chunk_lengths),
        ticks=tuple(ticks),
        name=BREADTH_FIRST,
    )


def seq1f1b(num_stages: int, num_sequences: int, chunk_lengths: Sequence[int], num_groups: int = 1) -> Table:
    """Makes the table that alternates backward and forward ticks once the first sequence is through.

    Forward ticks run until the first sequence has left the last virtual stage, since its last chunk is the
    first to go backward. Then one backward tick and one forward tick take turns, and when no forward tick is
    left the backward ticks finish. With P stages, N chunks and M sequences, one group, this takes N M + P - 1
    ticks of each op, and stage s holds at most min(N + 2 (P - 1 - s), N M) chunks.

    Args:
        num_stages: pipeline stages.
        num_sequences: sequences of one pipeline in a step.
        chunk_lengths: tokens of each chunk.
        num_groups: virtual stages of each stage.

    Raises:
        ValueError: num_groups > 1 and the chunks do not form whole convoys.
    """
    num_chunks = len(chunk_lengths)
    check_convoys(num_stages, num_groups, num_sequences, num_chunks)
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


def chunks_in_flight(num_stages: int, num_groups: int, num_sequences: int, num_chunks: int) -> int:
    """Returns the most chunks that a stage of `seq1f1b` holds at once, counted once for each of its groups of layers.

    Chunks of less than one a stage wait for each other in each group but the first.

    Args:
        num_stages: pipeline stages.
        num_groups: virtual stages of each stage.
        num_sequences: sequences of one pipeline in a step.
        num_chunks: chunks of a sequence.
    """
    round_of_all = max(num_chunks, num_stages) if num_groups > 1 else num_chunks
    behind = min(num_chunks, num_stages) if num_groups > 1 else num_stages
    most = num_groups * round_of_all + num_stages - 1 + behind - 1
    return min(most, num_groups * num_sequences * num_chunks)


def one_f_one_b(num_stages: int, num_sequences: int, chunk_lengths: Sequence[int], num_groups: int = 1) -> Table:
    """Makes the classic one-forward-one-backward table, in which a sequence is not cut: Seq1F1B of one chunk.

    Args:
        num_stages: pipeline stages.
        num_sequences: sequences of one pipeline in a step.
        chunk_lengths: the length of the sequence, alone.
        num_groups: virtual stages of each stage.

    Raises:
        ValueError: more than one chunk, or num_groups > 1 and the sequences do not form whole convoys.
    """
    if len(chunk_lengths) != 1:
        raise ValueError(
            f"schedule 1f1b must have one chunk a sequence, got {len(chunk_lengths)} chunks; "
            "use sequence.chunks=1, or schedule.name=seq1f1b"
        )
    if num_groups > 1 and num_sequences % num_stages:
        raise ValueError(
            f"the sequences of interleaved 1f1b must be a multiple of the {num_stages} stages, "
            f"got {num_sequences}; change sequence.per_pipeline, or use schedule.interleave=1"
        )
    return replace(seq1f1b(num_stages, num_sequences, chunk_lengths, num_groups), name="1f1b")


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
            f"schedule interleaved-{plain} must have schedule.interleave of at least 2, got {num_groups}; "
            f"raise schedule.interleave, or use schedule.name={plain}"
        )


# Those that run one sequence, or wave, after another: forward and backward, until the pipeline is empty.
ONE_AT_A_TIME = ("sppo", BREADTH_FIRST)
GENERATORS: dict[str, Callable[[int, int, Sequence[int], int], Table]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "sppo": sppo,
    BREADTH_FIRST: breadth_first,
    "seq1f1b": seq1f1b,
    "interleaved-1f1b": interleaved_one_f_one_b,
    "interleaved-seq1f1b": interleaved_seq1f1b,
}


def make_table(
    name: str, num_stages: int, num_sequences: int, chunk_lengths: Sequence[int], num_groups: int = 1, wave: int = 1
) -> Table:
    """Makes the table of a named schedule.

    Args:
        name: a key of GENERATORS.
        num_stages: pipeline stages.
        num_sequences: sequences of one pipeline in a step.
        chunk_lengths: tokens of each chunk, over all devices of a stage.
        num_groups: virtual stages of each stage.
        wave: sequences that run as one.

    Raises:
        ValueError: the name is unknown, a count is not positive, or the schedule cannot have this shape.
    """
    if wave != 1:
        return make_in_waves(make_table, name, num_stages, num_sequences, chunk_lengths, num_groups, wave)
    check_counts(name, num_stages, num_sequences, len(chunk_lengths), num_groups)
    return GENERATORS[name](num_stages, num_sequences, chunk_lengths, num_groups)


def check_counts(name: str, num_stages: int, num_sequences: int, num_chunks: int, num_groups: int) -> None:
    """Checks the name of a schedule and its counts, each by itself.

    Raises:
        ValueError: the name is unknown, a count is not positive, or the schedule has one virtual stage a stage.
    """
    if name not in GENERATORS:
        raise ValueError(f"the schedule must be one of {', '.join(GENERATORS)}, got {name!r}; choose one")
    for what, value in (
        ("pipeline stages", num_stages),
        ("sequences", num_sequences),
        ("chunks", num_chunks),
        ("virtual stages of a stage", num_groups),
    ):
        if value < 1:
            raise ValueError(f"the number of {what} of a schedule must be at least 1, got {value}; raise the number")
    if name in ("1f1b", "seq1f1b") and num_groups > 1:
        raise ValueError(
            f"schedule {name} must have schedule.interleave=1, got {num_groups}; use schedule.name=interleaved-{name}"
        )
