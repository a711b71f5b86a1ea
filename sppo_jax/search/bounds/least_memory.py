"""The least memory of a choice, by which the search drops choices before it builds tables."""

from functools import lru_cache
from typing import NamedTuple

from sppo_jax.hardware import usable_bytes, usable_host_bytes
from sppo_jax.plan.parts import StashPlan
from sppo_jax.predict.holders import Held, beside_work, optimizer_bytes, stash_holders, sums, work_holders
from sppo_jax.predict.memory import batch_bytes
from sppo_jax.predict.stash_bytes import StashBytes, token_bytes
from sppo_jax.predict.tails import holds_tails
from sppo_jax.program.stash import TokenBytes
from sppo_jax.schedule.generators import chunks_in_flight
from sppo_jax.search.space.layouts import Layout
from sppo_jax.search.space.offload import Places
from sppo_jax.search.space.partitions import Partition, smallest_chunk
from sppo_jax.search.space.request import Request

# Parts in which the weights of a group may come from the host: the more, the less is on its way.
_MOST_PARTS = 2**20


class _InFlight(NamedTuple):
    """What a stage holds at least, over all of its groups of layers.

    Attributes:
        tokens: stashed, of all devices of the stage.
        prefixes: of which it has keys and values where these are kept, each of a sequence in a group.
    """

    tokens: float
    prefixes: int


class LeastMemory:
    """Bounds of the memory of one request's choices, dK and dV in one dtype: the holders of a plan, least counts."""

    def __init__(self, request: Request, kv_grad_dtype: str) -> None:
        self.request, self.dtype = request, kv_grad_dtype
        self._usable = usable_bytes(request.cluster), usable_host_bytes(request.cluster)
        self._optimizers: dict[Layout, int] = {}
        self._tokens: dict[tuple, TokenBytes] = {}
        self._sums: dict[tuple, dict[str, float]] = {}

    def of_layout(self, partition: Partition, places: Places) -> float:
        """Returns by how much the least memory is over a limit, as a share of it, with chunks as short as can be."""
        tokens = min(smallest_chunk(partition.layout), self.request.config.sequence.length)
        flight, ways = _in_flight_of_all(partition), partition.kv(places)
        # Of few groups of layers keys and values that are kept may take less than what makes them again.
        return min(self._excess(partition, tokens, places, flight, kv) for kv in {ways[0], ways[-1]})

    def of_partition(self, partition: Partition, places: Places, kv: str = "") -> float:
        """Returns by how much the least memory with a partition's chunks is over a limit, as a share of it.

        Args:
            partition: the partition.
            places: of the stash.
            kv: how keys and values reach the backward; empty: in the way that takes the least memory.
        """
        longest = max(padded for _, _, padded in partition.padded_chunks)
        return self._excess(partition, longest, places, _in_flight_of_schedule(partition), kv)

    def _excess(
        self, partition: Partition, tokens: int, places: Places, flight: _InFlight, kv_place: str = ""
    ) -> float:
        layout, request = partition.layout, self.request
        device_bytes, usable = self._usable
        optimizer = self._optimizer_bytes(layout)
        host_bytes = max(1, usable - optimizer)
        stash = stash_of(places, self.dtype, kv_place or partition.kv(places)[-1])
        token = self._token_bytes(layout, places, stash)
        on_device = self._device_bytes(partition, tokens, stash, flight, token)
        # What is too much for the host stays on the device, but no more than where both are over by the same share.
        away = flight.tokens / layout.mesh.seq * token.away
        even = (away * device_bytes - on_device * host_bytes) / (device_bytes + host_bytes)
        spilled = max(0, min(even, away - host_bytes))
        # Keys and values there do not spill, but those of the last group may be read back too soon to leave.
        keys_values = partition.wave * request.config.sequence.length // layout.mesh.seq * (layout.interleave - 1)
        host = (optimizer + max(keys_values * token.kv, self._host_bytes(layout, tokens, token))) / usable - 1
        return max(host, (on_device + spilled) / device_bytes - 1)

    def _optimizer_bytes(self, layout: Layout) -> int:
        """Returns the bytes of parameters, moments and gradients that wait on the host."""
        if layout not in self._optimizers:
            self._optimizers[layout] = optimizer_bytes(layout.shape, layout.interleave, layout.mesh.pipe)[1]
        return self._optimizers[layout]

    def _token_bytes(self, layout: Layout, places: Places, stash: StashPlan) -> TokenBytes:
        key = layout, places, stash.kv
        if key not in self._tokens:
            self._tokens[key] = token_bytes(layout.shape, stash)
        return self._tokens[key]

    def _device_bytes(
        self, partition: Partition, tokens: int, stash: StashPlan, flight: _InFlight, token: TokenBytes
    ) -> float:
        """Returns the least bytes of device memory; many choices differ in their stash alone."""
        layout = partition.layout
        # One slot is spare. All of them may be those of a last stash, where others go to the host.
        stashed = int((flight.tokens / layout.mesh.seq + tokens // layout.mesh.seq) * token.kept)
        last, fetched = (stashed, 1) if token.away else (0, 0)
        shape = layout.shape
        held = self._held(partition, tokens, stash, flight, StashBytes(stashed, 0, 0, last, fetched))
        key = layout, held[: Held._fields.index("stash")], stash.kv, holds_tails(shape, stash)
        if key not in self._sums:
            self._sums[key] = sums(beside_work(shape, stash, held))
        found = dict(self._sums[key])
        for _, size_bytes, moments in (*work_holders(shape, stash, held), *stash_holders(shape, held)):
            for moment in moments:
                found[moment] += size_bytes
        return max(found.values())

    def _held(
        self, partition: Partition, tokens: int, stash: StashPlan, flight: _InFlight, stash_bytes: StashBytes
    ) -> Held:
        """Returns the least that one device of a stage holds at once.

        Args:
            partition: the partition.
            tokens: of the longest tick at least, over all devices of a stage.
            stash: the places.
            flight: what the stage holds at least.
            stash_bytes: of the stash at least.
        """
        layout, wave, length = partition.layout, partition.wave, self.request.config.sequence.length
        mesh, local, prefixes = layout.mesh, -(-tokens // layout.mesh.seq), flight.prefixes
        # Of the group that goes backward, and of the one before, whose keys and values are made again; one sequence's
        # where its own backward makes them.
        kv_prefixes = {"keep": prefixes, "recompute": 1}.get(stash.kv, 2 * wave)
        grad_prefixes = prefixes
        if partition.is_breadth_first:
            # Sequences that are not cut have their gradients one after another.
            grad_prefixes = 1 if partition.num_chunks == 1 else wave
        waiting, heads = self._between_groups_tokens(partition, tokens)
        return Held(
            num_stages=mesh.pipe,
            num_groups=layout.interleave,
            num_parts=_MOST_PARTS,
            tick_tokens=local,
            prefix_tokens=(length + tokens) * layout.split.ulysses // mesh.seq,
            kv_prefixes=kv_prefixes,
            grad_prefixes=grad_prefixes,
            waiting_tokens=waiting / mesh.seq,
            head_tokens=heads / mesh.seq,
            batch_bytes=batch_bytes(layout.sequences, length, tokens, wave, mesh.seq),
            stash=stash_bytes,
            # Else more is there beside a backward, as the order may be.
            heads_first=True,
            is_one_chunk=layout.sequences == partition.num_chunks == 1,
        )

    def _between_groups_tokens(self, partition: Partition, tokens: int) -> tuple[float, float]:
        """Returns the least tokens that wait for their next group of layers, and of the heads' dX."""
        pipe, length = partition.layout.mesh.pipe, self.request.config.sequence.length
        if self.request.way.waiting == "host":
            return 0.0, tokens / pipe
        wave_tokens = partition.wave * length
        waiting = max(0, wave_tokens - (pipe - 2) * tokens) if partition.lets_chunks_wait else 0
        # The last chunk goes backward first, behind the heads of all.
        return waiting, max(wave_tokens, tokens) / pipe

    def _host_bytes(self, layout: Layout, tokens: int, token: TokenBytes) -> float:
        """Returns the least bytes on the host: what no rule for alpha can keep back, the last chunks aside."""
        asked = self.request.config.stash.alpha
        away = token.rest + (asked * token.shared if isinstance(asked, float) else 0)
        surely = self.request.config.sequence.length - (layout.mesh.pipe + 3) * tokens
        return max(0, surely) / layout.mesh.seq * layout.interleave * away if layout.sequences == 1 else 0.0


@lru_cache(maxsize=64)
def stash_of(places: Places, kv_grad_dtype: str, kv: str = "keep") -> StashPlan:
    """Returns a stash with some places, alpha aside."""
    inputs, attention, rest = places
    return StashPlan(inputs=inputs, attention=attention, rest=rest, alpha=(), kv_grad_dtype=kv_grad_dtype, kv=kv)


def _in_flight_of_all(partition: Partition) -> _InFlight:
    """Returns what a stage holds on every schedule: a whole wave at once."""
    prefixes = partition.wave * partition.layout.interleave
    return _InFlight(prefixes * partition.layout.request.config.sequence.length, prefixes)


def _in_flight_of_schedule(partition: Partition) -> _InFlight:
    """Returns what a stage holds on the schedule of a partition."""
    layout, wave, of_wave = partition.layout, partition.wave, _in_flight_of_all(partition)
    if not partition.schedule.endswith("1f1b"):
        return of_wave
    waves, chunks = layout.sequences // wave, wave * partition.num_chunks
    in_flight = chunks_in_flight(layout.mesh.pipe, layout.interleave, waves, chunks)
    share = in_flight / (layout.interleave * chunks)
    # Of many waves any run of chunks comes up, and one of them has the mean length; of few only whole waves are sure.
    if len(set(partition.chunk_lengths)) > 1 and waves < share + 2:
        share = in_flight // (layout.interleave * chunks)
    return _InFlight(share * of_wave.tokens, max(of_wave.prefixes, -(-in_flight // partition.num_chunks)))
