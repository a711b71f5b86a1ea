"""What the search looks through apart from the stash: chunk counts, their lengths, and the schedule of each layout."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from sppo_jax.models.counts import balance_weights
from sppo_jax.models.state_counts import has_attention
from sppo_jax.rules import MOST_SHAPES, UNCUT, Facts, check, sums_over_batch
from sppo_jax.schedule.generators import BREADTH_FIRST, ONE_AT_A_TIME
from sppo_jax.schedule.shapes import rounded_up, tick_shapes
from sppo_jax.schedule.streams import fills_convoys
from sppo_jax.schedule.table import chunk_starts
from sppo_jax.search.space.chunks import equal_lengths, flops_balanced_lengths, growing_counts
from sppo_jax.search.space.equal_cost import ChunkSeconds, chunk_seconds, equal_cost_lengths
from sppo_jax.search.space.layouts import Layout, layouts
from sppo_jax.search.space.offload import Places
from sppo_jax.search.space.request import USUAL, Request, Way

# Numbers of chunks worth considering: the largest, and how many even ones make uneven ones needless.
_MAX_COUNT, _ENOUGH_EVEN = 512, 4
# The most tokens of a chunk on one device where one group of layers at a time leaves room for longer ones. Longer
# chunks are no faster (0.1%), and the compiler takes up to 15% more memory for them than is predicted.
_MOST_TOKENS = 32768
# The most chunks a stage that breadth-first schedules balance by FLOPs.
_FLOPS_CHUNKS_A_STAGE = 8
# Sequences of a wave to consider.
_WAVES = (1, 2, 4, 8)
# The longest chunks of equal cost to consider, in mean chunks.
LONGEST = (1.25, 1.5, 2.0)
_KEPT = ("keep", "keep", "keep")


@dataclass(frozen=True, kw_only=True, eq=False)
class Partition:
    """A layout with a schedule and a number of chunks.

    Args:
        layout: how devices share the work.
        schedule: name of the schedule.
        num_chunks: chunks of a sequence.
        balance: "equal", "flops" or "cost", or "given" where the config gives the lengths.
        wave: sequences that run as one.
        longest: the longest chunk of equal cost, in mean chunks; 0 for other balances.
        most_shapes: the most tick shapes of chunks of equal cost.
    """

    layout: Layout
    schedule: str
    num_chunks: int
    balance: str
    wave: int = 1
    longest: float = 0.0
    most_shapes: int = MOST_SHAPES

    @property
    def drains(self) -> int:
        """How many times the pipeline fills and drains in a step."""
        return self.layout.sequences // self.wave if self.schedule in ONE_AT_A_TIME else 1

    @property
    def is_breadth_first(self) -> bool:
        """Whether all chunks pass one group of layers after another, forward and backward."""
        return self.schedule == BREADTH_FIRST

    @property
    def lets_chunks_wait(self) -> bool:
        """Whether chunks wait between two groups of layers."""
        return self.is_breadth_first and self.wave * self.num_chunks > self.layout.mesh.pipe

    @property
    def holds(self) -> tuple[int, bool, bool]:
        """What a stage's least memory depends on, besides the layout and the places."""
        return self.wave, self.lets_chunks_wait, self.num_chunks == 1

    def kv(self, places: Places) -> tuple[str, ...]:
        """Returns how keys and values may reach the backward, least device memory last: as asked, or every way.

        The backward of an only chunk makes them for itself.
        """
        asked, again = self.layout.request.config.stash.kv, "rebuild" if self.num_chunks > 1 else "recompute"
        if asked != "auto":
            return (again if asked == "rebuild" else asked,)
        if not self.is_breadth_first or places[0] == "recompute" or not has_attention(self.layout.request.config.model):
            return ("keep",)
        if places[0] == "period":
            ways = ("keep", "host", again) if self.num_chunks > 1 else ("keep", again)
            return ways if self.num_chunks == 1 or self.layout.most_whole <= 1 else ways[:-1]
        return ("keep", "host", again) if self.num_chunks > 1 else ("keep", again)

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
        if self.balance == "cost":
            return _equal_cost(self.layout, self.num_chunks, self.longest)
        pair_flops, token_flops = balance_weights(request.config.model, sequence.length)
        return flops_balanced_lengths(
            sequence.length, self.num_chunks, multiple, pair_flops=pair_flops, token_flops=token_flops
        )

    @cached_property
    def shapes(self) -> tuple[int, ...]:
        """The tokens that a tick may have, rising; none: those of its longest chunk.

        Raises:
            ValueError: shapes are given that do not suit the chunks.
        """
        asked, multiple = self.layout.request.config.sequence.shapes, self.layout.multiple_tokens
        if asked != "auto":
            check(Facts(shapes=asked, chunks=self.chunk_lengths, tile=multiple))
            return asked
        return tick_shapes(self.chunk_lengths, multiple, self.most_shapes) if self.balance == "cost" else ()

    @cached_property
    def padded_chunks(self) -> tuple[tuple[int, int, int], ...]:
        """Of each chunk its start, its tokens, and the tokens of a tick of its own."""
        lengths, shapes = self.chunk_lengths, self.shapes
        padded = [rounded_up(tokens, shapes) for tokens in lengths] if shapes else lengths
        return tuple(zip(chunk_starts(lengths), lengths, padded, strict=False))


class Candidate(NamedTuple):
    """One plan on its way through the search.

    Attributes:
        partition: mesh, split, interleave, weights, schedule, wave and chunks.
        places: of the stash.
        alpha: the rule for alpha, or its values.
        kv_grad_dtype: in which dK and dV are summed.
        kv: how keys and values reach the backward; empty: not decided yet.
        attention_from: the first chunk whose attention outputs are stashed, where they are.
        ring_pass: what travels on the ring; empty: what the config says.
    """

    partition: Partition
    places: Places
    alpha: str | float | tuple[float, ...]
    kv_grad_dtype: str
    kv: str = ""
    attention_from: int = 0
    ring_pass: str = ""

    @property
    def layout(self) -> Layout:
        """The layout of the candidate's partition."""
        return self.partition.layout

    @property
    def way(self) -> Way:
        """The way of the candidate's layout."""
        return self.layout.request.way

    @property
    def is_usual(self) -> bool:
        """Whether a breadth-first candidate holds the least: weights gathered, keys and values made again."""
        again = self.kv == self.partition.kv(self.places)[-1] or self.partition.num_chunks == 1
        return self.way.weights == USUAL.weights and again

    @property
    def complexity(self) -> tuple[int, int]:
        """Returns how many mechanisms the plan uses and its chunks; of two plans that tie, the lower is simpler."""
        partition, layout, breadth_first = self.partition, self.layout, self.partition.is_breadth_first
        mechanisms = (
            layout.interleave > 1,
            partition.wave > 1,
            breadth_first,
            breadth_first and self.way.weights != USUAL.weights,
            breadth_first and self.kv == "host",
            breadth_first and self.kv == "keep" and partition.num_chunks > 1,
            layout.mesh.pipe > 1,
            layout.split.ulysses > 1 and layout.split.ring > 1,
            partition.balance in ("flops", "cost"),
            "host" in self.places,
            "recompute" in self.places,
            "period" in self.places,
        )
        return sum(mechanisms), partition.num_chunks


def partitions(request: Request) -> Iterator[Partition]:
    """Yields every partition, plainest first.

    Raises:
        ValueError: the config, the model and the devices allow none.
    """
    chunks, balance = request.config.sequence.chunks, request.config.sequence.asked_balance
    table = request.table[0] if request.table is not None else None
    # Waves and chunks of equal FLOPs are two ways to the same end. Both together pad more and save little.
    open_choice = balance == "auto" and request.config.schedule.wave == "auto"
    for layout in layouts(request):
        if table is None and balance == "cost" and not isinstance(chunks, tuple):
            yield from equal_cost_partitions(layout)
            continue
        if table is not None or isinstance(chunks, tuple):
            count = table.num_chunks if table is not None else len(chunks)  # type: ignore[arg-type]
            counts, balances = [count], ["given"]
        else:
            counts = chunk_counts(layout) if chunks == "auto" else [int(chunks)]
            balances = ["equal", "flops"] if balance == "auto" else [balance]
        for count in counts:
            for way in balances if count > 1 and not _only_equal(layout, count) else balances[:1]:
                for schedule in schedules(layout, count):
                    for wave in waves(layout, schedule, count):
                        if wave > 1 and way == "flops" and open_choice:
                            continue
                        yield Partition(layout=layout, schedule=schedule, num_chunks=count, balance=way, wave=wave)


def _only_equal(layout: Layout, num_chunks: int) -> bool:
    """Returns whether chunks of equal FLOPs are left out, where the balance is open.

    With one stage a breadth-first schedule has no bubble to shorten, and ticks of several lengths share less memory
    than is predicted. With many chunks a stage the bubble is short, and what is lost is less than a tie.
    """
    request = layout.request
    open_balance = request.config.sequence.asked_balance == "auto" and request.way.schedule == BREADTH_FIRST
    return open_balance and (layout.mesh.pipe == 1 or num_chunks > _FLOPS_CHUNKS_A_STAGE * layout.mesh.pipe)


def equal_cost_partitions(layout: Layout, most: int = 0) -> Iterator[Partition]:
    """Yields the partitions of a layout into chunks of equal cost.

    Args:
        layout: the layout.
        most: a number of chunks, of which no less than half and no more are considered, and no waves; 0: any
            number.
    """
    chunks = layout.request.config.sequence.chunks
    counts = _uneven_counts(layout) if chunks == "auto" else [int(chunks)]  # type: ignore[arg-type]
    for count in counts:
        if most and not max(2, most / 2) <= count <= most:
            continue
        for longest in longest_chunks(layout.request) if count > 1 else (1.0,):
            for schedule in schedules(layout, count):
                for wave in waves(layout, schedule, count):
                    if wave > 1 and most:
                        continue
                    yield Partition(
                        layout=layout, schedule=schedule, num_chunks=count, balance="cost", wave=wave, longest=longest
                    )


def longest_chunks(request: Request) -> tuple[float, ...]:
    """Returns the longest chunks of equal cost to consider, in mean chunks."""
    asked = request.config.sequence.longest
    return LONGEST if asked == "auto" else (float(asked),)


def schedules(layout: Layout, num_chunks: int) -> list[str]:
    """Returns the names of the schedules to consider."""
    request = layout.request
    asked = request.way.schedule
    if request.table is not None:
        return ["table"]
    if asked != "auto":
        return [asked]
    interleaved = layout.interleave > 1
    chunked = ["interleaved-seq1f1b" if interleaved else "seq1f1b", "sppo"] if layout.sequences > 1 else ["sppo"]
    if num_chunks > 1 or (interleaved and layout.sequences == 1):
        return chunked
    uncut, wave = "interleaved-1f1b" if interleaved else "1f1b", request.config.schedule.wave
    # In waves of several, uncut sequences are scheduled like chunks.
    if (layout.mesh.pipe == 1 or wave == 1) and not _balances_over_batch(layout):
        return [uncut]
    return [uncut, *chunked] if wave == "auto" else chunked


def waves(layout: Layout, schedule: str, num_chunks: int) -> list[int]:
    """Returns the numbers of sequences of a wave to consider, rising."""
    request = layout.request
    if request.table is not None:
        return [request.table[0].wave]
    found = _wave_sizes(layout, schedule, num_chunks)
    if layout.interleave > 1 and _interleaved_by_choice(request):
        return [wave for wave in found if _fills_convoys(layout, schedule, num_chunks, wave)]
    return found


def _wave_sizes(layout: Layout, schedule: str, num_chunks: int) -> list[int]:
    asked = layout.request.config.schedule.wave
    if asked != "auto":
        return [asked]
    if layout.request.way.optimizer == "host":
        return [layout.sequences]  # gradients leave for the host once
    if _balances_over_batch(layout) and schedule != "gpipe":
        # All forwards come before the first backward.
        return [layout.sequences] if schedule not in UNCUT else []
    if schedule in UNCUT or layout.mesh.pipe == 1:
        return [1]
    # Uncut sequences in waves of one have the schedules of UNCUT.
    names = schedules(layout, num_chunks)
    least, most = 2 if names[0] in UNCUT else 1, max(1, _MAX_COUNT // num_chunks)
    # With all sequences in one wave, sppo has the same table.
    most = min(most, layout.sequences - 1) if schedule != "sppo" and "sppo" in names else most
    return [wave for wave in _WAVES if least <= wave <= most and layout.sequences % wave == 0]


def _balances_over_batch(layout: Layout) -> bool:
    """Returns whether a loss of several sequences balances the experts."""
    config = layout.request.config
    return sums_over_batch(config.model.routed.penalty_over, config.sequence.groups) and layout.sequences > 1


def _interleaved_by_choice(request: Request) -> bool:
    """Returns whether other counts, or a schedule without interleaving, are considered too.

    Otherwise a count that does not fill whole convoys is an error.
    """
    schedule = request.config.schedule
    plain = schedule.interleave == "auto" and not schedule.name.startswith("interleaved-")
    # Nothing but the number of sequences decides whether this schedule fills convoys.
    return plain or (request.config.sequence.chunks == "auto" and schedule.name != "interleaved-1f1b")


def _fills_convoys(layout: Layout, schedule: str, num_chunks: int, wave: int) -> bool:
    """Returns whether chunks form whole convoys of one a stage. A wave is one sequence of all of its chunks."""
    if schedule == BREADTH_FIRST:
        return True
    at_once = 1 if schedule == "sppo" else layout.sequences // wave
    return fills_convoys(layout.mesh.pipe, at_once, wave * num_chunks)


def smallest_chunk(layout: Layout) -> int:
    """Returns the tokens of the shortest chunk to consider."""
    return max(layout.request.cluster.device.smallest_chunk, layout.multiple_tokens)


@lru_cache(maxsize=256)
def _chunk_seconds(layout: Layout, num_chunks: int) -> ChunkSeconds:
    # What is recomputed would make about as much of every chunk: lengths do not depend on the stash.
    return chunk_seconds(layout.costs(_KEPT), layout.request.config.sequence.length, num_chunks)


def _equal_cost(layout: Layout, num_chunks: int, longest: float) -> tuple[int, ...]:
    run = layout.mesh.pipe if layout.interleave > 1 else 1
    length, multiple = layout.request.config.sequence.length, layout.multiple_tokens
    seconds = _chunk_seconds(layout, num_chunks)
    return equal_cost_lengths(length, num_chunks, multiple, seconds, longest=longest, run=run)


def chunk_counts(layout: Layout) -> list[int]:
    """Returns the numbers of chunks to consider, rising.

    Equal chunks have one length, which compiles least, so those that divide the sequence evenly are preferred.
    """
    config, multiple = layout.request.config, layout.multiple_tokens
    length, name = config.sequence.length, layout.request.way.schedule
    units, pipe = length // multiple, layout.mesh.pipe
    counts: Sequence[int] = range(1, min(_MAX_COUNT, max(1, length // smallest_chunk(layout))) + 1)
    if name in ("1f1b", "interleaved-1f1b"):
        counts = range(1, 2)
    elif layout.interleave > 1 and name != BREADTH_FIRST:
        # Chunks travel in convoys of one a stage; a shorter sequence than that is cut as little as possible.
        counts = range(pipe, max(counts[-1] // pipe * pipe, pipe) + 1, pipe)
    counts = counts[min(_least_count(layout), len(counts)) - 1 :]
    counts = counts if counts[-1] <= units else [count for count in counts if count <= units] or range(1, 2)
    even = [count for count in counts if units % count == 0]
    few = [count for count in _few_chunks(layout) if units % count == 0]
    if len(even) >= min(_ENOUGH_EVEN, len(counts)):
        return few + even
    if name == BREADTH_FIRST and even and even[0] < 2 * counts[0]:
        return even  # chunks of two lengths take more memory, for their ticks share less
    step = max(1, len(counts) // 32)
    return few + list(counts)[::step]


def _uneven_counts(layout: Layout) -> list[int]:
    """Returns the numbers of chunks to consider where lengths differ anyway: all small ones, then a fourth more."""
    in_groups = layout.interleave > 1 and layout.request.way.schedule != BREADTH_FIRST
    unit = layout.mesh.pipe if in_groups else 1
    most = chunk_counts(layout)[-1]
    found = [unit * count for count in growing_counts(most // unit)]
    return [count for count in found if in_groups or count >= _least_count(layout)] or [most]


def _least_count(layout: Layout) -> int:
    """Returns the least number of chunks to consider."""
    request = layout.request
    if request.way.schedule != BREADTH_FIRST:
        return 1
    # Keys and values that come back from the host need a chunk to come back beside.
    least = 2 if request.config.stash.kv == "host" else 1
    return max(least, -(-request.config.sequence.length // (layout.mesh.seq * _MOST_TOKENS)))


def _few_chunks(layout: Layout) -> list[int]:
    """Returns the numbers of chunks below the stages of an interleaved layout that fill whole convoys in some wave."""
    name = layout.request.way.schedule
    if layout.interleave == 1 or layout.sequences == 1 or name in (*UNCUT, BREADTH_FIRST):
        return []
    return [
        count
        for count in range(1, layout.mesh.pipe)
        if any(waves(layout, schedule, count) for schedule in schedules(layout, count))
    ]
