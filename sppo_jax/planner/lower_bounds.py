"""Lower bounds of a choice's step and memory, by which the search orders and drops choices before it builds tables."""

from copy import copy
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from sppo_jax.plan.outline import all_rounds, round_of
from sppo_jax.plan.plan import MeshShape, SchedulePlan, StashPlan, schedule_table
from sppo_jax.plan.shapes import rounded_up
from sppo_jax.plan.table import BREADTH_FIRST, Repeat
from sppo_jax.planner.costs import CostModel
from sppo_jax.planner.evaluate import layout_costs
from sppo_jax.planner.layouts import Layout, Request
from sppo_jax.planner.memory import (
    Memory,
    backward_work,
    idle_table_bytes,
    kv_heads_per_device,
    optimizer_bytes,
    predict_memory,
    token_bytes,
    usable_bytes,
    usable_host_bytes,
    weight_bytes,
)
from sppo_jax.planner.offload import Places
from sppo_jax.planner.partitions import Partition, smallest_chunk

# Chunks at which the cost along a sequence is sampled, and the margin for what lies between them.
_SAMPLES, _MARGIN = 9, 0.99
# Bounds are sums in another order than the simulator's.
_ROUNDED = 1 - 1e-12
_RECOMPUTE: Places = ("recompute", "recompute", "recompute")


class LowerBounds:
    """Bounds for the choices of one request, dK and dV in one dtype; what choices share is worked out once."""

    def __init__(self, request: Request, kv_grad_dtype: str) -> None:
        self.request, self.dtype = request, kv_grad_dtype
        self._smallest: dict[tuple[MeshShape, int, int, str], Memory] = {}
        self._weights: dict[tuple[Layout, str], int] = {}
        self._models: dict[tuple, CostModel] = {}
        self._of_one_and_none: dict[tuple, tuple[CostModel, CostModel]] = {}
        self._overheads: dict[Layout, float] = {}
        self._streams: dict[tuple, float] = {}
        self._sampled: dict[tuple, dict[tuple, _Sampled]] = {}
        self._of_layers: dict[tuple, list[list[float]]] = {}
        self._of_kv: dict[tuple, float] = {}
        self._but_backward: dict[Partition, float] = {}
        self._rough: dict[tuple, float] = {}

    def with_dtype(self, kv_grad_dtype: str) -> "LowerBounds":
        """Returns the bounds with dK and dV in another dtype; they share what is known, for seconds do not differ."""
        other = copy(self)
        other.dtype = kv_grad_dtype
        return other

    def rough_step_s(self, partition: Partition, places: Places) -> float:
        """Returns about the least seconds of a step, from a few of its chunks."""
        # What is recomputed changes the backwards alone.
        if partition not in self._but_backward:
            heads_s = partition.layout.sequences * self._samples(partition, places, "H").work_s
            forward_s = self._sampled_stream_s(partition, self._samples(partition, places, "F"))
            self._but_backward[partition] = heads_s + forward_s + self._overhead_s(partition.layout)
        key = partition, _recomputed(places)
        if key not in self._rough:
            backward_s = self._sampled_stream_s(partition, self._samples(partition, places, "B"))
            self._rough[key] = _MARGIN * (self._but_backward[partition] + backward_s)
        return self._rough[key]

    def work_s(self, partition: Partition, places: Places) -> float:
        """Returns about the seconds in which a stage computes all chunks of its sequences, forward and backward."""
        return sum(self._stage_work_s(partition, self._samples(partition, places, kind)) for kind in "FB")

    def step_s(self, partition: Partition, places: Places, alpha: object) -> float:
        """Returns the least seconds of a step with a partition's chunks: their ticks, each padded to a shape alone."""
        costs, layout = self._costs(partition.layout, places), partition.layout
        # Diagonals that are read back at once have no copies: at most those of the last chunks.
        copied = max(0, partition.num_chunks - 3) if layout.sequences == 1 and alpha == "all" else 0
        bytes_a_token = token_bytes(layout.shape, _stash(places, self.dtype)).away
        copy_s = bytes_a_token / layout.mesh.seq / self.request.cluster.host_link_bytes_s
        total = self._overhead_s(layout)
        for kind in "FB":
            # What is recomputed changes the backwards alone.
            key = partition, kind, _recomputed(places) if kind == "B" else (), copy_s if copied > 0 else 0.0
            if key not in self._streams:
                with_ends, between = self._units(layout, costs, kind, partition.padded_chunks)
                waves = layout.sequences // partition.wave // partition.drains
                # Those of the first `copied` chunks last as long as their copies.
                copies = [copy_s * tokens for _, _, tokens in partition.padded_chunks[:copied]]
                entering, passing = (_in_wave(_at_least(x, copies), partition.wave) for x in (with_ends, between))
                if partition.schedule == BREADTH_FIRST:
                    self._streams[key] = breadth_first_seconds(passing, layout.mesh.pipe, layout.interleave)
                    if not copies:
                        # Each chunk has a tick in which it enters, and one in which it leaves.
                        self._streams[key] += 2 * (sum(entering) - sum(passing))
                else:
                    self._streams[key] = stream_seconds(
                        entering, layout.mesh.pipe, layout.interleave, num_sequences=waves, between=passing
                    )
            total += partition.drains * self._streams[key]
        heads_s = sum(self._units(layout, costs, "H", partition.padded_chunks)[0])
        return (total + layout.sequences * heads_s + self._kv_s(partition, places)) * _ROUNDED

    def _kv_s(self, partition: Partition, places: Places) -> float:
        """Returns the least seconds in which keys and values get to the backward, where they are not kept.

        They depend on the tokens of a chunk alone, so every tick of a backward takes at least those of the shortest.
        """
        layout, kv = partition.layout, partition.kv(places)[0]
        if kv == "keep":
            return 0.0
        tokens = min(partition.chunk_lengths)
        key = layout, kv, _recomputed(places), tokens
        if key not in self._of_kv:
            kept, again = self._costs(layout, places), layout_costs(layout, places, kv)
            self._of_kv[key] = again.seconds("B", 0, tokens) - kept.seconds("B", 0, tokens)
        return layout.sequences * layout.interleave * partition.num_chunks * self._of_kv[key]

    def rough_excess(self, partition: Partition, places: Places) -> float:
        """Returns by how much the least memory is over a limit, as a share of it, with chunks as short as can be."""
        tokens = min(smallest_chunk(partition.layout), self.request.config.sequence.length)
        return self._excess(partition, tokens, places)

    def excess(self, partition: Partition, places: Places, kv: str = "") -> float:
        """Returns by how much the least memory with a partition's chunks is over a limit, as a share of it.

        Args:
            partition: the partition.
            places: of the stash.
            kv: how keys and values reach the backward; empty: in the way that takes the least memory.
        """
        return self._excess(partition, rounded_up(max(partition.chunk_lengths), partition.shapes), places, kv)

    def excess_of(self, memory: Memory) -> float:
        """Returns by how much memory is over a limit, as a share of it; at most 0 if it fits."""
        cluster = self.request.cluster
        return max(memory.hbm_bytes / usable_bytes(cluster) - 1, memory.host / usable_host_bytes(cluster) - 1)

    def _costs(self, layout: Layout, places: Places, whole_waves: bool = True) -> CostModel:
        """Returns the seconds of units; without whole waves, as if attention skipped what its last one lacks."""
        key = layout, _recomputed(places), whole_waves
        if key not in self._models:
            costs = layout_costs(layout, places)
            self._models[key] = costs if whole_waves else _without_kernel_waves(costs)
        return self._models[key]

    def _overhead_s(self, layout: Layout) -> float:
        if layout not in self._overheads:
            self._overheads[layout] = self._costs(layout, _RECOMPUTE).step_overhead_s()
        return self._overheads[layout]

    def _units(
        self, layout: Layout, costs: CostModel, kind: str, chunks: tuple[tuple[int, int, int], ...], sent: bool = True
    ) -> tuple[list[float], list[float]]:
        """Returns the seconds of each chunk's unit on a virtual stage, in a tick with ends and in one without.

        They are linear in the layers, so all interleaves share what is worked out once. What ticks with ends take
        more does not depend on what is recomputed.

        Args:
            layout: the layout.
            costs: seconds of units.
            kind: "F", "B" or "H".
            chunks: start, tokens, and tokens of the tick.
            sent: whether they send, or only compute.
        """
        rows, split = costs.cluster.device.attention_rows, (layout.split.ulysses, layout.split.ring)
        # What is recomputed changes the backwards alone.
        recompute = (costs.recompute_linear, costs.recompute_attention) if kind == "B" else ()
        of_costs = layout.mesh, layout.weights, split, recompute, rows
        key = of_costs, kind, chunks, sent
        if key not in self._of_layers:
            if of_costs not in self._of_one_and_none:
                without_ring = replace(costs.ring, members=1)
                both = replace(costs, layers=1), replace(costs, layers=0, ring=without_ring)
                self._of_one_and_none[of_costs] = both
            one, none = self._of_one_and_none[of_costs]
            seconds = (one.seconds_of if sent else one.compute_of)[kind]
            units = [seconds(*chunk) for chunk in chunks]
            self._of_layers[key] = [units if kind == "H" else _without_layers(none, kind, chunks, sent), units]
        layers, (fixed_s, one_s) = costs.layers, self._of_layers[key]
        with_ends = [fixed + layers * (unit - fixed) for fixed, unit in zip(fixed_s, one_s, strict=True)]
        if layout.interleave == 1 or not sent or kind == "H":
            return with_ends, with_ends
        lengths = [max(chunk[1:]) for chunk in chunks]
        end_costs = self._costs(layout, _RECOMPUTE)
        ends_s = {tokens: end_costs.ends_s(kind, tokens) for tokens in set(lengths)}
        return with_ends, [unit - ends_s[tokens] for unit, tokens in zip(with_ends, lengths, strict=True)]

    def _sampled_stream_s(self, partition: Partition, sampled: "_Sampled") -> float:
        """Returns about the least seconds of all ticks of a kind.

        Where a wave follows another one into the full pipeline, the last chunks of the one delay the first of the
        other. Each of the P - 1 ticks lasts longer by what a chunk's cost rises from the other's first P - 1 chunks on.
        """
        layout, waits = partition.layout, partition.layout.mesh.pipe - 1
        work_s = self._stage_work_s(partition, sampled)
        if partition.schedule == BREADTH_FIRST:
            # Each pass of a group of layers begins while the costly chunks of the pass before leave.
            rise_s = max(0.0, sampled.units[-1] - sampled.above(-(-waits // partition.wave), partition.num_chunks))
            rises_s = (layout.interleave - 1) * rise_s if partition.balance == "equal" else 0.0
            return work_s + partition.drains * waits * (sampled.work_s / partition.num_chunks + rises_s)
        if partition.balance != "equal":
            return work_s + partition.drains * waits * sampled.work_s / partition.num_chunks
        between = layout.sequences // partition.wave - partition.drains
        rise_s = sampled.units[-1] - sampled.above(-(-waits // partition.wave), partition.num_chunks)
        work_s += self._group_waits_s(partition, sampled)
        return work_s + waits * (partition.drains * sampled.units[-1] + between * max(0.0, rise_s))

    def _stage_work_s(self, partition: Partition, sampled: "_Sampled") -> float:
        """Returns about the seconds of all units of a kind on a stage, and of what the ticks with ends take more."""
        layout = partition.layout
        return layout.sequences * (layout.interleave * sampled.work_s + sampled.ends_s)

    def _group_waits_s(self, partition: Partition, sampled: "_Sampled") -> float:
        """Returns about the least seconds for which the chunks of a group wait for the costliest of them.

        A group of P equal chunks goes round v times, the last v - 1 of them at the pace of its costliest chunk. Over a
        wave of k sequences, costs that rise evenly then cost (v - 1) (P - k) / 2 times the whole rise, with the chunks
        of the wave in place of P where they are fewer.
        """
        layout, wave = partition.layout, partition.wave
        waiting = max(0, min(layout.mesh.pipe, wave * partition.num_chunks) - wave) / 2
        return layout.sequences // wave * (layout.interleave - 1) * waiting * sampled.even_rise_s

    def _samples(self, partition: Partition, places: Places, kind: str) -> "_Sampled":
        """Returns samples of the units of a kind on one virtual stage; schedule and wave change none of them."""
        key = partition.layout, partition.num_chunks, partition.balance
        if key not in self._sampled:
            self._sampled[key] = {}
        # What is recomputed changes the backwards alone.
        known, which = self._sampled[key], (kind, _recomputed(places) if kind == "B" else ())
        if which not in known:
            known[which] = self._sample(partition, places, kind)
        return known[which]

    def _sample(self, partition: Partition, places: Places, kind: str) -> "_Sampled":
        length, count = self.request.config.sequence.length, partition.num_chunks
        tokens, samples = length // count, min(count, _SAMPLES)
        starts = [(length - tokens) * index // max(1, samples - 1) for index in range(samples)]
        on_ring = partition.layout.split.ring > 1
        # What a ring sends, and how full attention's last wave is, depend on where each chunk begins and ends. Only
        # those of equal chunks are known.
        costs = self._costs(partition.layout, places, whole_waves=partition.balance == "equal")
        chunks, sent = tuple((start, tokens, 0) for start in starts), not on_ring or partition.balance == "equal"
        # Of interleaved ticks only those with ends take more: each chunk has a tick of its own in which it enters.
        interleaved, end_costs = partition.layout.interleave > 1, self._costs(partition.layout, _RECOMPUTE)
        ends_s = count * end_costs.ends_s(kind, length / count) if interleaved else 0.0
        units = self._units(partition.layout, costs, kind, chunks, sent)[1]
        # What rises by steps, on a ring or with whole blocks of attention, may rise between groups of chunks alone.
        first_s, last_s = (costs.compute_s(kind, starts[at], tokens) if on_ring else units[at] for at in (0, -1))
        rise_s = 0.0 if costs.cluster.device.attention_block else max(0.0, last_s - first_s)
        if samples == count:
            return _Sampled(sum(units), units, ends_s, rise_s)
        # Costs rise along the sequence: evenly, so that the ends stand for half as many chunks as the others; by steps
        # on a ring, which passes the prefix in a few static lengths, so that only the lower end of a part is sure.
        above = units[-1] if on_ring else (units[0] + units[-1]) / 2
        return _Sampled((sum(units) - above) / (samples - 1) * count, units, ends_s, rise_s)

    def _excess(self, partition: Partition, tokens: int, places: Places, kv_place: str = "") -> float:
        layout, wave, request = partition.layout, partition.wave, self.request
        shape, length = layout.shape, request.config.sequence.length
        smallest = self._memory_of_one_chunk(layout, tokens)
        stash, model = _stash(places, self.dtype, kv_place or partition.kv(places)[-1]), request.config.model
        # On every schedule a stage holds a whole wave at once, with space for a longest chunk behind each prefix.
        whole, chunk = wave * length // layout.mesh.seq, tokens // layout.mesh.seq
        heads = kv_heads_per_device(model, layout.split.ulysses)
        prefix = (length + tokens) // layout.mesh.seq * layout.split.ulysses
        of_group = prefix * layout.layers * 2 * heads * model.head_dim
        # Of the group that goes backward, and of the one before, whose keys and values are made again; one sequence's
        # where its own backward makes them.
        kv_groups = {"keep": wave * layout.interleave, "recompute": 1}.get(stash.kv, 2 * wave)
        grad_groups = 1 if partition.passes_groups_in_turn else layout.interleave
        # Sequences that are not cut have their gradients one after another.
        grad_sequences = 1 if partition.passes_groups_in_turn and partition.num_chunks == 1 else wave
        kv = of_group * kv_groups * request.compute_bytes
        kv += (
            grad_sequences * of_group * grad_groups * (2 if self.dtype == "bfloat16" else max(4, request.compute_bytes))
        )
        kv -= smallest.hbm["kv"] + smallest.hbm["kv_grad"]
        token = token_bytes(shape, stash)
        # One slot is spare.
        kept, away = (whole * layout.interleave + chunk) * token.kept, whole * layout.interleave * token.away
        device_bytes = usable_bytes(request.cluster)
        optimizer = optimizer_bytes(shape, layout.interleave, layout.mesh.pipe)[1]
        # At least a byte, so that shares of it exist.
        host_bytes = max(1, usable_host_bytes(request.cluster) - optimizer)
        work = self._least_work(partition, stash, -(-tokens // layout.mesh.seq)) - smallest.hbm["work"]
        between = self._between_groups_bytes(partition, tokens)
        weights = self._weight_bytes(layout, stash.kv) - smallest.hbm["weights"] - smallest.hbm["grads"]
        held = smallest.hbm_bytes - smallest.hbm["stash"] + work + kv + kept + between + weights
        # What is too much for the host stays on the device, but no more than where both are over by the same share.
        even = (away * device_bytes - held * host_bytes) / (device_bytes + host_bytes)
        spilled = max(0, min(even, away - host_bytes))
        # Keys and values there do not spill, but those of the last group may be read back too soon to leave.
        keys_values = whole * (layout.interleave - 1) * token.kv
        host = max(keys_values, self._host_bytes(layout, tokens, stash)) / host_bytes - 1
        return max(host, (held + spilled) / device_bytes - 1)

    def _weight_bytes(self, layout: Layout, kv: str) -> int:
        """Returns the bytes of a layout's working weights and of their gradient sums."""
        key = layout, kv
        if key not in self._weights:
            self._weights[key] = sum(weight_bytes(layout.shape, layout.interleave, layout.mesh.pipe, kv))
        return self._weights[key]

    def _least_work(self, partition: Partition, stash: StashPlan, tokens: int) -> int:
        """Returns the least bytes of a backward, less those of tables that it does without; the order is not known."""
        shape, lone = partition.layout.shape, partition.num_chunks == 1
        work = backward_work(shape, stash, tokens)
        if partition.layout.interleave == 1:
            return work
        idle = sum(idle_table_bytes(shape, partition.layout.mesh.pipe, lone))
        return min(work, backward_work(shape, stash, tokens, turns_once=True) - idle)

    def _between_groups_bytes(self, partition: Partition, tokens: int) -> float:
        """Returns the least bytes of chunks that wait for their next group of layers, and of the heads' dX."""
        pipe, length = partition.layout.mesh.pipe, self.request.config.sequence.length
        if self.request.waiting == "host":
            return 0.0
        wave_tokens = partition.wave * length
        waiting = max(0, wave_tokens - (pipe - 2) * tokens) if partition.lets_chunks_wait else 0
        # The last chunk goes backward first, behind the heads of all. One chunk's dX is in the memory of one chunk.
        heads = max(0, wave_tokens - tokens) / pipe
        hidden_bytes = self.request.config.model.hidden_size * self.request.compute_bytes
        return (waiting + heads) / partition.layout.mesh.seq * hidden_bytes

    def _host_bytes(self, layout: Layout, tokens: int, stash: StashPlan) -> float:
        """Returns the least bytes on the host: what no rule for alpha can keep back, the last chunks aside."""
        asked = self.request.config.stash.alpha
        token = token_bytes(layout.shape, stash)
        away = token.rest + (asked * token.shared if isinstance(asked, float) else 0)
        surely = self.request.config.sequence.length - (layout.mesh.pipe + 3) * tokens
        return max(0, surely) / layout.mesh.seq * layout.interleave * away if layout.sequences == 1 else 0.0

    def _memory_of_one_chunk(self, layout: Layout, tokens: int) -> Memory:
        """Returns the memory of one chunk with nothing stashed; all layers of a stage in one group or in several."""
        key = layout.mesh, layout.split.ulysses, tokens, self.dtype
        if key not in self._smallest:
            one_group = SchedulePlan(name="sppo", interleave=1)
            table = schedule_table(one_group, layout.mesh.pipe, 1, (tokens,), outline=True)
            stash = replace(_stash(_RECOMPUTE, self.dtype), alpha=(0.0,) * len(table.diagonal_groups))
            shape = replace(layout.shape, layers=layout.layers * layout.interleave, weights="resident")
            self._smallest[key] = predict_memory(table, shape, stash)
        return self._smallest[key]


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


def _without_kernel_waves(costs: CostModel) -> CostModel:
    """Returns the costs if the attention kernel skipped what is empty of its last wave of query tiles."""
    device = replace(costs.cluster.device, attention_rows=0)
    return replace(costs, cluster=replace(costs.cluster, device=device))


def _without_layers(none: CostModel, kind: str, chunks: tuple[tuple[int, int, int], ...], sent: bool) -> list[float]:
    """Returns what each chunk's F or B takes besides its layers, by the costs of none."""
    if not sent:
        return [0.0] * len(chunks)
    overhead_s, lengths = none.cluster.device.overhead_s, [max(chunk[1:]) for chunk in chunks]
    known = {tokens: none.transfer_s(kind, 0, tokens) + overhead_s for tokens in set(lengths)}
    return [known[tokens] for tokens in lengths]


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
    """Returns the seconds of all ticks of one kind in a generated table.

    Chunks enter in groups of one a stage and stay for a tick on each virtual stage. A tick lasts as long as the slowest
    of the chunks that are in the pipeline, which are neighbours.

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
    """Returns the seconds of all ticks of one kind of one sequence in a breadth-first table, as if none had ends.

    They are a stream of the chunks of all groups of layers, one group after another, through stages of one group.

    Args:
        units: seconds of each chunk on a virtual stage.
        num_stages: stages.
        num_groups: virtual stages of a stage.
    """
    of_group = [*units, *[0.0] * (num_stages - len(units))]
    return stream_seconds(of_group * num_groups, num_stages, 1)


def _tick_seconds(units: list[float], between: list[float], num_stages: int, num_groups: int) -> list[float]:
    """Returns the seconds of each tick; a group of one chunk a stage enters every `num_stages * num_groups` ticks."""
    if num_groups == 1:
        return _slowest_of_neighbours(units, num_stages)
    tick_s: list[float] = []
    # The slowest of the group before from each of its chunks on.
    staying: list[float] = []
    for first in range(0, len(units), num_stages):
        group = units[first : first + num_stages]
        entered = list(accumulate(group, max))
        slowest = entered[-1]
        entered += [slowest] * (num_stages - len(group))
        # While a group enters, the group before it leaves.
        tick_s += [*map(max, entered, staying[1:]), *entered[max(0, len(staying) - 1) :]]
        alone = (num_groups - 1) * num_stages - 1
        tick_s += [max(between[first : first + num_stages])] * alone + [slowest]
        staying = list(accumulate(reversed(group), max))[::-1]
    return tick_s + staying[1:]


def _slowest_of_neighbours(units: list[float], num_stages: int) -> list[float]:
    """Returns the seconds of ticks in which up to so many neighbours are in the pipeline, from the first in alone."""
    slowest, reach = units, 1
    while reach < num_stages:
        more = min(reach, num_stages - reach)
        slowest, reach = [*slowest[:more], *map(max, slowest[more:], slowest), *slowest[-more:]], reach + more
    return slowest


@lru_cache(maxsize=64)
def _recomputed(places: Places) -> tuple[bool, ...]:
    """Returns what of places the seconds of units depend on."""
    return tuple(place == "recompute" for place in places)


@lru_cache(maxsize=64)
def _stash(places: Places, kv_grad_dtype: str, kv: str = "keep") -> StashPlan:
    inputs, attention, rest = places
    return StashPlan(inputs=inputs, attention=attention, rest=rest, alpha=(), kv_grad_dtype=kv_grad_dtype, kv=kv)
