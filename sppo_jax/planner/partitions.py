"""What the search looks through apart from the stash: chunk counts, their lengths, and the schedule of each layout."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

from sppo_jax.models.counts import balance_weights
from sppo_jax.plan.streams import fills_groups
from sppo_jax.plan.waves import UNCUT
from sppo_jax.planner.chunks import check_length, equal_lengths, flops_balanced_lengths
from sppo_jax.planner.layouts import Layout, Request, layouts

# Numbers of chunks worth considering: the largest, and how many even ones make uneven ones needless.
_MAX_COUNT, _ENOUGH_EVEN = 512, 4
# Sequences of a wave to consider.
_WAVES = (1, 2, 4, 8)


@dataclass(frozen=True, kw_only=True)
class Partition:
    """A layout with a schedule and a number of chunks.

    Args:
        layout: how devices share the work.
        schedule: name of the schedule.
        num_chunks: chunks of a sequence.
        balance: "equal" or "flops", or "given" where the config gives the lengths.
        wave: sequences that run as one.
    """

    layout: Layout
    schedule: str
    num_chunks: int
    balance: str
    wave: int = 1

    @property
    def drains(self) -> int:
        """How many times the pipeline fills and drains in a step."""
        return self.layout.sequences // self.wave if self.schedule == "sppo" else 1

    @cached_property
    def chunk_lengths(self) -> tuple[int, ...]:
        """Tokens of each chunk.

        Raises:
            ValueError: the sequence cannot be cut so.
        """
        request, multiple = self.layout.request, self.layout.multiple_tokens
        sequence = request.config.sequence
        if request.table is not None:
            return request.table[0].chunk_lengths
        if isinstance(sequence.chunks, tuple):
            return sequence.chunks
        if self.balance == "equal":
            return equal_lengths(sequence.length, self.num_chunks, multiple)
        return _balanced(sequence.length, self.num_chunks, multiple, *balance_weights(request.config.model))


def partitions(request: Request) -> Iterator[Partition]:
    """Yields every partition, plainest first.

    Raises:
        ValueError: the config, the model and the devices allow none.
    """
    chunks, balance = request.config.sequence.chunks, request.config.sequence.balance
    table = request.table[0] if request.table is not None else None
    # Waves and chunks of equal FLOPs are two ways to the same end. Both together pad more and save little.
    open_choice = balance == "auto" and request.config.schedule.wave == "auto"
    for layout in layouts(request):
        if table is not None or isinstance(chunks, tuple):
            count = table.num_chunks if table is not None else len(chunks)  # type: ignore[arg-type]
            counts, balances = [count], ["given"]
        else:
            counts = chunk_counts(layout) if chunks == "auto" else [int(chunks)]
            balances = ["equal", "flops"] if balance == "auto" else [balance]
        for count in counts:
            for kind in balances if count > 1 else balances[:1]:
                for schedule in schedules(layout, count):
                    for wave in waves(layout, schedule, count):
                        if wave > 1 and kind == "flops" and open_choice:
                            continue
                        yield Partition(layout=layout, schedule=schedule, num_chunks=count, balance=kind, wave=wave)


def schedules(layout: Layout, num_chunks: int) -> list[str]:
    """Returns the names of the schedules to consider."""
    request = layout.request
    asked = request.config.schedule.name
    if request.table is not None:
        return ["table"]
    if asked != "auto":
        return [asked]
    in_waves = request.config.schedule.wave not in (1, "auto")
    if num_chunks == 1 and not in_waves and (layout.interleave == 1 or layout.sequences > 1):
        return ["1f1b" if layout.interleave == 1 else "interleaved-1f1b"]
    if layout.sequences == 1:
        return ["sppo"]
    return ["seq1f1b" if layout.interleave == 1 else "interleaved-seq1f1b", "sppo"]


def waves(layout: Layout, schedule: str, num_chunks: int) -> list[int]:
    """Returns the numbers of sequences of a wave to consider, rising."""
    request = layout.request
    if request.table is not None:
        return [request.table[0].wave]
    found = _wave_sizes(layout, schedule, num_chunks)
    if layout.interleave > 1 and _interleaved_by_choice(request):
        return [wave for wave in found if _fills_groups(layout, schedule, num_chunks, wave)]
    return found


def _wave_sizes(layout: Layout, schedule: str, num_chunks: int) -> list[int]:
    asked = layout.request.config.schedule.wave
    if asked != "auto":
        return [asked]
    if schedule in UNCUT or layout.mesh.pipe == 1:
        return [1]
    return [wave for wave in _WAVES if layout.sequences % wave == 0 and (wave == 1 or wave * num_chunks <= _MAX_COUNT)]


def _interleaved_by_choice(request: Request) -> bool:
    """Returns whether other counts, or a schedule without interleaving, are considered too.

    Otherwise a count that does not fill whole groups is an error.
    """
    schedule = request.config.schedule
    plain = schedule.interleave == "auto" and not schedule.name.startswith("interleaved-")
    return plain or request.config.sequence.chunks == "auto"


def _fills_groups(layout: Layout, schedule: str, num_chunks: int, wave: int) -> bool:
    """Returns whether chunks form whole groups of one a stage. A wave is one sequence of all of its chunks."""
    at_once = 1 if schedule == "sppo" else layout.sequences // wave
    return fills_groups(layout.mesh.pipe, at_once, wave * num_chunks)


def smallest_chunk(layout: Layout) -> int:
    """Returns the tokens of the shortest chunk to consider."""
    return max(layout.request.cluster.device.smallest_chunk, layout.multiple_tokens)


@lru_cache(maxsize=256)
def _balanced(length: int, count: int, multiple: int, pair_flops: float, token_flops: float) -> tuple[int, ...]:
    return flops_balanced_lengths(length, count, multiple, pair_flops=pair_flops, token_flops=token_flops)


def chunk_counts(layout: Layout) -> list[int]:
    """Returns the numbers of chunks to consider, rising.

    Equal chunks have one length, which compiles least, so those that divide the sequence evenly are preferred.
    """
    config, multiple = layout.request.config, layout.multiple_tokens
    length, name = config.sequence.length, config.schedule.name
    check_length(length, multiple)
    units, pipe = length // multiple, layout.mesh.pipe
    counts = range(1, min(_MAX_COUNT, max(1, length // smallest_chunk(layout))) + 1)
    if name in ("1f1b", "interleaved-1f1b"):
        counts = range(1, 2)
    elif layout.interleave > 1:
        # Chunks travel in groups of one a stage; a shorter sequence than that is cut as little as possible.
        counts = range(pipe, max(counts[-1] // pipe * pipe, pipe) + 1, pipe)
    even = [count for count in counts if units % count == 0]
    few = [count for count in _few_chunks(layout) if units % count == 0]
    if len(even) >= min(_ENOUGH_EVEN, len(counts)):
        return few + even
    step = max(1, len(counts) // 32)
    return few + list(counts)[::step]


def _few_chunks(layout: Layout) -> list[int]:
    """Returns the numbers of chunks below the stages of an interleaved layout that fill whole groups in some wave."""
    if layout.interleave == 1 or layout.sequences == 1 or layout.request.config.schedule.name in UNCUT:
        return []
    return [
        count
        for count in range(1, layout.mesh.pipe)
        if any(waves(layout, schedule, count) for schedule in schedules(layout, count))
    ]


def schedule_reason(layout: Layout, schedule: str, wave: int) -> str:
    """Returns why a layout has a schedule, in waves of so many sequences."""
    request, config = layout.request, layout.request.config
    if request.table is not None:
        return f"{request.table[0].name}, from {config.schedule.table}"
    if config.schedule.name != "auto":
        return "as requested"
    reason = {
        "1f1b": "sequences are not cut",
        "seq1f1b": "several sequences a pipeline overlap, so the pipeline fills and drains once",
        "sppo": "one sequence at a time goes forward over its chunks and back",
    }[schedule.removeprefix("interleaved-")]
    if wave > 1:
        reason += f"; {wave} sequences run as one, so the costs of chunks rise once for {wave} sequences"
    return f"{reason}; {layout.interleave} virtual stages a stage" if layout.interleave > 1 else reason
