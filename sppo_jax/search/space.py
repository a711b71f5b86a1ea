"""The space of a search: what one candidate decides, and which ways are tried before which."""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from sppo_jax.rules import BREADTH_FIRST
from sppo_jax.search.offload import Places
from sppo_jax.search.partitions import Partition
from sppo_jax.search.request import Request
from sppo_jax.search.ways import Way

USUAL = Way(breadth_first=True)


class Candidate(NamedTuple):
    """One plan on its way through the search.

    Attributes:
        partition: mesh, split, interleave, weights, schedule, wave and chunks.
        places: of the stash.
        alpha: the rule for alpha, or its values.
        kv_grad_dtype: in which dK and dV are summed.
        kv: how keys and values reach the backward; empty: not decided yet.
    """

    partition: Partition
    places: Places
    alpha: str | float | tuple[float, ...]
    kv_grad_dtype: str
    kv: str = ""

    @property
    def way(self) -> Way:
        """The way of the candidate's layout."""
        return self.partition.layout.request.way

    @property
    def is_breadth_first(self) -> bool:
        """Whether all chunks pass one group of layers after another."""
        return self.partition.schedule == BREADTH_FIRST

    @property
    def is_usual(self) -> bool:
        """Whether a breadth-first candidate holds the least: weights gathered, keys and values made again."""
        again = self.kv == self.partition.kv(self.places)[-1] or self.partition.num_chunks == 1
        return self.way.weights == USUAL.weights and again

    @property
    def key(self) -> tuple:
        """What makes a plan another one to a reader."""
        layout = self.partition.layout
        return layout.mesh, layout.interleave, self.partition.num_chunks, self.places

    @property
    def complexity(self) -> tuple[int, int]:
        """Returns how many mechanisms the plan uses and its chunks; of two plans that tie, the lower is simpler."""
        layout = self.partition.layout
        mechanisms = (
            layout.interleave > 1,
            self.partition.wave > 1,
            self.is_breadth_first,
            self.is_breadth_first and self.way.weights != USUAL.weights,
            self.is_breadth_first and self.kv == "host",
            self.is_breadth_first and self.kv == "keep" and self.partition.num_chunks > 1,
            layout.mesh.pipe > 1,
            layout.split.ulysses > 1 and layout.split.ring > 1,
            self.partition.balance in ("flops", "cost"),
            "host" in self.places,
            "recompute" in self.places,
        )
        return sum(mechanisms), self.partition.num_chunks


class Trial(NamedTuple):
    """A way, and the dtype in which dK and dV are summed."""

    way: Way
    kv_grad_dtype: str


def preferences(request: Request) -> Iterator[tuple[Trial, ...]]:
    """Yields the trials that compete for the fastest step, a set at a time; the next set is for where none fits.

    The preferences are not about speed: sums in float32 before bfloat16; on CPUs and TPUs other schedules before
    breadth-first ones; chunks and the optimizer on the device before the host.
    """
    asked = request.config.stash.kv_grad_dtype
    dtypes = ("float32", "bfloat16") if asked == "auto" else (asked,)
    for ways in _ways(request):
        for dtype in dtypes if ways else ():
            yield tuple(Trial(way, dtype) for way in ways)


def _ways(request: Request) -> Iterator[list[Way]]:
    plain, breadth_first = [Way()], [replace(USUAL, weights=weights) for weights in _weights(request)]
    if request.asks_for_breadth_first:
        yield breadth_first
    elif not request.allows_breadth_first:
        yield plain
        return
    elif request.compares_orders:
        yield plain + breadth_first
    else:
        yield plain
        yield breadth_first
    waiting = request.config.stash.waiting == "auto"
    optimizer = _may_have_optimizer_on_host(request)
    on_host = [replace(USUAL, waiting="host")] if waiting else []
    yield on_host + ([replace(USUAL, optimizer="host")] if optimizer else [])
    yield [replace(USUAL, waiting="host", optimizer="host")] if waiting and optimizer else []


def _weights(request: Request) -> tuple[str, ...]:
    """Returns what a device may hold of its stage's layers in a breadth-first schedule, as far as this is open."""
    config = request.config
    is_open = config.mesh.weights == "auto" and config.optimizer.place != "host"
    return ("gathered", "resident") if is_open else ("gathered",)


def _may_have_optimizer_on_host(request: Request) -> bool:
    """Returns whether config and devices leave open that parameters and moments wait on the host."""
    config = request.config
    asked = config.schedule.name not in ("auto", BREADTH_FIRST) or config.mesh.weights == "resident"
    # Where the schedule is open, keys and values that are kept leave breadth-first plans out.
    asked |= config.schedule.interleave == 1 or (config.schedule.name == "auto" and config.stash.kv == "keep")
    is_open = config.optimizer.place == "auto" and not asked
    return is_open and request.cluster.device.platform == "gpu" and request.table is None
