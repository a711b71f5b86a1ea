"""The search: the fastest step, in simulation, that fits in device and host memory."""

import time
from dataclasses import dataclass, replace
from typing import NamedTuple

from sppo_jax.config import Config
from sppo_jax.hardware import Cluster
from sppo_jax.plan.plan import Plan
from sppo_jax.predict.memory import Memory
from sppo_jax.predict.pinned import refusal
from sppo_jax.predict.seconds.documents import Documents
from sppo_jax.rules import BREADTH_FIRST
from sppo_jax.search.because import joined
from sppo_jax.search.bounds.frontier import TIE, Fastest, Filter
from sppo_jax.search.collector import without_collector
from sppo_jax.search.evaluate import Outcome, plan_of
from sppo_jax.search.explain import SearchResult, others, over, reasons_of, times_slower
from sppo_jax.search.no_fit import least, problem_of
from sppo_jax.search.paper import paper_outcome
from sppo_jax.search.refine import late_attention_is_open, with_late_attention, with_queries_on_the_ring
from sppo_jax.search.space.partitions import Candidate
from sppo_jax.search.space.request import (
    USUAL,
    Request,
    Trial,
    asks_for_breadth_first,
    plans_for_documents,
    preferences,
    read_request,
)

NUM_REJECTED = 5
# How many of the next fastest plans are tried with attention outputs of late chunks.
_LATE_TRIED = 4


@dataclass(frozen=True, kw_only=True)
class Rejected:
    """A plan that was not chosen, and why: it is slower, or over a limit."""

    plan: Plan
    memory: Memory
    step_s: float
    why: str


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a search found.

    Args:
        plan: of the plans that fit, the simplest one that ties with the fastest; where none fits, the one that is least
            too large.
        memory: its bytes a device, by what holds them.
        fits: whether it fits.
        rejected: up to five others that differ in mesh, chunks, interleaving or places, fastest first.
        num_considered: choices considered; most are ruled out by the bound of their layout.
        seconds: seconds the search took.
        problem: empty if it fits; else the limit that it breaks, by how much, and the nearest change.
        fastest_s: seconds of the fastest step that fits, with documents in the mean; the plan's step takes at most 0.5%
            longer. Where none fits, the seconds of the plan. Compare searches by these, because the choice between ties
            is not about speed.
        stopped_by: the settings of the config without which a plan would fit, e.g. "mesh.pipe=1"; empty if one fits, or
            none would.
    """

    plan: Plan
    memory: Memory
    fits: bool
    rejected: tuple[Rejected, ...]
    num_considered: int
    seconds: float
    problem: str
    fastest_s: float
    stopped_by: str = ""


@without_collector()
def search(config: Config, cluster: Cluster | None = None, documents: Documents | None = None) -> Found:
    """Searches what the config leaves "auto" for the shortest simulated step that fits.

    With documents it is the step that is shortest in the mean over the sequences of a run. What fits does not depend on
    documents.

    A candidate decides order, mesh, split, interleave, weights, optimizer's place, schedule, wave, chunks, places, keys
    and values, waiting room and the dtype of dK and dV. All are in one heap, by lower bounds of their seconds that are
    refined as they come up: of a layout, of an uncut sequence, of every chunk, and the simulated table. The first
    simulated candidate on top is the fastest. What is too large for sure is dropped. Of the plans that take at most
    0.5% longer than the fastest, the simplest is chosen. Preferences that are not about speed are in
    `request.preferences`.

    Behind the search stay: chunks of equal cost, with the layout and places of the fastest plan of either order;
    attention outputs of late chunks, in the fastest few plans; and what gains no time, fewer bodies of ticks
    (`refine`).

    Args:
        config: the settings.
        cluster: the devices; None: `hardware.cluster`, `train.devices` if simulated, else those of this machine.
        documents: how documents lie in the sequences of a run; None: each is as long as a sequence. They count unless
            `sequence.plan_for` is "full" or `planner` is "paper".

    Raises:
        ValueError: settings contradict each other.
    """
    start_s = time.perf_counter()
    request = read_request(config, cluster, documents if plans_for_documents(config) else None)
    answer = _by_paper(request) if config.planner == "paper" else _by_search(request)
    return _found(request, answer, start_s)


class _Answer(NamedTuple):
    """The plan to return, and what is told of it; see `Found`."""

    outcome: Outcome
    fastest_s: float
    reasons: dict[str, str]
    others: list[Outcome]
    num_considered: int


def _by_paper(request: Request) -> _Answer:
    outcome, reasons, num_ranked = paper_outcome(request)
    return _Answer(outcome, outcome.step_s, reasons, [], num_ranked)


def _by_search(request: Request) -> _Answer:
    fastest = Fastest(request)
    frontier = fastest.frontier
    best = frontier.first(preferences(request), fastest.next)
    if best is None:
        smallest = least(frontier)
        reasons, rejected = reasons_of(SearchResult(fastest, smallest)), others(frontier, smallest, NUM_REJECTED)
        return _Answer(smallest, smallest.step_s, reasons, rejected, frontier.num_considered)
    best, other = _with_other_order(fastest, best)
    chosen, late, why_late = _chosen(fastest, best)
    reasons = reasons_of(SearchResult(fastest, chosen, best, other, _usual(fastest, chosen)))
    rejected = others(frontier, chosen, NUM_REJECTED, other)
    fastest_s = min(best.step_s, late.step_s)
    found, why_queries = with_queries_on_the_ring(late, fastest_s * (1 + TIE))
    reasons["stash"] = joined(why_late, reasons["stash"])
    reasons["sequence_kind"] = joined(reasons["sequence_kind"], why_queries)
    return _Answer(found, fastest_s, reasons, rejected, frontier.num_considered)


def _with_other_order(fastest: Fastest, best: Outcome) -> tuple[Outcome, Outcome | None]:
    """Returns the fastest plan, and the fastest of the other schedules where that is a breadth-first one.

    The other one may win in the end, with chunks of equal cost.
    """
    request = fastest.frontier.request
    if not best.candidate.partition.is_breadth_first or asks_for_breadth_first(request.config):
        return best, None
    of_other_order = Filter(layout=lambda layout: layout.request.way.schedule != BREADTH_FIRST)
    other = fastest.next(of=of_other_order)
    if other is None and request.compares_orders and request.config.stash.kv_grad_dtype == "auto":
        # Of each order sums are in bfloat16 only where none fits with others.
        fastest.frontier.open(Trial(request.way, "bfloat16"))
        other = fastest.next(of=of_other_order)
    if other is not None and other.step_s < best.step_s:
        best, other = other, best
    if other is not None:
        fastest.keep(other)
    return best, other if best.candidate.partition.is_breadth_first else None


def _usual(fastest: Fastest, chosen: Outcome) -> Outcome | None:
    """Returns the fastest plan of the usual way where the chosen one is of another breadth-first one; else None."""
    candidate = chosen.candidate
    if not candidate.partition.is_breadth_first or candidate.is_usual:
        return None

    way = replace(candidate.way, weights=USUAL.weights)
    usual = fastest.next(of=Filter(lambda layout: layout.request.way == way, _may_be_usual))
    if usual is not None:
        fastest.keep(usual)
    return usual


def _may_be_usual(candidate: Candidate) -> bool:
    return candidate.partition.is_breadth_first and (not candidate.kv or candidate.is_usual)


def _chosen(fastest: Fastest, best: Outcome) -> tuple[Outcome, Outcome, str]:
    """Returns the plan to choose, the same with attention outputs of late chunks where these pay, and why they do.

    These save more than plans that tie differ by. So the plan is the fastest with them, or one that ties with that.

    Args:
        fastest: the plans that fit, in their order.
        best: the first of them.
    """
    simplest = fastest.simplest_tie(best)
    if not any(late_attention_is_open(one) for one in (best, simplest)):
        return simplest, simplest, ""
    # Plans of the usual way leave most memory.
    of = Filter(candidate=_may_be_usual)
    tried = [simplest, *([best] if best is not simplest else []), *fastest.next_best(best, _LATE_TRIED, of)]
    tried += fastest.other_forms(tried, _LATE_TRIED, of)
    found = [(one, *with_late_attention(one)) for one in tried]
    fastest_s = min(late.step_s for _, late, _ in found)
    return next(one for one in found if one[1].step_s <= fastest_s * (1 + TIE))


def _found(request: Request, answer: _Answer, start_s: float) -> Found:
    best, plan = answer.outcome, plan_of(answer.outcome, answer.reasons)
    fits = best.memory.fits(request.cluster)
    problem, stopped_by = (refusal(plan, request.cluster), "") if fits else problem_of(request, best)
    return Found(
        plan=plan,
        memory=best.memory,
        fits=fits and not problem,
        rejected=tuple(
            Rejected(
                plan=plan_of(other, {}),
                memory=other.memory,
                step_s=other.step_s,
                why=over(other) or times_slower(other.step_s, best.step_s),
            )
            for other in answer.others
        ),
        num_considered=answer.num_considered,
        seconds=time.perf_counter() - start_s,
        problem=problem,
        fastest_s=answer.fastest_s,
        stopped_by=stopped_by,
    )
