"""About the least seconds of a step, from an uncut sequence or from a few chunks, before chunk lengths are known."""

import math
from typing import NamedTuple

from sppo_jax.models.counts import balance_weights
from sppo_jax.plan.table import BREADTH_FIRST
from sppo_jax.planner.layouts import Layout, Request
from sppo_jax.planner.offload import Places
from sppo_jax.planner.partitions import Partition
from sppo_jax.planner.unit_times import UnitTimes, recomputed

# Chunks at which the cost along a sequence is sampled, and the margin for what lies between them.
_SAMPLES, _MARGIN = 9, 0.99


class _Uncut(NamedTuple):
    """Seconds of an uncut sequence, and how they grow with the number of its chunks.

    Attributes:
        stage_s: of a stage for all sequences, and of the step besides its ticks.
        more_s: what each further chunk adds to these.
        unit_s: of a forward and a backward on one virtual stage.
        more_unit_s: what each further chunk adds to these.
        ring_s: what the ring of a virtual stage sends, which is part of `unit_s`.
        more_ring_s: the same of `more_unit_s`.
    """

    stage_s: float
    more_s: float
    unit_s: float
    more_unit_s: float
    ring_s: float
    more_ring_s: float


class _Sampled(NamedTuple):
    """Of all units of a kind on one virtual stage: their seconds together, those of a few, and what rises evenly.

    With interleaving these are seconds in a tick without ends, and `ends_s` is what a sequence's ends add.
    """

    work_s: float
    units: list[float]
    ends_s: float
    even_rise_s: float

    def above(self, count: int, num_chunks: int) -> float:
        """Returns seconds that at least so many of the first chunks do not exceed, where costs rise."""
        last = len(self.units) - 1
        # Samples lie evenly over the chunks; it is the first one that does not lie before the last of these chunks.
        return self.units[min(last, -(-(count - 1) * last // max(1, num_chunks - 1)) if count > 0 else 0)]


class RoughBounds:
    """Rough bounds of the seconds of a request's choices; what choices share is worked out once."""

    def __init__(self, request: Request, times: UnitTimes) -> None:
        self.request, self._times = request, times
        self._length = request.config.sequence.length
        self._uncut: dict[tuple, _Uncut] = {}
        self._sampled: dict[tuple, _Sampled] = {}
        self._streams: dict[tuple, float] = {}
        self._rings: dict[tuple, float] = {}

    def layout_s(self, layout: Layout, places: Places, counts: tuple[int, int], drains: int) -> float:
        """Returns about the least seconds of a step with any partition of a layout.

        Args:
            layout: the layout.
            places: of the stash.
            counts: the fewest chunks of a partition, and the most.
            drains: how many times the pipeline fills and drains at least.
        """
        uncut, waits, (fewest, most) = self._of_uncut(layout, places), layout.mesh.pipe - 1, counts
        fill_s = drains * waits * (uncut.unit_s + (most - 1) * uncut.more_unit_s) / most
        return _MARGIN * (uncut.stage_s + (fewest - 1) * uncut.more_s + fill_s)

    def uncut_step_s(self, partition: Partition, places: Places) -> float:
        """Returns about the least seconds of a step, from an uncut sequence and what every chunk adds at least.

        No chunks take less together than their sequence uncut, and the pipeline fills with one that takes their mean.
        """
        uncut, waits = self._of_uncut(partition.layout, places), partition.layout.mesh.pipe - 1
        # What a chunk adds is the mean of chunks that are equal, or longer at the start; others may add less.
        further = partition.num_chunks - 1 if partition.balance != "given" else 0
        fill_s = partition.drains * waits * (uncut.unit_s + further * uncut.more_unit_s) / partition.num_chunks
        return _MARGIN * (uncut.stage_s + further * uncut.more_s + fill_s)

    def sampled_step_s(self, partition: Partition, places: Places) -> float:
        """Returns about the least seconds of a step, from a few of its chunks."""
        if partition.balance != "equal":
            uncut_s = self.uncut_step_s(partition, places)
            return uncut_s + _MARGIN * self._more_ring_s(partition, places)
        layout = partition.layout
        heads_s = layout.sequences * self._samples(partition, places, "H").work_s
        streams_s = sum(self._stream_s(partition, places, kind) for kind in "FB")
        return _MARGIN * (heads_s + streams_s + self._times.overhead_s(layout))

    def work_s(self, partition: Partition, places: Places) -> float:
        """Returns about the seconds in which a stage computes all chunks of its sequences, forward and backward."""
        return sum(_stage_work_s(partition, self._samples(partition, places, kind)) for kind in "FB")

    def _of_uncut(self, layout: Layout, places: Places) -> _Uncut:
        key = layout, recomputed(places)
        if key not in self._uncut:
            self._uncut[key] = self._make_uncut(layout, places)
        return self._uncut[key]

    def _make_uncut(self, layout: Layout, places: Places) -> _Uncut:
        length, groups = self._length, layout.interleave
        # A chunk of no tokens at either end of the sequence tells what every chunk adds on the mean.
        ends = ((0, length, 0), (0, 0, 0), (length, 0, 0))
        unit_s = more_unit_s = stage_s = more_s = 0.0
        for kind in "FBH":
            entering, passing = self._times.of_chunks(layout, places, kind, ends, whole_waves=False)
            once = 1 if kind == "H" else groups
            stage_s += entering[0] + (once - 1) * passing[0]
            more_s += (entering[1] + entering[2] + (once - 1) * (passing[1] + passing[2])) / 2
            if kind != "H":
                unit_s, more_unit_s = unit_s + passing[0], more_unit_s + (passing[1] + passing[2]) / 2
        sent_s = [self._sent_s(layout, places, tokens, end) for tokens, end in ((length, length), (0, 0), (0, length))]
        stage_s = layout.sequences * stage_s + self._times.overhead_s(layout)
        more_ring_s = (sent_s[1] + sent_s[2]) / 2
        return _Uncut(stage_s, layout.sequences * more_s, unit_s, more_unit_s, sent_s[0], more_ring_s)

    def _sent_s(self, layout: Layout, places: Places, tokens: float, reach: int) -> float:
        """Returns the seconds in which a chunk's forward and backward send on the ring of a virtual stage."""
        if layout.split.ring == 1:
            return 0.0
        return sum(self._times.ring_s(layout, places, kind, tokens, reach) for kind in "FB")

    def _more_ring_s(self, partition: Partition, places: Places) -> float:
        """Returns about the least seconds that chunks of equal FLOPs send on the ring, less what the other bound knows.

        A chunk takes at most twice the mean, as the last of equal chunks would. So its tokens are bounded, and for each
        token it sends at least what the longest possible chunk would from there.
        """
        layout, count = partition.layout, partition.num_chunks
        if layout.split.ring == 1 or partition.balance != "flops":
            return 0.0
        key = layout, recomputed(places), count
        if key not in self._rings:
            sent_s, parts = 0.0, _SAMPLES - 1
            for part in range(parts):
                start = self._length * part // parts
                tokens = self._most_tokens(start, count)
                sent_s += self._sent_s(layout, places, tokens, start) / tokens * self._length / parts
            uncut = self._of_uncut(layout, places)
            more_s = max(0.0, sent_s - uncut.ring_s - (count - 1) * uncut.more_ring_s)
            self._rings[key] = layout.sequences * layout.interleave * more_s
        return self._rings[key]

    def _most_tokens(self, token: int, count: int) -> float:
        """Returns the most tokens of the chunk that a token is in, where no chunk takes more than twice the mean."""
        pair, linear = balance_weights(self.request.config.model)
        most = 2 * (pair * self._length / 2 + linear) * self._length / count
        first = 2 * most / (linear + math.sqrt(linear * linear + 2 * pair * most))
        slope = pair * token + linear
        if token <= first or slope * slope <= 2 * pair * most:
            return min(first, self._length)
        return min(self._length, 2 * most / (slope + math.sqrt(slope * slope - 2 * pair * most)))

    def _stream_s(self, partition: Partition, places: Places, kind: str) -> float:
        # What is recomputed changes the backwards alone.
        key = partition, kind, recomputed(places) if kind == "B" else ()
        if key not in self._streams:
            self._streams[key] = _stream_s(partition, self._samples(partition, places, kind))
        return self._streams[key]

    def _samples(self, partition: Partition, places: Places, kind: str) -> _Sampled:
        """Returns samples of the units of a kind on one virtual stage; schedule and wave change none of them."""
        # What is recomputed changes the backwards alone.
        of_kind = kind, recomputed(places) if kind == "B" else ()
        key = partition.layout, partition.num_chunks, partition.balance, of_kind
        if key not in self._sampled:
            self._sampled[key] = self._sample(partition, places, kind)
        return self._sampled[key]

    def _sample(self, partition: Partition, places: Places, kind: str) -> _Sampled:
        layout, length, count = partition.layout, self._length, partition.num_chunks
        mean, samples = length // count, min(count, _SAMPLES)
        starts = [(length - mean) * index // max(1, samples - 1) for index in range(samples)]
        # How full attention's last wave is depends on where each chunk begins and ends, which only equal ones tell.
        equal = partition.balance == "equal"
        # Those that do not divide the sequence have two lengths, and ticks of the longer one.
        lengths = {partition.chunk_lengths[0], partition.chunk_lengths[-1]} if equal else {mean}
        tokens, longest = min(lengths), max(lengths)
        found = [
            self._times.of_chunks(layout, places, kind, tuple((start, one, longest) for start in starts), equal)
            for one in lengths
        ]
        entering, units = ([min(pair) for pair in zip(*seconds, strict=True)] for seconds in zip(*found, strict=True))
        # Of interleaved ticks only those with ends take more: each chunk has a tick of its own in which it enters.
        ends_s = count * (entering[0] - units[0])
        sent = [0.0] * samples
        if layout.split.ring > 1 and kind != "H":
            sent = [self._times.ring_s(layout, places, kind, tokens, start + tokens) for start in starts]
        computed = [unit - ring for unit, ring in zip(units, sent, strict=True)]
        # Whole blocks of attention rise by steps.
        rise_s = 0.0 if self._times.has_blocks() else max(0.0, computed[-1] - computed[0])
        if samples == count:
            return _Sampled(sum(units), units, ends_s, rise_s)
        # What is computed rises evenly along the sequence: the ends stand for half as many chunks as the others. What
        # the ring sends rises by steps, for it passes the prefix in a few static lengths: a part's lower end is sure.
        above = (computed[0] + computed[-1]) / 2 + sent[-1]
        if self._times.has_blocks() and layout.split.ring > 1:
            above = units[-1]
        return _Sampled((sum(units) - above) / (samples - 1) * count, units, ends_s, rise_s)


def _stream_s(partition: Partition, sampled: _Sampled) -> float:
    """Returns about the least seconds of all ticks of a kind.

    Where a wave follows another one into the full pipeline, the last chunks of the one delay the first of the other.
    Each of the P - 1 ticks lasts longer by what a chunk's cost rises from the other's first P - 1 chunks on.
    """
    layout, waits = partition.layout, partition.layout.mesh.pipe - 1
    work_s = _stage_work_s(partition, sampled)
    rise_s = sampled.units[-1] - sampled.above(-(-waits // partition.wave), partition.num_chunks)
    if partition.schedule == BREADTH_FIRST:
        # Each pass of a group of layers begins while the costly chunks of the pass before leave.
        rises_s = (layout.interleave - 1) * max(0.0, rise_s)
        return work_s + partition.drains * waits * (sampled.work_s / partition.num_chunks + rises_s)
    between = layout.sequences // partition.wave - partition.drains
    work_s += _group_waits_s(partition, sampled)
    return work_s + waits * (partition.drains * sampled.units[-1] + between * max(0.0, rise_s))


def _stage_work_s(partition: Partition, sampled: _Sampled) -> float:
    """Returns about the seconds of all units of a kind on a stage, and of what the ticks with ends take more."""
    layout = partition.layout
    return layout.sequences * (layout.interleave * sampled.work_s + sampled.ends_s)


def _group_waits_s(partition: Partition, sampled: _Sampled) -> float:
    """Returns about the least seconds for which the chunks of a group wait for the costliest of them.

    A group of P equal chunks goes round v times, the last v - 1 of them at the pace of its costliest chunk. Over a wave
    of k sequences, costs that rise evenly then cost (v - 1) (P - k) / 2 times the whole rise, with the chunks of the
    wave in place of P where they are fewer.
    """
    layout, wave = partition.layout, partition.wave
    waiting = max(0, min(layout.mesh.pipe, wave * partition.num_chunks) - wave) / 2
    return layout.sequences // wave * (layout.interleave - 1) * waiting * sampled.even_rise_s
