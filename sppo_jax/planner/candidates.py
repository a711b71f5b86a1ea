"""The candidates of a search: partitions with places of the stash."""

from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

from sppo_jax.plan.table import BREADTH_FIRST
from sppo_jax.planner.layouts import Layout, Request
from sppo_jax.planner.offload import Places, place_options
from sppo_jax.planner.partitions import Partition, partitions


class Candidate(NamedTuple):
    """A choice on its way: a partition of layout, schedule and chunk count, with places and a rule for alpha."""

    partition: Partition
    places: Places
    alpha: str | float | tuple[float, ...]

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
            self.partition.schedule == BREADTH_FIRST,
            layout.mesh.pipe > 1,
            layout.split.ulysses > 1 and layout.split.ring > 1,
            self.partition.balance in ("flops", "cost"),
            "host" in self.places,
            "recompute" in self.places,
        )
        return sum(mechanisms), self.partition.num_chunks


class Alike(NamedTuple):
    """Candidates of a layout and places that have the same least memory, as far as it is known without their chunks.

    Attributes:
        example: the partition of one of them.
        numbers: their numbers.
    """

    example: Partition
    numbers: list[int]


class Family(NamedTuple):
    """All candidates of a layout with the same places.

    Attributes:
        layout: the layout.
        places: the places.
        groups: the candidates.
        counts: the fewest chunks of any of them, and the most.
        drains: how many times the pipeline fills and drains at least.
    """

    layout: Layout
    places: Places
    groups: tuple[Alike, ...]
    counts: tuple[int, int]
    drains: int


class Candidates:
    """All candidates of a request: partitions with places, each with a number; made when they are asked for.

    The candidates of a partition follow each other, and so do the partitions of a layout.
    """

    def __init__(self, request: Request) -> None:
        """Finds the partitions and the places.

        Raises:
            ValueError: the config, the model and the devices allow none.
        """
        asked = request.config.stash.alpha
        self.alpha = "hidden" if asked == "auto" else asked
        self.options = place_options(request.config.stash)
        self.partitions = list(partitions(request))

    def __len__(self) -> int:
        return len(self.partitions) * len(self.options)

    def __getitem__(self, number: int) -> Candidate:
        partition, option = divmod(number, len(self.options))
        if partition >= len(self.partitions):
            raise IndexError(number)
        return Candidate(self.partitions[partition], self.options[option], self.alpha)

    @cached_property
    def families(self) -> tuple[Family, ...]:
        """All families, those of a layout together."""
        of_layout: dict[Layout, list[int]] = {}
        for at, partition in enumerate(self.partitions):
            of_layout.setdefault(partition.layout, []).append(at)
        return tuple(family for layout, members in of_layout.items() for family in self._families(layout, members))

    def _families(self, layout: Layout, members: list[int]) -> Iterator[Family]:
        """Yields the families of a layout, given the places of its partitions among all."""
        alike: dict[tuple, list[int]] = {}
        for at in members:
            alike.setdefault(self.partitions[at].holds, []).append(at)
        found = [self.partitions[at] for at in members]
        # Of given chunks the first ones may be short, and then further ones add little.
        counts = [1 if one.balance == "given" else one.num_chunks for one in found]
        span, drains, count = (min(counts), max(counts)), min(one.drains for one in found), len(self.options)
        for option, places in enumerate(self.options):
            groups = (Alike(self.partitions[ats[0]], [at * count + option for at in ats]) for ats in alike.values())
            yield Family(layout, places, tuple(groups), span, drains)
