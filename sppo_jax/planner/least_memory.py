"""The least memory of a choice, by which the search drops choices before it builds tables."""

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from sppo_jax.hardware import usable_bytes, usable_host_bytes
from sppo_jax.plan.generators import chunks_in_flight
from sppo_jax.plan.parts import MeshShape, SchedulePlan, StashPlan
from sppo_jax.plan.plan import schedule_table
from sppo_jax.plan.shapes import rounded_up
from sppo_jax.planner.layouts import Layout
from sppo_jax.planner.memory import (
    Memory,
    backward_work,
    idle_table_bytes,
    optimizer_bytes,
    predict_memory,
    token_bytes,
    weight_bytes,
)
from sppo_jax.planner.offload import Places
from sppo_jax.planner.partitions import Partition, smallest_chunk
from sppo_jax.planner.request import Request
from sppo_jax.planner.unit_times import RECOMPUTE
from sppo_jax.planner.workspace import kv_heads_per_device


class _Held(NamedTuple):
    """What a stage holds at least, over all of its groups of layers.

    Attributes:
        tokens: stashed, of all devices of the stage.
        prefixes: of which it has keys and values where these are kept, each of a sequence in a group.
    """

    tokens: float
    prefixes: int


class LeastMemory:
    """Bounds of the memory of one request's choices, dK and dV in one dtype; what choices share is worked out once."""

    def __init__(self, request: Request, kv_grad_dtype: str) -> None:
        self.request, self.dtype = request, kv_grad_dtype
        self._smallest: dict[tuple[MeshShape, int, int, str], Memory] = {}
        self._weights: dict[tuple[Layout, str], int] = {}

    def of_layout(self, partition: Partition, places: Places) -> float:
        """Returns by how much the least memory is over a limit, as a share of it, with chunks as short as can be."""
        tokens = min(smallest_chunk(partition.layout), self.request.config.sequence.length)
        held, ways = _held_by_all(partition), partition.kv(places)
        # Of few groups of layers keys and values that are kept may take less than what makes them again.
        return min(self._excess(partition, tokens, places, held, kv) for kv in {ways[0], ways[-1]})

    def of_partition(self, partition: Partition, places: Places, kv: str = "") -> float:
        """Returns by how much the least memory with a partition's chunks is over a limit, as a share of it.

        Args:
            partition: the partition.
            places: of the stash.
            kv: how keys and values reach the backward; empty: in the way that takes the least memory.
        """
        longest = rounded_up(max(partition.chunk_lengths), partition.shapes)
        return self._excess(partition, longest, places, _held_by_schedule(partition), kv)

    def _excess(self, partition: Partition, tokens: int, places: Places, held: _Held, kv_place: str = "") -> float:
        layout, request = partition.layout, self.request
        shape, usable = layout.shape, usable_host_bytes(request.cluster)
        optimizer = optimizer_bytes(shape, layout.interleave, layout.mesh.pipe)[1]
        host_bytes = max(1, usable - optimizer)
        smallest = self._memory_of_one_chunk(layout, tokens)
        stash = stash_of(places, self.dtype, kv_place or partition.kv(places)[-1])
        token = token_bytes(shape, stash)
        stashed, chunk = held.tokens / layout.mesh.seq, tokens // layout.mesh.seq
        # One slot is spare.
        kept, away = (stashed + chunk) * token.kept, stashed * token.away
        device_bytes = usable_bytes(request.cluster)
        more = self._prefix_bytes(partition, tokens, stash, held.prefixes) + kept
        more += self._between_groups_bytes(partition, tokens)
        more += self._least_work(partition, stash, -(-tokens // layout.mesh.seq)) + self._weight_bytes(layout, stash.kv)
        replaced = ("work", "kv", "kv_grad", "stash", "weights", "grads")
        on_device = smallest.hbm_bytes - sum(smallest.hbm[name] for name in replaced) + more
        # What is too much for the host stays on the device, but no more than where both are over by the same share.
        even = (away * device_bytes - on_device * host_bytes) / (device_bytes + host_bytes)
        spilled = max(0, min(even, away - host_bytes))
        # Keys and values there do not spill, but those of the last group may be read back too soon to leave.
        keys_values = partition.wave * request.config.sequence.length // layout.mesh.seq * (layout.interleave - 1)
        host = (optimizer + max(keys_values * token.kv, self._host_bytes(layout, tokens, stash))) / usable - 1
        return max(host, (on_device + spilled) / device_bytes - 1)

    def _prefix_bytes(self, partition: Partition, tokens: int, stash: StashPlan, prefixes: int) -> float:
        """Returns the least bytes of K and V, with space for a longest chunk behind each prefix, and of dK and dV."""
        layout, request, wave = partition.layout, self.request, partition.wave
        heads = kv_heads_per_device(request.config.model, layout.split.ulysses)
        prefix = (request.config.sequence.length + tokens) // layout.mesh.seq * layout.split.ulysses
        of_group = prefix * layout.layers * 2 * heads * request.config.model.head_dim
        # Of the group that goes backward, and of the one before, whose keys and values are made again; one sequence's
        # where its own backward makes them.
        kv_prefixes = {"keep": prefixes, "recompute": 1}.get(stash.kv, 2 * wave)
        grad_prefixes = prefixes
        if partition.passes_groups_in_turn:
            # Sequences that are not cut have their gradients one after another.
            grad_prefixes = 1 if partition.num_chunks == 1 else wave
        grad_size = 2 if self.dtype == "bfloat16" else max(4, request.compute_bytes)
        return of_group * (kv_prefixes * request.compute_bytes + grad_prefixes * grad_size)

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
            stash = replace(stash_of(RECOMPUTE, self.dtype), alpha=(0.0,) * len(table.diagonal_groups))
            shape = replace(layout.shape, layers=layout.layers * layout.interleave, weights="resident")
            self._smallest[key] = predict_memory(table, shape, stash)
        return self._smallest[key]


@lru_cache(maxsize=64)
def stash_of(places: Places, kv_grad_dtype: str, kv: str = "keep") -> StashPlan:
    """Returns a stash with some places, alpha aside."""
    inputs, attention, rest = places
    return StashPlan(inputs=inputs, attention=attention, rest=rest, alpha=(), kv_grad_dtype=kv_grad_dtype, kv=kv)


def _held_by_all(partition: Partition) -> _Held:
    """Returns what a stage holds on every schedule: a whole wave at once."""
    prefixes = partition.wave * partition.layout.interleave
    return _Held(prefixes * partition.layout.request.config.sequence.length, prefixes)


def _held_by_schedule(partition: Partition) -> _Held:
    """Returns what a stage holds on the schedule of a partition."""
    layout, wave, of_wave = partition.layout, partition.wave, _held_by_all(partition)
    if not partition.schedule.endswith("1f1b"):
        return of_wave
    waves, chunks = layout.sequences // wave, wave * partition.num_chunks
    in_flight = chunks_in_flight(layout.mesh.pipe, layout.interleave, waves, chunks)
    share = in_flight / (layout.interleave * chunks)
    # Of many waves any run of chunks comes up, and one of them has the mean length; of few only whole waves are sure.
    if len(set(partition.chunk_lengths)) > 1 and waves < share + 2:
        share = in_flight // (layout.interleave * chunks)
    return _Held(share * of_wave.tokens, max(of_wave.prefixes, -(-in_flight // partition.num_chunks)))
