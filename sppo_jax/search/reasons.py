"""The reasons of each choice of a search; where no plan fits, the bytes that are too many and the nearest change."""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

from sppo_jax.config import Config
from sppo_jax.hardware import Cluster, usable_bytes, usable_host_bytes
from sppo_jax.predict.memory import Memory
from sppo_jax.search.advice import released
from sppo_jax.search.because import Because, joined
from sppo_jax.search.evaluate import Outcome
from sppo_jax.search.frontier import TIE, Fastest, Frontier
from sppo_jax.search.refine import MOST_TIMES
from sppo_jax.search.request import USUAL, Request, Trial, Way, read_request
from sppo_jax.search.runners_up import Kind, Rival, least_that_fits, rivals
from sppo_jax.search.space import Candidate, schedule_reason
from sppo_jax.units import format_bytes

# Settings that are released together, nearest first.
_RELEASED = (
    ("stash", ("alpha",)),
    ("stash", ("rest",)),
    ("stash", ("inputs", "attention", "rest", "alpha")),
    ("stash", ("kv_grad_dtype",)),
    ("sequence", ("chunks",)),
    ("sequence", ("kind", "ulysses")),
    ("schedule", ("wave",)),
    ("schedule", ("name", "interleave")),
    ("mesh", ("pipe", "seq")),
    ("mesh", ("weights",)),
    ("stash", ("waiting",)),
    ("stash", ("kv",)),
    ("optimizer", ("place",)),
)
# What holds device memory, in words.
HOLDERS = {
    "params": "parameters and optimizer",
    "weights": "working weights",
    "grads": "gradients",
    "kv": "K/V",
    "kv_grad": "dK/dV",
    "stash": "stash",
    "waiting": "chunks waiting between layer groups",
    "copies": "copies in flight",
    "carries": "pipeline registers",
    "batch": "batch",
    "work": "temporaries of a tick",
    "experts": "experts at work",
}
# Holders that the same change makes smaller.
_PARAMETERS, _PREFIX, _BATCH = ("params", "weights", "grads"), ("kv", "kv_grad"), ("batch",)
# The largest holders are named, as many as take this share, but no more than so many.
_SHARE_NAMED, _MOST_NAMED = 0.8, 4


def over(request: Request, outcome: Outcome) -> str:
    """Returns which limit an outcome breaks most and by how much; empty if it fits."""
    cluster, memory = request.cluster, outcome.memory
    limits = (
        ("HBM", memory.hbm_bytes, usable_bytes(cluster)),
        ("host memory", memory.host, usable_host_bytes(cluster)),
    )
    name, held, usable = max(limits, key=lambda limit: limit[1] / limit[2])
    return f"over {name} by {format_bytes(held - usable)} per device" if held > usable else ""


def problem_of(request: Request, least: Outcome) -> tuple[str, str]:
    """Says in one line why nothing fits: the limit, the bytes, and the nearest change.

    Args:
        request: what was asked for.
        least: the outcome that is least too large.

    Returns:
        The line, and the settings of the config without which a plan fits; empty if it is not them.
    """
    cluster, memory = request.cluster, least.memory
    stopped_by, change = _nearest_change(request)
    hbm, host = format_bytes(usable_bytes(cluster)), format_bytes(usable_host_bytes(cluster))
    line = (
        f"no plan fits: the smallest plan is {over(request, least)}, with {format_bytes(memory.hbm_bytes)} of HBM "
        f"({_largest(memory)}) of {hbm} that plans may take and {format_bytes(memory.host)} of host memory"
        f"{_on_host(memory)} of {host}; {change or _advice(request, memory)}"
    )
    return line, stopped_by


def _largest(memory: Memory) -> str:
    """Returns the largest holders of device memory with their bytes."""
    parts = sorted(memory.hbm.items(), key=lambda item: -item[1])
    below = sum(total < _SHARE_NAMED * memory.hbm_bytes for total in accumulate(size for _, size in parts))
    return ", ".join(f"{HOLDERS[name]} {format_bytes(size)}" for name, size in parts[: min(below + 1, _MOST_NAMED)])


def _on_host(memory: Memory) -> str:
    """Returns how much of the host memory is the optimizer's, if any is."""
    optimizer = memory.host_optimizer
    if not optimizer:
        return ""
    rest = format_bytes(memory.host - optimizer)
    return f" (parameters, moments and gradients {format_bytes(optimizer)}, activations {rest})"


def _advice(request: Request, memory: Memory) -> str:
    """Returns a change that makes the largest holders smaller, where no setting of the config rules out every plan."""
    more_devices, shorter = "(sppo plan --min-devices)", "a shorter sequence (sppo plan --max-length)"

    def size_of(names: tuple[str, ...]) -> int:
        return sum(memory.hbm[name] for name in names)

    largest = max((_PARAMETERS, _PREFIX, _BATCH), key=size_of)
    if 2 * size_of(largest) < memory.hbm_bytes:
        return f"use more devices {more_devices} or {shorter}"
    if largest == _PARAMETERS:
        return f"use more devices, whose stages share the parameters {more_devices}, or a smaller model"
    if largest == _PREFIX:
        return f"use more devices, which share K/V {more_devices}, or {shorter}"
    sequence = request.config.sequence
    name = "per_step" if sequence.per_step else "per_pipeline"
    fewer = f"use fewer sequences in a step than sequence.{name}={getattr(sequence, name)}"
    return f"{fewer}, more devices, which share the batch {more_devices}, or {shorter}"


def _nearest_change(request: Request) -> tuple[str, str]:
    """Returns the settings that rule out every plan, and a plan that fits without them; both empty if none do."""
    for names, config in _released(request.config):
        found = _least_that_fits(config, request.cluster)
        if found is not None:
            mesh, places = found.candidate.layout.mesh, "/".join(found.candidate.places)
            return names, (
                f"change {names}: a plan of pipe {mesh.pipe} x seq {mesh.seq} with "
                f"{found.candidate.partition.num_chunks} chunks and stash {places} then fits"
            )
    return "", ""


def _least_that_fits(config: Config, cluster: Cluster) -> Outcome | None:
    """Returns about the smallest outcome of a config that fits, of the order that is tried first; None if none does."""
    asked = config.stash.kv_grad_dtype
    dtype = "bfloat16" if asked == "auto" else asked
    try:
        request = read_request(config, cluster)
        ways = [USUAL] if request.asks_for_breadth_first else [Way(), USUAL][: 1 + request.allows_breadth_first]
        for way in ways:
            frontier = Frontier(request)
            frontier.open(Trial(way, dtype))
            found = least_that_fits(frontier)
            if found is not None:
                return found
    except ValueError:
        pass
    return None


def _released(config: Config) -> Iterator[tuple[str, Config]]:
    """Yields the config with some of its pinned settings left to the planner, and what these are."""
    if config.planner == "paper":
        yield "planner=paper", replace(config, planner="search")
    for given, _, free in released(config, _RELEASED):
        yield ", ".join(f"{name}={value}" for name, value in given.items()), free


_BALANCES = {"equal": "of equal length", "flops": "of equal FLOPs", "cost": "of equal cost", "given": "as given"}
# What each choice is, to tell it from others, and what the layout of another plan must have in common with it.
_KINDS = {
    "mesh": Kind(lambda one: one.layout.mesh, lambda layout: None, True),
    "sequence_kind": Kind(lambda one: one.layout.split.ulysses, lambda layout: layout.mesh, True),
    "chunks": Kind(
        lambda one: (one.partition.num_chunks, one.partition.balance),
        lambda layout: (layout.mesh, layout.interleave),
        False,
    ),
    "schedule": Kind(lambda one: (one.partition.schedule, one.layout.interleave), lambda layout: layout.mesh, False),
    "wave": Kind(lambda one: one.partition.wave, lambda layout: layout.mesh, False),
    "stash": Kind(lambda one: one.places, lambda layout: layout.mesh, True),
}
# The settings that ask for each choice.
_SETTINGS = {
    "mesh": ("mesh", ("data", "pipe", "seq")),
    "sequence_kind": ("sequence", ("kind", "ulysses")),
    "chunks": ("sequence", ("chunks",)),
    "schedule": ("schedule", ("name", "interleave", "table")),
    "wave": ("schedule", ("wave",)),
    "stash": ("stash", ("inputs", "attention", "rest")),
}
_LABELS: dict[str, Callable[[Candidate], str]] = {
    "mesh": lambda one: "data {} x pipe {} x seq {}".format(*dataclasses.astuple(one.layout.mesh)),
    "sequence_kind": lambda one: f"ulysses {one.layout.split.ulysses} x ring {one.layout.split.ring}",
    "chunks": lambda one: f"{one.partition.num_chunks} {_BALANCES[one.partition.balance]}",
    "schedule": lambda one: f"{one.partition.schedule} with interleave {one.layout.interleave}",
    "wave": lambda one: f"a wave of {one.partition.wave}",
    "stash": lambda one: "/".join(one.places),
}


class Results(NamedTuple):
    """A search that is over.

    Attributes:
        frontier: what it knows.
        fastest: its plans that fit.
        chosen: the plan to explain; without `best` nothing fits, and it is the smallest.
        best: the fastest plan, which the chosen one ties with.
        other: where the fastest plan is breadth-first, the fastest of the other schedules.
        usual: where the plan is breadth-first in another than the usual way, the fastest plan of the usual way.
    """

    frontier: Frontier
    fastest: Fastest
    chosen: Outcome
    best: Outcome | None = None
    other: Outcome | None = None
    usual: Outcome | None = None


def reasons_of(results: Results) -> dict[str, str]:
    """Returns the reason of each choice of a search."""
    request, chosen = results.frontier.request, results.chosen
    candidate, layout = chosen.candidate, chosen.candidate.layout
    # A sequence alone is a wave of its own.
    choices = [key for key in _KINDS if key != "wave" or layout.sequences > 1]
    reasons = {key: _against_rivals(results, key) for key in choices}
    if request.config.stash.kv_grad_dtype != "auto":
        reasons["kv_grad_dtype"] = Because.ASKED()
    else:
        wide = candidate.kv_grad_dtype == "float32"
        reasons["kv_grad_dtype"] = float32_reason(candidate) if wide else Because.NARROW()
    reasons["sequence_kind"] = joined(layout.split.reason, reasons["sequence_kind"])
    lost_s = results.fastest.lost_by_fewer_shapes_s.get(candidate.partition)
    if lost_s is not None:
        few = Because.FEW_SHAPES(count=len(candidate.partition.shapes), most=MOST_TIMES, lost_s=lost_s)
        reasons["chunks"] = joined(few, reasons["chunks"])
    why = schedule_reason(candidate.partition)
    reasons["schedule"] = joined(why, _order_reason(results), reasons["schedule"])
    reasons |= _way_reasons(results)
    if results.best is not None and chosen.step_s > results.best.step_s:
        reasons["tie"] = _tie_reason(results.best, chosen)
    return {key: reason for key, reason in reasons.items() if reason}


def float32_reason(candidate: Candidate) -> str:
    """Returns why dK and dV are in float32."""
    chunks = candidate.partition.num_chunks
    return Because.SUMS(chunks=chunks) if chunks > 1 else Because.NO_SUMS()


def _way_reasons(results: Results) -> dict[str, str]:
    """Returns why a breadth-first plan keeps weights, keys and values, or chunks in an unusual way."""
    request, chosen, usual = results.frontier.request, results.chosen, results.usual
    config, candidate = request.config, chosen.candidate

    def instead(way: str) -> str:
        if usual is None:
            return Because.USUAL_NOT(usual=way)
        return Because.USUAL_SLOWER(usual=way, times=f"{usual.step_s / chosen.step_s:.3f}")

    reasons = {}
    if candidate.layout.request.waiting == "host":
        own = config.stash.waiting == "auto"
        reasons["waiting"] = Because.WAITING() if own else Because.ASKED()
    if candidate.way.optimizer == "host":
        reasons["optimizer"] = Because.OPTIMIZER()
    if not candidate.partition.is_breadth_first or results.best is None:
        return reasons
    if config.stash.kv == "auto" and candidate.partition.num_chunks > 1 and candidate.kv in ("keep", "host"):
        held = {"keep": "kept in device memory", "host": "offloaded to the host"}[candidate.kv]
        reasons["kv"] = Because.KV(held=held, instead=instead("recomputing them"))
    if candidate.way.weights == "resident":
        reasons["weights"] = instead("gathering them for one group of layers at a time")
    return reasons


def _order_reason(results: Results) -> str:
    """Returns how a plan compares with plans of the other order, or why breadth-first was not tried."""
    request, chosen, best = results.frontier.request, results.chosen, results.best
    if not request.allows_breadth_first or best is None:
        return ""
    other = results.other if best.candidate.partition.is_breadth_first else best
    if chosen.candidate.partition.is_breadth_first:
        if other is None:
            return Because.NO_OTHER_ORDER()
        times = f"{other.step_s / chosen.step_s:.3f}"
        return Because.OTHER_ORDER(name=other.candidate.partition.schedule, times=times)
    if request.compares_orders:
        return Because.NO_ONE_GROUP(tie=TIE)
    groups = request.config.sequence.groups
    where = "on CPUs and TPUs" if groups == "static" else f"with sequence.groups={groups}"
    return Because.ONE_GROUP_LAST(where=where)


def _tie_reason(fastest: Outcome, chosen: Outcome) -> str:
    """Returns why a plan was chosen that is not the fastest."""
    mechanisms = fastest.candidate.complexity[0] - chosen.candidate.complexity[0]
    fewer = f"{mechanisms} fewer {'mechanism' if mechanisms == 1 else 'mechanisms'}"
    gain = 1 - fastest.step_s / chosen.step_s
    return Because.TIE(gain=gain, tie=TIE, simpler=fewer if mechanisms else "fewer chunks")


def times_slower(step_s: float, best_s: float) -> str:
    """Returns how much slower a step is than the chosen one, or that the two are a tie."""
    times = f"{step_s / best_s:.3f}"
    if step_s < best_s:
        return f"a tie: {1 - step_s / best_s:.2%} faster, but less simple"
    return "a tie: as fast (within 0.1%)" if times == "1.000" else f"takes {times}x as long"


def _against_rivals(results: Results, key: str) -> str:
    if results.best is None:
        # What takes how long is of no interest then. The mesh, the first of the choices, says so for all.
        return Because.SMALLEST() if key == "mesh" else ""
    label = _LABELS[key]
    slower, larger = rivals(results.frontier, results.chosen, _KINDS[key])
    texts = []
    if slower is not None:
        texts.append(_longer(slower, label(slower.candidate), results.chosen.step_s))
    if larger is not None:
        texts.append(Because.TOO_LARGE(rival=label(larger.candidate)))
    if texts:
        return joined(*texts)
    section, names = _SETTINGS[key]
    asked = getattr(results.frontier.request.config, section)
    is_open = all(getattr(asked, name) == getattr(type(asked), name) for name in names)  # at its default
    return Because.ONLY_CHOICE() if is_open else Because.ASKED()


def _longer(slower: Rival, label: str, best_s: float) -> str:
    """Returns how much longer a rival takes, or that it ties with the best."""
    times, known = f"{slower.step_s / best_s:.3f}", slower.is_simulated
    # A lower bound is refined only until the candidate loses.
    if times == "1.000":
        return Because.AS_FAST(rival=label, verb="is" if known else "may be")
    if known and slower.step_s < best_s:
        return Because.FASTER_TIE(rival=label, gain=1 - slower.step_s / best_s)
    return Because.SLOWER(rival=label, bound="" if known else "at least ", times=times)
