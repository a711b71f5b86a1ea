"""The least seconds for which loops of a step wait for writes of the stash (`loop_waits`), without a table.

Each chunk has at least one forward tick for each group of layers, and each of these ticks but one of a wave writes a
stash: the last chunk's, in the last group, is read back too soon. The first tick has no write beside it, and one that
follows a head may have none left.
"""

from typing import NamedTuple

from sppo_jax.hardware import usable_host_bytes
from sppo_jax.models.counts import layer_costs
from sppo_jax.models.state_counts import has_attention
from sppo_jax.predict.holders import optimizer_bytes
from sppo_jax.predict.seconds.loop_waits import flops_before_loops, has_unknown_loops
from sppo_jax.predict.stash_bytes import token_bytes
from sppo_jax.program.stash import TokenBytes
from sppo_jax.rules import BREADTH_FIRST
from sppo_jax.schedule.generators import ONE_AT_A_TIME
from sppo_jax.search.bounds.least_memory import stash_of
from sppo_jax.search.space.layouts import Layout
from sppo_jax.search.space.offload import ALPHA_LEVELS, Places
from sppo_jax.search.space.partitions import Partition, smallest_chunk
from sppo_jax.search.space.request import Request

# What the search for a share of the stash may lose of it.
_HUNDREDTHS = 0.02
# The planner's seconds are sums in another order.
_ROUNDED = 1 - 1e-9


class _Rates(NamedTuple):
    """What waits depend on, of a layout with places.

    Attributes:
        token: bytes of the stash of a token.
        before_s: seconds of a token's compute before the first loop of a forward.
        host_bytes: for the stash.
    """

    token: TokenBytes
    before_s: float
    host_bytes: int


class LeastWaits:
    """Bounds of one request's choices; what choices share is worked out once."""

    def __init__(self, request: Request) -> None:
        self.request = request
        has_loops = has_unknown_loops(request.cluster.device.platform, request.kernel)
        # With one document a sequence, plans of one chunk and layers with a window have no loop.
        self.has_loops = has_loops and has_attention(request.config.model) and not request.has_one_document
        asked = request.config.stash.alpha
        self._alpha = "hidden" if asked == "auto" else asked  # no other choice sends less
        self._link_bytes_s = request.cluster.host_link_bytes_s
        self._flops_s = request.cluster.device.linear_flops_s(request.compute_bytes)
        self._wait_share = request.cluster.device.loop_wait_share
        self._rates: dict[tuple, _Rates] = {}

    def of_layout(self, layout: Layout, places: Places) -> float:
        """Returns the least seconds of a step with any of a layout's partitions; 0 where some are not bounded."""
        way, wave = layout.request.way, self.request.config.schedule.wave
        is_bounded = self.has_loops and way.schedule == BREADTH_FIRST and layout.mesh.pipe == 1 and wave == "auto"
        if not is_bounded or (rates := self._rates_of(layout, places)).token.tails:
            return 0.0
        tokens = self._uncut_tokens(layout)
        # A chunk's worth is beside no forward, and a group's worth behind heads or, of one chunk, never written. Equal
        # chunks may differ by a multiple.
        most = tokens * (1 + layout.multiple_tokens / smallest_chunk(layout))
        share = self._least_share(layout, places, self._alpha, self._linear_s(layout))
        share = self._in_room(layout, rates, share, most, layout.interleave)
        groups = max(0, layout.interleave - 2)
        return layout.sequences * groups * tokens * self._token_wait_s(rates, share)

    def of_uncut(self, partition: Partition, places: Places) -> float:
        """Returns the least seconds of a step with equal chunks; 0 for others."""
        layout, count = partition.layout, partition.num_chunks
        if partition.balance != "equal" or not self.has_loops:
            return 0.0
        tokens = self._uncut_tokens(layout)
        longest = tokens // count + layout.multiple_tokens // layout.mesh.seq
        return self._of_chunks(partition, places, self._alpha, self._linear_s(layout), (tokens, longest))

    def of_partition(self, partition: Partition, places: Places, alpha: object, forward_s: float) -> float:
        """Returns the least seconds of a step with a partition's chunks.

        Args:
            partition: the partition.
            places: of the stash.
            alpha: the rule for alpha, or its values.
            forward_s: the least seconds of a chunk's forward on a virtual stage.
        """
        if not self.has_loops:
            return 0.0
        padded = [-(-tokens // partition.layout.mesh.seq) for *_, tokens in partition.padded_chunks]
        longest = max(padded)
        return self._of_chunks(partition, places, alpha, forward_s / longest, (sum(padded), longest))

    def _of_chunks(
        self, partition: Partition, places: Places, alpha: object, forward_s: float, tokens: tuple[int, int]
    ) -> float:
        """Returns the same for so many tokens of all chunks and of the longest, on one device."""
        layout, (total, longest) = partition.layout, tokens
        rates, one_by_one = self._rates_of(layout, places), partition.schedule in ONE_AT_A_TIME
        if not one_by_one and layout.interleave > 1 and partition.wave * partition.num_chunks % layout.mesh.pipe:
            return 0.0  # chunks of several waves go round the stages together
        # Waves that follow each other in a stream share ticks, but for those that fill the pipeline.
        kept = layout.sequences // partition.wave + (not one_by_one)
        # The first forward, and those behind heads.
        spared = 1 + layout.sequences * partition.num_chunks
        if partition.is_breadth_first and layout.sequences * partition.num_chunks * layout.mesh.pipe == 1:
            kept, spared = 1, 1  # all heads are behind all forwards
        in_flight = partition.wave if one_by_one else layout.sequences
        share = self._least_share(layout, places, alpha, forward_s)
        share = self._in_room(layout, rates, share, longest, in_flight * layout.interleave * partition.num_chunks)
        # Of a share, tokens of each chunk are rounded.
        share = share if share in (0, 1) else max(0.0, share - partition.num_chunks / total)
        written = layout.sequences * layout.interleave * total - (kept + spared) * longest
        return max(0, written) * self._token_wait_s(rates, share)

    def _uncut_tokens(self, layout: Layout) -> int:
        return self.request.config.sequence.length // layout.mesh.seq

    def _linear_s(self, layout: Layout) -> float:
        return layout.mean_layers * layer_costs(self.request.config.model).linear_flops / self._flops_s

    def _least_share(self, layout: Layout, places: Places, alpha: object, forward_s: float) -> float:
        """Returns a bound of alpha from below, as if the host had room; see `offload.choose_alpha`.

        Args:
            layout: the layout.
            places: of the stash.
            alpha: the rule for alpha, or its values.
            forward_s: seconds of a token's forward on one device, at least.
        """
        if isinstance(alpha, float | int):
            return float(alpha)
        if not isinstance(alpha, str):
            return 0.0
        by_groups = layout.request.way.schedule == BREADTH_FIRST
        if alpha == "all" or (places[2] == "host" and by_groups and layout.interleave > 1):
            return 1.0
        token = self._rates_of(layout, places).token
        if not token.shared:
            return 0.0
        share = (self._link_bytes_s * forward_s - token.rest - token.tails) / token.shared * _ROUNDED
        return max(level for level in ALPHA_LEVELS if level <= max(0.0, share))

    def _in_room(self, layout: Layout, rates: _Rates, share: float, tokens: float, ticks: int) -> float:
        """Returns what is left of a share that the host may have no room for, with so many ticks of so many tokens."""
        token, stages = rates.token, layout.mesh.pipe
        rows = max(ticks, layout.interleave * stages) + stages
        room = (rates.host_bytes / rows - token.tails) / tokens - token.rest
        if share * token.shared <= room:
            return share
        return max(0.0, min(share, room / token.shared - _HUNDREDTHS)) if token.shared else share

    def _token_wait_s(self, rates: _Rates, share: float) -> float:
        sent_s = (share * rates.token.shared + rates.token.rest) / self._link_bytes_s
        return max(0.0, sent_s - rates.before_s) * self._wait_share * _ROUNDED

    def _rates_of(self, layout: Layout, places: Places) -> _Rates:
        key = layout, places
        if key not in self._rates:
            shape = layout.shape
            optimizer = optimizer_bytes(shape, layout.interleave, layout.mesh.pipe)[1]
            self._rates[key] = _Rates(
                token_bytes(shape, stash_of(places, "float32")),
                (flops_before_loops(shape, 1) or 0.0) / self._flops_s,
                max(0, usable_host_bytes(self.request.cluster) - optimizer),
            )
        return self._rates[key]
