"""The least seconds of a step, from all of its chunks, before its table is built."""

from itertools import accumulate

from sppo_jax.predict.stash_bytes import token_bytes
from sppo_jax.rules import BREADTH_FIRST
from sppo_jax.schedule.outline import all_rounds, round_of
from sppo_jax.schedule.table import Repeat
from sppo_jax.search.least_memory import stash_of
from sppo_jax.search.offload import Places
from sppo_jax.search.partitions import Partition
from sppo_jax.search.request import Request
from sppo_jax.search.unit_times import UnitTimes, recomputed

# Bounds are sums in another order than the simulator's.
_ROUNDED = 1 - 1e-12


class LowerBounds:
    """Bounds of the seconds of one request's choices; what choices share is worked out once."""

    def __init__(self, request: Request, times: UnitTimes) -> None:
        self.request, self._times = request, times
        self._streams: dict[tuple, float] = {}
        self._of_kv: dict[tuple, float] = {}

    def step_s(self, partition: Partition, places: Places, alpha: object, kv: str = "keep") -> float:
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
        total = self._times.overhead_s(layout)
        for kind in "FB":
            # What is recomputed changes the backwards alone.
            key = partition, kind, recomputed(places) if kind == "B" else (), copy_s if copied > 0 else 0.0
            if key not in self._streams:
                with_ends, between = self._times.of_chunks(layout, places, kind, partition.padded_chunks)
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
        heads_s = sum(self._times.of_chunks(layout, places, "H", partition.padded_chunks)[0])
        return (total + layout.sequences * heads_s + self._kv_s(partition, places, kv)) * _ROUNDED

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
