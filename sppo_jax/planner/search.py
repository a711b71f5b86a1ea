"""The search: the fastest step, in simulation, that fits in device and host memory."""

import math
import time
from dataclasses import dataclass, replace
from typing import NamedTuple

from sppo_jax.config import Config
from sppo_jax.hardware import Cluster
from sppo_jax.plan.plan import Plan
from sppo_jax.plan.table import BREADTH_FIRST
from sppo_jax.planner.best_first import TIE, BestFirst
from sppo_jax.planner.dials import Dials, faster_ways, with_optimizer_on_the_host, with_room_on_the_host
from sppo_jax.planner.evaluate import Outcome, evaluate, plan_of
from sppo_jax.planner.frontier import Start
from sppo_jax.planner.late_attention import late_attention_is_open, with_late_attention
from sppo_jax.planner.layouts import Request, read_request
from sppo_jax.planner.memory import Memory
from sppo_jax.planner.one_pass import with_queries_on_the_ring
from sppo_jax.planner.paper import paper_outcome
from sppo_jax.planner.pinned import refusal
from sppo_jax.planner.reasons import (
    dial_reasons,
    order_reason,
    over,
    problem_of,
    reasons_of,
    tie_reason,
    times_slower,
)
from sppo_jax.planner.runners_up import least, others

NUM_REJECTED = 5
# How many of the next fastest plans are tried with attention outputs of late chunks.
_LATE_TRIED = 4
# A breadth-first plan with the usual dials may be slower than the fastest other one by so much and still be considered.
_DIALS_GAIN = 0.01


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
        num_considered: choices considered; most are ruled out by the bound of their family (`candidates.Family`).
        seconds: seconds the search took.
        problem: empty if it fits; else the limit that it breaks, by how much, and the nearest change.
        fastest_s: seconds of the fastest step that fits; the plan's step takes at most 0.5% longer. Where none fits,
            the seconds of the plan. Compare searches by these, because the choice between ties is not about speed.
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


def search(config: Config, cluster: Cluster | None = None) -> Found:
    """Searches what the config leaves "auto" for the shortest simulated step that fits.

    Candidates are taken in the order of a lower bound of their step, family by family. The bound is refined step by
    step: from the uncut sequence, from a few chunks, from every chunk, from the simulated table. The first simulated
    candidate that fits and that no other bound undercuts is the fastest. What is too large for sure is dropped. Of
    the plans that take at most 0.5% longer than the fastest, the simplest is chosen. Breadth-first schedules are
    searched by themselves, after all others, as far as their bounds undercut the fastest of these. On CPUs and TPUs
    breadth-first is searched only where no other schedule fits, for lack of a step that was seen to be faster there.
    Other ways of a breadth-first plan (`dials`) are searched last, as far as they undercut the fastest plan so far.

    Args:
        config: the settings.
        cluster: the devices; None: `hardware.cluster`, `train.devices` if simulated, else those of this machine.

    Raises:
        ValueError: settings contradict each other.
    """
    start_s = time.perf_counter()
    request = read_request(config, cluster)
    if config.planner == "paper":
        return _found_by_paper(request, start_s)
    won, lost = _places(request)
    best_first, best = won.best_first, won.best
    considered = won.considered + (lost.considered if lost else 0)
    chosen, late, why_late = _chosen(request, best_first, best)
    rejected = others(best_first.frontier, chosen, NUM_REJECTED)
    of_other_order = lost.best if lost else None
    if of_other_order is not None:
        rejected = sorted([*rejected[: NUM_REJECTED - 1], of_other_order], key=lambda outcome: outcome.step_s)
    order = order_reason(chosen, of_other_order, searched=lost is not None and best is not None)
    reasons = reasons_of(request, best_first, chosen, considered, order) | dial_reasons(chosen, won.usual)
    if best is not None and chosen.step_s > best.step_s:
        reasons["tie"] = tie_reason(best_first, best, chosen)
    if why_late:
        reasons["stash"] = f"{why_late}; {reasons['stash']}"
    fastest_s = min((best or late).step_s, late.step_s)
    found, why_queries = with_queries_on_the_ring(late, fastest_s * (1 + TIE))
    if why_queries:
        reasons["sequence_kind"] = f"{reasons['sequence_kind']}; {why_queries}"
    return _found(request, found, fastest_s, reasons, rejected, considered, start_s)


def _chosen(request: Request, best_first: BestFirst, best: Outcome | None) -> tuple[Outcome, Outcome, str]:
    """Returns the plan to choose, the same with attention outputs of late chunks where these pay, and why they do.

    These save more than plans that tie differ by. So the plan is the fastest with them, or one that ties with that.

    Args:
        request: what was asked for.
        best_first: the search, over.
        best: the fastest outcome without them; None if none fits.
    """
    if best is None:
        smallest = least(best_first.frontier)
        return smallest, smallest, ""
    simplest = best_first.simplest_tie(best)
    if not any(late_attention_is_open(request, outcome) for outcome in (best, simplest)):
        return simplest, simplest, ""
    tried = [simplest, *([best] if best is not simplest else []), *best_first.next_best(best, _LATE_TRIED)]
    found = [(outcome, *with_late_attention(request, outcome)) for outcome in tried]
    fastest_s = min(late.step_s for _, late, _ in found)
    return next(one for one in found if one[1].step_s <= fastest_s * (1 + TIE))


class _Order(NamedTuple):
    """A search of the schedules of one order, over.

    Attributes:
        best_first: its last best-first search.
        best: the fastest outcome that fits, if any.
        considered: the choices considered.
        usual: of breadth-first plans, the fastest with the usual dials, if any.
    """

    best_first: BestFirst
    best: Outcome | None
    considered: int
    usual: Outcome | None = None


def _places(request: Request) -> tuple[_Order, _Order | None]:
    """Searches with the optimizer where the config says; if that is open, on the host where little else fits.

    That is where nothing fits with the optimizer on the device, or only plans whose chunks wait on the host unasked.
    """
    found = _orders(request)
    dials = with_optimizer_on_the_host(request.config, request.dials, request.cluster.device.platform)
    best = found[0].best
    fits = best is not None and best.choice.layout.request.dials.waiting == "keep"
    if fits or dials is None or request.table is not None:
        return found
    try:
        limit_s = best.step_s * (1 - TIE) if best is not None else math.inf
        on_host = _by_groups(replace(request, by_groups=True, dials=dials), limit_s)
    except ValueError:  # the layers do not fall into groups, or the sequences are not one wave
        return found
    considered = on_host.considered + sum(order.considered for order in found if order)
    return (on_host._replace(considered=considered), None) if on_host.best else found


def _orders(request: Request) -> tuple[_Order, _Order | None]:
    """Searches breadth-first schedules and all others, as far as these are open; returns the faster order first.

    Where nothing fits, the order with the smallest plan comes first.
    """
    plain = _by_groups(request) if request.schedule_name == BREADTH_FIRST else _best(request)
    fits, errs = plain.best is not None, not plain.best_first.frontier.too_large
    if not request.may_go_by_groups or (not request.compares_orders if fits else errs):
        return plain, None
    try:
        limit_s = plain.best.step_s * (1 - TIE) if plain.best else math.inf
        by_groups = _by_groups(replace(request, by_groups=True), limit_s)
        if by_groups.best is None and plain.best is None:
            excess = [least(order.best_first.frontier).memory.excess(request.cluster) for order in (plain, by_groups)]
            return (plain, by_groups) if excess[0] <= excess[1] else (by_groups, plain)
    except ValueError:  # the layers do not fall into groups
        return plain, None
    wins = by_groups.best is not None and by_groups.best.step_s < limit_s
    return (by_groups, plain) if wins else (plain, by_groups)


def _by_groups(request: Request, limit_s: float = math.inf) -> _Order:
    """Returns the search for the fastest breadth-first outcome: with the usual dials, then with one changed at a time.

    What a changed dial gains must be more than a tie. The waiting room goes to the host only where nothing else fits.

    Args:
        request: what is asked for.
        limit_s: what the outcome should undercut; one that other dials cannot bring below this may be missing.
    """
    found = usual = _best(request, limit_s * (1 + _DIALS_GAIN))
    considered, room = usual.considered, with_room_on_the_host(request.config, request.dials)
    ways = [room] if usual.best is None and room is not None else []
    ways += faster_ways(request.config, request.dials) if usual.best is not None else []
    for dials in ways:
        most_s = min(limit_s, found.best.step_s * (1 - TIE)) if found.best else limit_s
        if usual.best is None or _might_take_less(usual.best, dials, most_s):
            other = _best(replace(request, dials=dials), most_s)
            considered += other.considered
            found = other if other.best is not None else found
    return found._replace(considered=considered, usual=usual.best)


def _might_take_less(usual: Outcome, dials: Dials, most_s: float) -> bool:
    """Returns whether a plan takes less than `most_s` with other dials, whatever memory it takes then."""
    choice = usual.choice
    layout = replace(choice.layout, weights="resident") if dials.weights == "resident" else choice.layout
    kv = dials.kv if choice.kv == "rebuild" else choice.kv
    changed = replace(choice, layout=layout, kv=kv)
    return (layout.weights, kv) != (choice.layout.weights, choice.kv) and evaluate(changed).step_s < most_s


def _best(request: Request, limit_s: float = math.inf) -> _Order:
    """Returns the search for the fastest outcome; its step takes less than `limit_s`."""
    asked, considered = request.config.stash.kv_grad_dtype, 0
    start = Start(request)
    for dtype in ("float32", "bfloat16") if asked == "auto" else (asked,):
        best_first = BestFirst(start, dtype)
        best = best_first.best(limit_s)
        if best is not None:
            best = best_first.with_equal_cost(best)
        considered += len(best_first.frontier)
        if best is not None:
            break
    return _Order(best_first, best, considered)


def _found_by_paper(request: Request, start_s: float) -> Found:
    outcome, reasons, num_ranked = paper_outcome(request)
    return _found(request, outcome, outcome.step_s, reasons, [], num_ranked, start_s)


def _found(
    request: Request,
    best: Outcome,
    fastest_s: float,
    reasons: dict[str, str],
    others: list[Outcome],
    considered: int,
    start_s: float,
) -> Found:
    fits, plan = best.memory.fits(request.cluster), plan_of(best, reasons)
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
                why=over(request, other) or times_slower(other.step_s, best.step_s),
            )
            for other in others
        ),
        num_considered=considered,
        seconds=time.perf_counter() - start_s,
        problem=problem,
        fastest_s=fastest_s,
        stopped_by=stopped_by,
    )
