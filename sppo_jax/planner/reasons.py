"""Why no plan fits: the bytes that are too many, and the nearest change."""

import dataclasses
from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace
from itertools import accumulate

from sppo_jax.config import Config
from sppo_jax.hardware import Cluster, usable_bytes, usable_host_bytes
from sppo_jax.plan.table import BREADTH_FIRST
from sppo_jax.planner.advice import released
from sppo_jax.planner.best_first import TIE, BestFirst
from sppo_jax.planner.bodies import MOST_TIMES
from sppo_jax.planner.candidates import Candidate
from sppo_jax.planner.dials import Dials
from sppo_jax.planner.evaluate import Outcome
from sppo_jax.planner.frontier import Frontier, Start
from sppo_jax.planner.layouts import Layout, Request, read_request
from sppo_jax.planner.memory import Memory
from sppo_jax.planner.partitions import schedule_reason
from sppo_jax.planner.runners_up import least_that_fits, rivals
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
    "weights": "weights to compute with",
    "grads": "gradients",
    "kv": "K/V",
    "kv_grad": "dK/dV",
    "stash": "stash",
    "waiting": "chunks between groups of layers",
    "copies": "copies under way",
    "carries": "between stages and head",
    "batch": "batch",
    "work": "a tick's own buffers",
}
# Holders that the same change makes smaller.
_PARAMETERS, _PREFIX, _BATCH = ("params", "weights", "grads"), ("kv", "kv_grad"), ("batch",)
# The largest holders are named, as many as take this share, but no more than so many.
_SHARE_NAMED, _MOST_NAMED = 0.8, 4


def over(request: Request, outcome: Outcome) -> str:
    """Returns which limit an outcome breaks and by how much; empty if it fits."""
    cluster, memory = request.cluster, outcome.memory
    over_hbm = memory.hbm_bytes - usable_bytes(cluster)
    over_host = memory.host - usable_host_bytes(cluster)
    if over_hbm > 0:
        return f"over HBM by {format_bytes(over_hbm)} a device"
    return f"over host memory by {format_bytes(over_host)} a device" if over_host > 0 else ""


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
    """Returns what makes the largest holders smaller, where no setting of the config stops every plan."""
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
    """Returns the settings that stop every plan, and what fits without them; both empty if it is not them."""
    for names, config in _released(request.config):
        found = _least_that_fits(config, request.cluster)
        if found is not None:
            mesh, places = found.choice.layout.mesh, "/".join(found.choice.places)
            return names, (
                f"change {names}: a plan of pipe {mesh.pipe} x seq {mesh.seq} with {len(found.choice.chunk_lengths)} "
                "chunks "
                f"and stash {places} then fits"
            )
    return "", ""


def _least_that_fits(config: Config, cluster: Cluster) -> Outcome | None:
    """Returns about the smallest outcome of a config that fits, of the order that is tried first; None if none does."""
    dtype = config.stash.kv_grad_dtype
    try:
        request = read_request(config, cluster)
        for by_groups in (request.by_groups, True)[: 1 + request.may_go_by_groups]:
            asked = replace(request, by_groups=by_groups)
            found = least_that_fits(Frontier(Start(asked), "bfloat16" if dtype == "auto" else dtype))
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
# What each choice is, to tell it from others and to name it.
_CHOICES: dict[str, Callable[[Candidate], Hashable]] = {
    "mesh": lambda one: one.partition.layout.mesh,
    "sequence_kind": lambda one: one.partition.layout.split.ulysses,
    "chunks": lambda one: (one.partition.num_chunks, one.partition.balance),
    "schedule": lambda one: (one.partition.schedule, one.partition.layout.interleave),
    "wave": lambda one: one.partition.wave,
    "stash": lambda one: one.places,
}
# What another plan's layout must have in common with the chosen one's to be compared with it.
_ALIKE: dict[str, Callable[[Layout], Hashable]] = {
    "mesh": lambda one: None,
    "sequence_kind": lambda one: one.mesh,
    "chunks": lambda one: (one.mesh, one.interleave),
    "schedule": lambda one: one.mesh,
    "wave": lambda one: one.mesh,
    "stash": lambda one: one.mesh,
}
_LABELS: dict[str, Callable[[Candidate], str]] = {
    "mesh": lambda one: "data {} x pipe {} x seq {}".format(*dataclasses.astuple(one.partition.layout.mesh)),
    "sequence_kind": lambda one: (
        f"ulysses {one.partition.layout.split.ulysses} x ring {one.partition.layout.split.ring}"
    ),
    "chunks": lambda one: f"{one.partition.num_chunks} {_BALANCES[one.partition.balance]}",
    "schedule": lambda one: f"{one.partition.schedule} with interleave {one.partition.layout.interleave}",
    "wave": lambda one: f"a wave of {one.partition.wave}",
    "stash": lambda one: "/".join(one.places),
}


def reasons_of(
    request: Request, best_first: BestFirst, best: Outcome, num_considered: int, order: str
) -> dict[str, str]:
    """Returns the reason of each choice.

    Args:
        request: what was asked for.
        best_first: the search, over.
        best: what it found.
        num_considered: choices considered in all.
        order: from `order_reason`.
    """
    layout = best.choice.layout
    # A sequence alone is a wave of its own.
    choices = [key for key in _CHOICES if key != "wave" or layout.sequences > 1]
    reasons = {key: _against_rivals(best_first, best, key) for key in choices}
    if request.config.stash.kv_grad_dtype != "auto":
        reasons["kv_grad_dtype"] = "as requested"
    else:
        wide = best.choice.kv_grad_dtype == "float32"
        reasons["kv_grad_dtype"] = "sums over many chunks" if wide else "nothing fits with float32 sums"
    reasons["mesh"] = f"of {num_considered} choices on {request.cluster.name}; {reasons['mesh']}"
    reasons["sequence_kind"] = "; ".join(filter(None, (layout.split.reason, reasons["sequence_kind"])))
    lost_s = best_first.lost_by_fewer_shapes(best)
    if lost_s is not None:
        few = (
            f"{len(best.choice.shapes)} tick shapes, for at most {MOST_TIMES} times the bodies of ticks of equal chunks"
        )
        reasons["chunks"] = "; ".join(filter(None, (f"{few}, change the step by {lost_s:+.2g} s", reasons["chunks"])))
    why = schedule_reason(layout, best.choice.schedule, best.choice.wave)
    reasons["schedule"] = "; ".join(filter(None, (why, order, reasons["schedule"])))
    return {key: reason for key, reason in reasons.items() if reason}


def dial_reasons(chosen: Outcome, usual: Outcome | None) -> dict[str, str]:
    """Returns why a breadth-first plan does something in another than the usual way.

    Args:
        chosen: what was chosen.
        usual: the fastest plan that does everything as usual; None if none fits, or none is fast enough.
    """
    reasons, dials = {}, chosen.choice.layout.request.dials
    longer = f"the usual way takes {usual.step_s / chosen.step_s:.3f}x as long" if usual else "no other way is as fast"
    if chosen.choice.waiting == "host":
        own = dials.waiting == "host"
        reasons["waiting"] = "nothing fits with the chunks in device memory" if own else "as requested"
    if dials.optimizer == "host":
        reasons["optimizer"] = "with parameters and moments on the device nothing fits, or steps take longer"
    if dials.kv != Dials().kv and chosen.choice.kv == dials.kv:
        reasons["kv"] = f"K/V: {dials.kv} instead of rebuild; {longer}"
    if dials.weights == "resident":
        reasons["weights"] = f"all of a stage's weights are there all the time; {longer}"
    return reasons


def order_reason(chosen: Outcome, other: Outcome | None, *, searched: bool) -> str:
    """Returns how a plan compares with those of the other order: breadth-first, or any other schedule.

    Args:
        chosen: what was chosen.
        other: the fastest outcome of the other order; None if none fits, or none is faster.
        searched: whether the other order was searched at all.
    """
    if not searched:
        return ""
    if chosen.choice.schedule != BREADTH_FIRST:
        return f"no {BREADTH_FIRST} plan that fits takes {TIE:.1%} less time"
    if other is None:
        return "no other schedule fits"
    times = other.step_s / chosen.step_s
    return f"the fastest of the other schedules, {other.choice.schedule}, takes {times:.3f}x as long"


def tie_reason(best_first: BestFirst, fastest: Outcome, chosen: Outcome) -> str:
    """Returns why a plan was chosen that is not the fastest."""
    mechanisms = best_first.candidate_of(fastest).complexity[0] - best_first.candidate_of(chosen).complexity[0]
    simpler = f"has {mechanisms} fewer mechanisms" if mechanisms else "has fewer chunks"
    return (
        f"the fastest step takes {1 - fastest.step_s / chosen.step_s:.2%} less time, but steps within {TIE:.1%} are a "
        f"tie, and this plan {simpler}"
    )


def times_slower(step_s: float, best_s: float) -> str:
    """Returns how much slower a step is than the chosen one, or that the two are a tie."""
    times = f"{step_s / best_s:.3f}"
    if step_s < best_s:
        return f"a tie: {1 - step_s / best_s:.2%} faster, but less simple"
    return "a tie: as fast to 0.1%" if times == "1.000" else f"{times}x slower"


def _against_rivals(best_first: BestFirst, best: Outcome, key: str) -> str:
    if not best.memory.fits(best_first.request.cluster):
        # What takes how long is of no interest then. The mesh, the first of the choices, says so for all.
        return "nothing fits, and this plan is the smallest that was found" if key == "mesh" else ""
    of, alike, label = _CHOICES[key], _ALIKE[key], _LABELS[key]
    slower, larger = rivals(best_first.frontier, best, of, alike)
    texts = []
    if slower is not None:
        candidate, bound = slower
        # A lower bound is refined only until the candidate loses.
        times = f"{max(1.0, bound / best.step_s):.3f}"
        longer = "may be as fast, to 0.1%" if times == "1.000" else f"takes at least {times}x as long"
        if bound < best.step_s * (1 - 5e-4):
            longer = f"may be up to {1 - bound / best.step_s:.2%} faster, a tie"
        texts.append(f"the next choice, {label(candidate)}, {longer}")
    if larger is not None:
        texts.append(f"{label(larger[0])} might be faster, but does not fit")
    return "; ".join(texts) or "as requested, or the only possible choice"
