"""The least seconds of a step before its table is built: from an uncut sequence, then from all of its chunks."""

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from sppo_jax.predict.seconds.costs import CostModel
from sppo_jax.predict.stash_bytes import token_bytes
from sppo_jax.rules import BREADTH_FIRST
from sppo_jax.schedule.outline import all_rounds, round_of
from sppo_jax.schedule.table import Repeat
from sppo_jax.search.bounds.least_memory import stash_of
from sppo_jax.search.bounds.least_waits import LeastWaits
from sppo_jax.search.space.layouts import Layout
from sppo_jax.search.space.offload import Places
from sppo_jax.search.space.partitions import Partition
from sppo_jax.search.space.request import Request

# The margin for what chunks do besides: kernels round up, and a bound is a sum in another order.
_MARGIN = 0.99
# Bounds are sums in another order than the simulator's.
_ROUNDED = 1 - 1e-12
RECOMPUTE: Places = ("recompute", "recompute", "recompute")
# Of each chunk its start, its tokens, and the tokens of its tick where these are more.
Chunks = tuple[tuple[int, int, int], ...]


class _Models(NamedTuple):
    """The costs of one layer, and of none without a ring; those of more layers are linear in these."""

    one: CostModel
    none: CostModel


class UnitTimes:
    """Seconds of units of layouts, keys and values kept; interleaves of a layout share what is worked out once."""

    def __init__(self) -> None:
        self._models: dict[tuple, _Models] = {}
        self._of_layers: dict[tuple, tuple[list[float], list[float]]] = {}
        self._overheads: dict[Layout, float] = {}

    def of_chunks(
        self, layout: Layout, places: Places, op: str, chunks: Chunks, whole_waves: bool = True
    ) -> tuple[list[float], list[float]]:
        """Returns the seconds of each chunk's unit on a virtual stage, in a tick with ends and in one without.

        What ticks with ends take more does not depend on what is recomputed.

        Args:
            layout: the layout.
            places: of the stash.
            op: "F", "B" or "H".
            chunks: the chunks.
            whole_waves: whether attention's last wave of queries counts as full, as the kernel has it.
        """
        models = self._models_of(layout, places, whole_waves)
        # What is recomputed changes the backwards alone.
        key = _sharing(layout), recomputed(places) if op == "B" else (), whole_waves, op, chunks
        if key not in self._of_layers:
            self._of_layers[key] = _of_one_and_none(models, op, chunks)
        layers, (one_s, fixed_s) = layout.mean_layers, self._of_layers[key]
        if op == "H":
            return one_s, one_s
        with_ends = [fixed + layers * (unit - fixed) for fixed, unit in zip(fixed_s, one_s, strict=True)]
        if layout.interleave == 1:
            return with_ends, with_ends
        lengths = [tokens if tokens > padded else padded for _, tokens, padded in chunks]
        ends_s = {tokens: models.none.ends_s(op, tokens) for tokens in set(lengths)}
        return with_ends, [unit - ends_s[tokens] for unit, tokens in zip(with_ends, lengths, strict=True)]

    def overhead_s(self, layout: Layout) -> float:
        """Returns the seconds of a step that belong to no tick."""
        if layout not in self._overheads:
            self._overheads[layout] = layout.costs(RECOMPUTE).step_overhead_s()
        return self._overheads[layout]

    def _models_of(self, layout: Layout, places: Places, whole_waves: bool) -> _Models:
        key = _sharing(layout), recomputed(places), whole_waves
        if key not in self._models:
            costs = layout.costs(places)
            if not whole_waves:
                # Nor is a chunk's attention slower than the fastest that was measured.
                times = costs.long_backward_times
                device = replace(costs.cluster.device, attention_rows=0, attention_rates=None, attention_backward=times)
                # Chunks read the prefix for their blocks alone, an uncut sequence for all of its own.
                costs = replace(costs, cluster=replace(costs.cluster, device=device), backward_queries=0)
            without_ring = replace(costs.ring, members=1)
            self._models[key] = _Models(replace(costs, layers=1), replace(costs, layers=0, ring=without_ring))
        return self._models[key]


def _of_one_and_none(models: _Models, op: str, chunks: Chunks) -> tuple[list[float], list[float]]:
    """Returns what each chunk's unit takes with one layer, and what it takes besides its layers."""
    seconds, none = models.one.seconds_of[op], models.none
    one_s = [seconds(*chunk) for chunk in chunks]
    if op == "H":
        return one_s, one_s
    overhead_s, lengths = none.cluster.device.overhead_s, [max(chunk[1:]) for chunk in chunks]
    known = {tokens: none.transfer_s(op, 0, tokens) + overhead_s for tokens in set(lengths)}
    return one_s, [known[tokens] for tokens in lengths]


def _sharing(layout: Layout) -> tuple:
    """Returns what the seconds of a layer depend on; a lone one does not run again in a period."""
    split = layout.split
    return layout.mesh, layout.weights, layout.request.way.optimizer, split.ulysses, split.ring, layout.layers == 1


@lru_cache(maxsize=64)
def recomputed(places: Places) -> tuple[bool, ...]:
    """Returns what of places the seconds of units depend on."""
    return (*(place == "recompute" for place in places), places[0] == "period")


class _Uncut(NamedTuple):
    """Seconds of an uncut sequence, and how they grow with the number of its chunks.

    Attributes:
        stage_s: of a stage for all sequences, and of the step besides its ticks.
        more_s: what each further chunk adds to these.
        unit_s: of a forward and a backward on one virtual stage.
        more_unit_s: what each further chunk adds to these.
    """

    stage_s: float
    more_s: float
    unit_s: float
    more_unit_s: float


class Span(NamedTuple):
    """What partitions of a layout are between, all of them with given chunks or none.

    Attributes:
        further: the fewest and the most of their `_further` chunks.
        most_chunks: the most chunks of a partition.
        drains: how many times the pipeline fills and drains at least.
    """

    further: tuple[int, int]
    most_chunks: int
    drains: int


def span_of(partitions: Iterable[Partition]) -> Span:
    """Returns the span of some partitions of a layout."""
    of_each = [(_further(one), one.num_chunks, one.drains) for one in partitions]
    further, counts, drains = zip(*of_each, strict=True)
    return Span((min(further), max(further)), max(counts), min(drains))


class LeastSeconds:
    """Bounds of the seconds of one request's choices; what choices share is worked out once.

    Those of a layout and of an uncut sequence cost microseconds each.
    """

    def __init__(self, request: Request) -> None:
        self.request, self._times, self._waits = request, UnitTimes(), LeastWaits(request)
        self._uncut: dict[tuple, _Uncut] = {}
        self._streams: dict[tuple, float] = {}
        self._of_kv: dict[tuple, float] = {}

    def of_layout(self, layout: Layout, places: Places, span: Span) -> float:
        """Returns about the least seconds of a step with any of the partitions of a layout that `span` tells of."""
        uncut, fills, (least, most) = self._uncut_of(layout, places), layout.mesh.pipe - 1, span.further
        fill_s = span.drains * fills * (uncut.unit_s + most * uncut.more_unit_s) / span.most_chunks
        return _MARGIN * (uncut.stage_s + least * uncut.more_s + fill_s + self._waits.of_layout(layout, places))

    @property
    def has_loops(self) -> bool:
        """Whether loops may wait for writes to the host."""
        return self._waits.has_loops

    def of_uncut(self, partition: Partition, places: Places, *, waits: bool = True) -> float:
        """Returns about the least seconds of a step, from an uncut sequence and what every chunk adds at least.

        No chunks take less together than their sequence uncut, and the pipeline fills with one that takes their mean.

        Args:
            partition: the partition.
            places: of the stash.
            waits: whether loops wait for writes to the host.
        """
        uncut, fills = self._uncut_of(partition.layout, places), partition.layout.mesh.pipe - 1
        further = _further(partition)
        waits_s = self._waits.of_uncut(partition, places) if waits else 0.0
        fill_s = partition.drains * fills * (uncut.unit_s + further * uncut.more_unit_s) / partition.num_chunks
        return _MARGIN * (uncut.stage_s + further * uncut.more_s + fill_s + waits_s)

    def of_partition(self, partition: Partition, places: Places, alpha: object, kv: str = "keep") -> float:
        """Returns the least seconds of a step with a partition's chunks: their ticks, each padded to a shape alone.

        Args:
            partition: the partition.
            places: of the stash.
            alpha: the rule for alpha, or its values.
            kv: how keys and values reach the backward.
        """
        layout = partition.layout
        # Diagonals that are read back at once have no copies: at most those of the last chunks.
        copied = max(0, partition.num_chunks - 3) if layout.sequences == 1 and alpha == "all" else 0
        bytes_a_token = token_bytes(layout.shape, stash_of(places, "float32")).away
        copy_s = bytes_a_token / layout.mesh.seq / self.request.cluster.host_link_bytes_s
        forward_s = self._times.of_chunks(layout, places, "F", partition.padded_chunks)[1]
        waits_s = self._waits.of_partition(partition, places, alpha, min(forward_s))
        total = self._times.overhead_s(layout) + waits_s
        for op in "FB":
            # A forward that waits for its copies lasts at least as long as they do.
            num_copied = 0 if op == "F" and waits_s else copied
            # What is recomputed changes the backwards alone.
            key = partition, op, recomputed(places) if op == "B" else (), copy_s if num_copied > 0 else 0.0
            if key not in self._streams:
                copies = [copy_s * tokens for _, _, tokens in partition.padded_chunks[:num_copied]]
                self._streams[key] = self._stream_s(partition, places, op, copies)
            total += partition.drains * self._streams[key]
        heads_s = sum(self._times.of_chunks(layout, places, "H", partition.padded_chunks)[0])
        return (total + layout.sequences * heads_s + self._kv_s(partition, places, kv)) * _ROUNDED

    def _stream_s(self, partition: Partition, places: Places, op: str, copies: list[float]) -> float:
        """Returns the least seconds of the ticks of an op, of which the first last as long as their copies."""
        layout, wave = partition.layout, partition.wave
        units = self._times.of_chunks(layout, places, op, partition.padded_chunks)
        entering, passing = (_in_wave(_at_least(one, copies), wave) for one in units)
        stages, groups = layout.mesh.pipe, layout.interleave
        if partition.schedule != BREADTH_FIRST:
            waves = layout.sequences // wave // partition.drains
            return stream_seconds(entering, stages, groups, num_sequences=waves, between=passing)
        # Each chunk has a tick in which it enters, and one in which it leaves.
        ends_s = 0.0 if copies else 2 * (sum(entering) - sum(passing))
        return breadth_first_seconds(passing, stages, groups) + ends_s

    def _uncut_of(self, layout: Layout, places: Places) -> _Uncut:
        key = layout, recomputed(places)
        if key not in self._uncut:
            self._uncut[key] = self._make_uncut(layout, places)
        return self._uncut[key]

    def _make_uncut(self, layout: Layout, places: Places) -> _Uncut:
        length, groups = self.request.config.sequence.length, layout.interleave
        # A chunk of no tokens at either end of the sequence tells what every chunk adds on the mean.
        ends = ((0, length, 0), (0, 0, 0), (length, 0, 0))
        unit_s = more_unit_s = stage_s = more_s = 0.0
        for op in "FBH":
            entering, passing = self._times.of_chunks(layout, places, op, ends, whole_waves=False)
            once = 1 if op == "H" else groups
            stage_s += entering[0] + (once - 1) * passing[0]
            more_s += (entering[1] + entering[2] + (once - 1) * (passing[1] + passing[2])) / 2
            if op != "H":
                unit_s, more_unit_s = unit_s + passing[0], more_unit_s + (passing[1] + passing[2]) / 2
        stage_s = layout.sequences * stage_s + self._times.overhead_s(layout)
        return _Uncut(stage_s, layout.sequences * more_s, unit_s, more_unit_s)

    def _kv_s(self, partition: Partition, places: Places, kv: str) -> float:
        """Returns the least seconds in which keys and values get to the backward, where they are not kept.

        They depend on the tokens of a chunk alone, so every tick of a backward takes at least those of the shortest.
        """
        layout = partition.layout
        if kv == "keep":
            return 0.0
        tokens = min(partition.chunk_lengths)
        key = layout, kv, recomputed(places), tokens
        if key not in self._of_kv:
            kept, again = layout.costs(places), layout.costs(places, kv)
            self._of_kv[key] = again.seconds("B", 0, tokens) - kept.seconds("B", 0, tokens)
        return layout.sequences * layout.interleave * partition.num_chunks * self._of_kv[key]


def _further(partition: Partition) -> int:
    """Returns how many chunks of a partition add at least what a chunk of no tokens adds on the mean.

    Of chunks that are equal, or longer at the start, all but one do. Of given chunks the first ones may be short, and
    then further ones add little.
    """
    return partition.num_chunks - 1 if partition.balance != "given" else 0


def _at_least(units: list[float], copies: list[float]) -> list[float]:
    return [max(pair) for pair in zip(units, copies, strict=False)] + units[len(copies) :] if copies else units


def _in_wave(units: list[float], wave: int) -> list[float]:
    return [seconds for seconds in units for _ in range(wave)]


def stream_seconds(
    units: list[float],
    num_stages: int,
    num_groups: int,
    *,
    num_sequences: int = 1,
    between: list[float] | None = None,
) -> float:
    """Returns the seconds of all ticks of one op in a generated table.

    Chunks enter in convoys of one a stage and stay for a tick on each virtual stage. A tick lasts as long as the
    slowest of the chunks that are in the pipeline, which are neighbours.

    Args:
        units: seconds of each chunk of a sequence on a virtual stage, in the order in which the chunks enter.
        num_stages: stages.
        num_groups: virtual stages of a stage.
        num_sequences: sequences that enter one after another.
        between: seconds of each chunk in a tick without ends (`TickShape`); None: as in a tick with ends.
    """
    one, fill = round_of(num_stages, len(units), num_groups), num_stages * num_groups
    # With a round more than fills the pipeline, the ticks behind the filling are those of any other round.
    written = (1 + -(-fill // one.ticks)) * one.sequences
    left_out = max(0, (num_sequences - written) // one.sequences)
    sequences = num_sequences - left_out * one.sequences
    tick_s = _tick_seconds(units * sequences, (between or units) * sequences, num_stages, num_groups)
    return sum(all_rounds(tick_s, [Repeat(fill, fill + one.ticks, left_out + 1, one.sequences)]))


def breadth_first_seconds(units: list[float], num_stages: int, num_groups: int) -> float:
    """Returns the seconds of all ticks of one op of one sequence in a breadth-first table, as if none had ends.

    They are a stream of the chunks of all groups of layers, one group after another, through stages of one group.

    Args:
        units: seconds of each chunk on a virtual stage.
        num_stages: stages.
        num_groups: virtual stages of a stage.
    """
    of_group = [*units, *[0.0] * (num_stages - len(units))]
    return stream_seconds(of_group * num_groups, num_stages, 1)


def _tick_seconds(units: list[float], between: list[float], num_stages: int, num_groups: int) -> list[float]:
    """Returns the seconds of each tick; a convoy of one chunk a stage enters every `num_stages * num_groups` ticks."""
    if num_groups == 1:
        return _slowest_of_neighbours(units, num_stages)
    tick_s: list[float] = []
    # The slowest of the convoy before from each of its chunks on.
    staying: list[float] = []
    for first in range(0, len(units), num_stages):
        convoy = units[first : first + num_stages]
        entered = list(accumulate(convoy, max))
        slowest = entered[-1]
        entered += [slowest] * (num_stages - len(convoy))
        # While a convoy enters, the convoy before it leaves.
        tick_s += [*map(max, entered, staying[1:]), *entered[max(0, len(staying) - 1) :]]
        alone = (num_groups - 1) * num_stages - 1
        tick_s += [max(between[first : first + num_stages])] * alone + [slowest]
        staying = list(accumulate(reversed(convoy), max))[::-1]
    return tick_s + staying[1:]


def _slowest_of_neighbours(units: list[float], num_stages: int) -> list[float]:
    """Returns the seconds of ticks in which up to so many neighbours are in the pipeline, from the first in alone."""
    slowest, reach = units, 1
    while reach < num_stages:
        more = min(reach, num_stages - reach)
        slowest, reach = [*slowest[:more], *map(max, slowest[more:], slowest), *slowest[-more:]], reach + more
    return slowest
