"""The streams of forward and of backward ticks from which every generated table is put together."""

from collections.abc import Sequence

from sppo_jax.plan.table import Tick, Unit


def forward_ticks(num_stages: int, num_groups: int, sequences: Sequence[int], num_chunks: int) -> list[Tick]:
    """Returns all forward ticks of some sequences: first in, first out over sequences and over chunks.

    Chunks travel in groups of P = num_stages round the ring of stages, v = num_groups times. The n-th chunk
    overall runs virtual stage k P + s at tick (n // P) P v + k P + n % P + s.

    Args:
        sequences: numbers of the sequences, in order.
        num_chunks: chunks of each sequence.
    """
    order = [(sequence, chunk) for sequence in sequences for chunk in range(num_chunks)]
    return _stream("F", num_stages, num_groups, order)


def backward_ticks(num_stages: int, num_groups: int, sequences: Sequence[int], num_chunks: int) -> list[Tick]:
    """Returns all backward ticks of some sequences: first in, first out over sequences, last in, first out over chunks.

    The mirror image of `forward_ticks`: the b-th chunk to go back runs virtual stage V - 1 - r at the tick at
    which it would run virtual stage r forward, where V is the number of virtual stages.

    Args:
        sequences: numbers of the sequences, in order.
        num_chunks: chunks of each sequence.
    """
    order = [(sequence, chunk) for sequence in sequences for chunk in reversed(range(num_chunks))]
    return _stream("B", num_stages, num_groups, order)


def _stream(kind: str, num_stages: int, num_groups: int, order: list[tuple[int, int]]) -> list[Tick]:
    period = num_stages * num_groups
    rows: dict[int, list[Unit | None]] = {}
    for number, (sequence, chunk) in enumerate(order):
        start = number // num_stages * period + number % num_stages
        for step in range(period):
            virtual_stage = step if kind == "F" else period - 1 - step
            # Each step of a chunk takes one tick: k P + s is the step itself.
            row = rows.setdefault(start + step, [None] * num_stages)
            row[virtual_stage % num_stages] = Unit(kind, sequence, chunk, virtual_stage)
    return [Tick(kind, tuple(rows[index])) for index in sorted(rows)]


def with_head(tick: Tick, num_groups: int) -> list[Tick]:
    """Returns a forward tick and, where a chunk leaves the last virtual stage in it, the head tick of that chunk."""
    num_stages = len(tick.units)
    unit = tick.units[-1]
    if unit is None or unit.virtual_stage != num_stages * num_groups - 1:
        return [tick]
    head = Unit("H", unit.sequence, unit.chunk, unit.virtual_stage)
    return [tick, Tick("H", (head,) * num_stages)]


def fills_groups(num_stages: int, num_sequences: int, num_chunks: int) -> bool:
    """Returns whether chunks form whole groups of one chunk a stage; see `check_groups`."""
    if num_chunks % num_stages == 0:
        return True
    return num_stages % num_chunks == 0 and num_sequences * num_chunks % num_stages == 0


def check_groups(num_stages: int, num_groups: int, num_sequences: int, num_chunks: int) -> None:
    """Checks that chunks form whole groups of one chunk a stage, as travelling round the ring several times needs.

    Args:
        num_stages: pipeline stages.
        num_groups: virtual stages of each stage.
        num_sequences: sequences whose chunks may share a group.
        num_chunks: chunks of a sequence.

    Raises:
        ValueError: the chunks do not fill the groups, or a group straddles sequences unevenly.
    """
    if num_groups == 1 or fills_groups(num_stages, num_sequences, num_chunks):
        return
    below = num_chunks // num_stages * num_stages
    choices = f"{below} or {below + num_stages} chunks" if below else f"{num_stages} chunks"
    if num_stages % num_chunks == 0:
        choices += f", a multiple of {num_stages // num_chunks} sequences at once"
    raise ValueError(
        f"the chunks of an interleaved schedule must be a multiple of the {num_stages} stages, or divide them where "
        f"sequences at once x chunks are such a multiple, got {num_chunks} chunks with {num_sequences} sequences at "
        f"once; use {choices}, or schedule.interleave=1"
    )
