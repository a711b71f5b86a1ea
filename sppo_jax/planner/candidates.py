"""The candidates of a search: partitions with places of the stash, and bounds for all of them."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from sppo_jax.plan.table import BREADTH_FIRST
from sppo_jax.planner.layouts import Request
from sppo_jax.planner.lower_bounds import LowerBounds
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


@dataclass(frozen=True, kw_only=True)
class Start:
    """All candidates of a request.

    Args:
        candidates: the candidates; those of a partition follow each other, and so do the partitions of a layout.
        lower_bounds: bounds of their seconds and bytes.
    """

    candidates: tuple[Candidate, ...]
    lower_bounds: LowerBounds


def start_of(
    request: Request,
    among: Iterable[Partition] | None = None,
    options: list[Places] | None = None,
    lower_bounds: LowerBounds | None = None,
) -> Start:
    """Returns all candidates of a request.

    Args:
        request: what is asked for.
        among: their partitions; None: all that the request has.
        options: their places; None: all that the request has.
        lower_bounds: bounds that know something of them; None: new ones.

    Raises:
        ValueError: the config, the model and the devices allow none.
    """
    options = _place_options(request) if options is None else options
    found = partitions(request) if among is None else among
    candidates = [one for partition in found for one in _candidates(request, partition, options)]
    # Seconds do not depend on the dtype of dK and dV.
    return Start(candidates=tuple(candidates), lower_bounds=lower_bounds or LowerBounds(request, "float32"))


def _place_options(request: Request) -> list[Places]:
    """Returns the places to consider.

    With the optimizer on the host the rest is computed again unless it is asked for. For plans that stashed the rest,
    the compiler took up to a half more memory than was predicted, and the rest saved 5% of a step.
    """
    stash = request.config.stash
    if request.optimizer == "host" and stash.rest == "auto":
        stash = replace(stash, rest="recompute")
    return place_options(stash)


def _candidates(request: Request, partition: Partition, options: list[Places]) -> list[Candidate]:
    asked = request.config.stash.alpha
    alpha = "hidden" if asked == "auto" else asked
    return [Candidate(partition=partition, places=places, alpha=alpha) for places in options]
