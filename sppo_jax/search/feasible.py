"""Whether any plan fits: the candidates of the search by their least bytes, until one fits."""

import math
from collections.abc import Iterable, Sequence

from sppo_jax.config import Config
from sppo_jax.hardware import Cluster
from sppo_jax.search.bounds.frontier import Frontier
from sppo_jax.search.bounds.least_seconds import Span
from sppo_jax.search.evaluate import Outcome
from sppo_jax.search.no_fit import least, too_large_line
from sppo_jax.search.space.layouts import Layout
from sppo_jax.search.space.offload import Places
from sppo_jax.search.space.partitions import Candidate
from sppo_jax.search.space.request import Request, preferences, read_request

Form = tuple  # mesh, split, interleave, way and places
# Places in the heap. An excess is -1 at least: layouts come before the candidates of others, but behind those of the
# layouts that are tried first.
_LAYOUTS, _FIRST = -2.0, -4.0
# Opening all layouts takes far longer than trying a few, and one of these fits most other lengths.
_MOST_FIRST = 8


class _BySize(Frontier):
    """Candidates by how little of a limit their least memory takes, the one with most to spare first.

    The host has as much of each chunk as it can hold, whether or not the copies are exposed. All candidates of the
    forms `first` come before any others.
    """

    def __init__(self, request: Request, first: Iterable[Form]) -> None:
        super().__init__(request)
        self._first = frozenset(first)
        if self.alpha == "hidden":
            self.alpha = "all"

    def rank_of_layout(self, layout: Layout, places: Places, span: Span) -> float:
        return -math.inf if _form(layout, places) in self._first else _LAYOUTS

    def rank_of_uncut(self, candidate: Candidate, excess: float) -> float:
        return excess + (_FIRST if _form(candidate.layout, candidate.places) in self._first else 0.0)

    def rank_of_chunks(self, candidate: Candidate, excess: float) -> float:
        return self.rank_of_uncut(candidate, excess)


def _form(layout: Layout, places: Places) -> Form:
    """Returns what layouts of two requests have in common that differ in the length or the devices."""
    return layout.mesh, layout.split, layout.interleave, layout.request.way, places


class Feasibility:
    """Whether any plan fits in device and host memory. The fastest plan is not searched.

    Attributes:
        found: a plan that fits; None where none does.
        forms: which layouts and places to try first at another size: those of `found`, of the next candidates by their
            least bytes, and of `first`, a few in all.
    """

    def __init__(self, config: Config, cluster: Cluster | None = None, first: Sequence[Form] = ()) -> None:
        """Looks for a plan.

        Args:
            config: the settings; its planner searches all plans.
            cluster: the devices, as in `search`.
            first: `forms` of another size.

        Raises:
            ValueError: settings contradict each other, or leave no plan.
        """
        self._frontier = _BySize(read_request(config, cluster), first)
        sets = list(preferences(self._frontier.request))
        # Of the dtypes of dK and dV the last takes the least memory, all else the same.
        smallest = sets[-1][-1].kv_grad_dtype
        of_dtype = [trials for trials in sets if trials[0].kv_grad_dtype == smallest]
        self.found: Outcome | None = self._frontier.first(of_dtype, self._frontier.any_that_fits)
        near = [self.found.candidate, *self._frontier.next_by_rank(_MOST_FIRST)] if self.found else []
        forms = dict.fromkeys([*(_form(one.layout, one.places) for one in near), *first])
        self.forms: tuple[Form, ...] = tuple(forms)[:_MOST_FIRST]

    def problem(self) -> str:
        """Returns why no plan fits, be it a rule that the smallest ones break; empty where one fits."""
        if self.found:
            return ""
        try:
            return too_large_line(self._frontier.request, least(self._frontier))
        except ValueError as error:
            return str(error)
