"""Whether any plan fits: the candidates of the search by their least bytes, until one fits."""

import math

from sppo_jax.config import Config
from sppo_jax.hardware import Cluster
from sppo_jax.search.frontier import Frontier
from sppo_jax.search.layouts import Layout
from sppo_jax.search.least_seconds import Span
from sppo_jax.search.no_fit import least, too_large_line
from sppo_jax.search.offload import Places
from sppo_jax.search.partitions import Candidate
from sppo_jax.search.request import Request, preferences, read_request


class _BySize(Frontier):
    """Candidates by how little of a limit their least memory takes, the one with most to spare first.

    The host has as much of each chunk as it can hold, whether or not the copies are exposed.
    """

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        if self.alpha == "hidden":
            self.alpha = "all"

    def rank_of_layout(self, layout: Layout, places: Places, span: Span) -> float:
        return -math.inf

    def rank_of_uncut(self, candidate: Candidate, excess: float) -> float:
        return excess

    def rank_of_chunks(self, candidate: Candidate, excess: float) -> float:
        return excess


def problem_of_all(config: Config, cluster: Cluster | None = None) -> str:
    """Returns why no plan fits in device and host memory; empty where one does. The fastest plan is not searched.

    Args:
        config: the settings; its planner searches all plans.
        cluster: the devices, as in `search`.

    Raises:
        ValueError: settings contradict each other, or leave no plan.
    """
    frontier = _BySize(read_request(config, cluster))
    sets = list(preferences(frontier.request))
    # Of the dtypes of dK and dV the last takes the least memory, all else the same.
    smallest = sets[-1][-1].kv_grad_dtype
    of_dtype = [trials for trials in sets if trials[0].kv_grad_dtype == smallest]
    if frontier.first(of_dtype, frontier.any_that_fits) is not None:
        return ""
    return too_large_line(frontier.request, least(frontier))
