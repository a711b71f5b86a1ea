"""The streams of forward and of backward ticks from which every generated table is put together."""

from collections.abc import Sequence

from sppo_jax.schedule.table import Tick, Unit


def forward_ticks(
    num_stages: int, num_groups: int, sequences: Sequence[int], num_chunks: int, travelling: int | None = None
) -> list[Tick]:
    """Returns all forward ticks of some sequences: first in, first out over sequences and over chunks.

    Chunks travel in convoys of G round the ring of P = num_stages stages, v = num_groups times. The n-th chunk
    overall runs virtual stage k P + s at tick (n // G) G v + k G + n % G + s. With G = P no chunk waits between two
    rounds. With more, each chunk waits for G - P ticks, and G chunks pass a group of layers before any of them passes
    the next.

    Args:
        num_stages: pipeline stages.
        num_groups: virtual stages of each stage.
        sequences: numbers of the sequences, in order.
        num_chunks: chunks of each sequence.
        travelling: chunks that travel together, G, at least P; None: P.
    """
    order = [(sequence, chunk) for sequence in sequences for chunk in range(num_chunks)]
    return _stream("F", num_stages, num_groups, order, travelling or num_stages)


def backward_ticks(
    num_stages: int, num_groups: int, sequences: Sequence[int], num_chunks: int, travelling: int | None = None
) -> list[Tick]:
    """Returns all backward ticks of some sequences: first in, first out over sequences, last in, first out over chunks.

    The mirror image of `forward_ticks`: the b-th chunk to go back runs virtual stage V - 1 - r at the tick at
    which it would run virtual stage r forward, where V is the number of virtual stages.

    Args:
        num_stages, num_groups, sequences, num_chunks, travelling: as `forward_ticks`.
    """
    order = [(sequence, chunk) for sequence in sequences for chunk in reversed(range(num_chunks))]
    return _stream("B", num_stages, num_groups, order, travelling or num_stages)


def _stream(op: str, num_stages: int, num_groups: int, order: list[tuple[int, int]], travelling: int) -> list[Tick]:
    last = num_stages * num_groups - 1
    virtual_stages = range(last + 1) if op == "F" else range(last, -1, -1)
    places = [
        (number // num_stages * travelling + number % num_stages, virtual_stage % num_stages)
        for number, virtual_stage in enumerate(virtual_stages)
    ]
    starts = [number // travelling * travelling * num_groups + number % travelling for number in range(len(order))]
    rows: list[list[Unit | None]] = [[None] * num_stages for _ in range(starts[-1] + places[-1][0] + 1)]
    for start, (sequence, chunk) in zip(starts, order, strict=True):
        units = [Unit(op, sequence, chunk, virtual_stage) for virtual_stage in virtual_stages]
        for unit, (step, stage) in zip(units, places, strict=True):
            rows[start + step][stage] = unit
    return [Tick(op, tuple(row)) for row in rows]


def with_head(tick: Tick, num_groups: int) -> list[Tick]:
    """Returns a forward tick and, where a chunk leaves the last virtual stage in it, the head tick of that chunk."""
    num_stages = len(tick.units)
    unit = tick.units[-1]
    if unit is None or unit.virtual_stage != num_stages * num_groups - 1:
        return [tick]
    head = Unit("H", unit.sequence, unit.chunk, unit.virtual_stage)
    return [tick, Tick("H", (head,) * num_stages)]


def fills_convoys(num_stages: int, num_sequences: int, num_chunks: int) -> bool:
    """Returns whether chunks form whole convoys of one chunk a stage; see `check_convoys`."""
    if num_chunks % num_stages == 0:
        return True
    return num_stages % num_chunks == 0 and num_sequences * num_chunks % num_stages == 0


def check_convoys(num_stages: int, num_groups: int, num_sequences: int, num_chunks: int) -> None:
    """Checks that chunks form whole convoys of one chunk a stage, as travelling round the ring several times needs.

    Args:
        num_stages: pipeline stages.
        num_groups: virtual stages of each stage.
        num_sequences: sequences whose chunks may share a convoy.
        num_chunks: chunks of a sequence.

    Raises:
        ValueError: the chunks do not fill the convoys, or a convoy straddles sequences unevenly.
    """
    if num_groups == 1 or fills_convoys(num_stages, num_sequences, num_chunks):
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
