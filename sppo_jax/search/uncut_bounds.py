"""About the least seconds of a step, from an uncut sequence and a number of chunks, before chunk lengths are known."""

from typing import NamedTuple

from sppo_jax.search.layouts import Layout
from sppo_jax.search.offload import Places
from sppo_jax.search.partitions import Partition
from sppo_jax.search.unit_times import UnitTimes, recomputed

# The margin for what chunks do besides: kernels round up, and a bound is a sum in another order.
_MARGIN = 0.99


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


class UncutBounds:
    """Bounds of the seconds of choices that cost microseconds each; what choices share is worked out once."""

    def __init__(self, length: int, times: UnitTimes) -> None:
        self._length, self._times = length, times
        self._uncut: dict[tuple, _Uncut] = {}

    def layout_s(self, layout: Layout, places: Places, counts: tuple[int, int], drains: int) -> float:
        """Returns about the least seconds of a step with any partition of a layout.

        Args:
            layout: the layout.
            places: of the stash.
            counts: the fewest chunks of a partition, and the most.
            drains: how many times the pipeline fills and drains at least.
        """
        uncut, waits, (fewest, most) = self._of(layout, places), layout.mesh.pipe - 1, counts
        fill_s = drains * waits * (uncut.unit_s + (most - 1) * uncut.more_unit_s) / most
        return _MARGIN * (uncut.stage_s + (fewest - 1) * uncut.more_s + fill_s)

    def step_s(self, partition: Partition, places: Places) -> float:
        """Returns about the least seconds of a step, from an uncut sequence and what every chunk adds at least.

        No chunks take less together than their sequence uncut, and the pipeline fills with one that takes their mean.
        """
        uncut, waits = self._of(partition.layout, places), partition.layout.mesh.pipe - 1
        # What a chunk adds is the mean of chunks that are equal, or longer at the start; others may add less.
        further = partition.num_chunks - 1 if partition.balance != "given" else 0
        fill_s = partition.drains * waits * (uncut.unit_s + further * uncut.more_unit_s) / partition.num_chunks
        return _MARGIN * (uncut.stage_s + further * uncut.more_s + fill_s)

    def _of(self, layout: Layout, places: Places) -> _Uncut:
        key = layout, recomputed(places)
        if key not in self._uncut:
            self._uncut[key] = self._make(layout, places)
        return self._uncut[key]

    def _make(self, layout: Layout, places: Places) -> _Uncut:
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
        stage_s = layout.sequences * stage_s + self._times.overhead_s(layout)
        return _Uncut(stage_s, layout.sequences * more_s, unit_s, more_unit_s)
