"""Where no plan fits: the plan that is least too large, the bytes that are too many, and the nearest change."""

import heapq
import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate

from sppo_jax.config import Config
from sppo_jax.files.format_bytes import format_bytes
from sppo_jax.hardware import Cluster, usable_bytes, usable_host_bytes
from sppo_jax.predict.memory import Memory
from sppo_jax.search.bounds.frontier import Frontier
from sppo_jax.search.evaluate import Outcome, Sized, evaluate, size
from sppo_jax.search.explain import over
from sppo_jax.search.space.advice import released
from sppo_jax.search.space.partitions import Candidate
from sppo_jax.search.space.request import USUAL, Request, Trial, read_request, way_for

# Settings that are released together, nearest first.
_RELEASED = (
    ("stash", ("alpha",)),
    ("stash", ("rest",)),
    ("stash", ("inputs", "attention", "rest", "alpha")),
    ("stash", ("kv_grad_dtype",)),
    ("sequence", ("chunks",)),
    ("sequence", ("split", "ulysses")),
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
# How many of the least bounds of memory of an order are worked out, and how many of those that were nearly chosen.
_LEAST_TRIED, _NEARLY_TRIED = 8, 2


def least(frontier: Frontier) -> Outcome:
    """Returns the plan that is least too large, or that fits with most to spare.

    Raises:
        ValueError: no choice keeps the rules; the first error.
    """
    sized = _smallest_sized(frontier)
    if not sized:
        raise frontier.errors[0]
    smallest = _smallest_of(frontier, sized)
    found = frontier.attempt(evaluate, smallest.candidate, smallest)
    if found is None:
        raise frontier.errors[-1]
    return found


def least_that_fits(frontier: Frontier) -> Outcome | None:
    """Returns the outcome of `least` if it fits, else None."""
    fitting = [one for one in _smallest_sized(frontier, most=0.0) if one.memory.fits(frontier.request.cluster)]
    if not fitting:
        return None
    smallest = _smallest_of(frontier, fitting)
    return frontier.attempt(evaluate, smallest.candidate, smallest)


def _smallest_of(frontier: Frontier, sized: list[Sized]) -> Sized:
    # Where the host's memory is short, the excess of all may be the same.
    return min(sized, key=lambda one: (one.memory.excess(frontier.request.cluster), one.memory.hbm_bytes))


def _smallest_sized(frontier: Frontier, most: float = math.inf) -> list[Sized]:
    """Returns a few candidates that may be the smallest, with their memory.

    They are those that were least too large so far, and of each layout and places the one of the shortest chunks, least
    bound of memory first. Breadth-first and other schedules have a limit each, because bounds of the first are far
    below their memory where the host is full.

    Args:
        frontier: the search, over.
        most: the largest bound of the excess of memory.
    """
    cluster, found = frontier.request.cluster, math.inf
    nearly = heapq.nsmallest(_NEARLY_TRIED, frontier.sized, key=lambda one: one.memory.excess(cluster))
    sized, tried = list(nearly), {True: 0, False: 0}
    for excess, candidate in _smallest(frontier):
        # Those that follow are larger.
        if excess > min(found, most):
            break
        order = candidate.partition.is_breadth_first
        if tried[order] == _LEAST_TRIED:
            continue
        one = frontier.attempt(size, candidate)
        if one is not None:
            tried[order] += 1
            sized.append(one)
            found = min(found, one.memory.excess(cluster))
    return sized


def _smallest(frontier: Frontier) -> Iterator[tuple[float, Candidate]]:
    """Yields the smallest candidate of each layout and places, least bound of memory first.

    Of equal bounds, the one of the most chunks comes first.
    """
    smallest = []
    for number, family in enumerate(frontier.families):
        bounds = [frontier.least_excess(one[0], family.places, family.kv_grad_dtype) for one in family.partitions]
        alike = [one for bound, one in zip(bounds, family.partitions, strict=True) if bound == min(bounds)]
        shortest = max((one for members in alike for one in members), key=lambda one: one.num_chunks)
        smallest.append((min(bounds), -shortest.num_chunks, number, shortest))
    for excess, _, number, partition in sorted(smallest, key=lambda one: one[:3]):
        family = frontier.families[number]
        kv = partition.kv(family.places)[-1]
        yield excess, Candidate(partition, family.places, frontier.alpha, family.kv_grad_dtype, kv)


def problem_of(request: Request, least: Outcome) -> tuple[str, str]:
    """Says in one line why nothing fits: the limit, the bytes, and the nearest change.

    Args:
        request: what was asked for.
        least: the outcome that is least too large.

    Returns:
        The line, and the settings of the config without which a plan fits; empty if it is not them.
    """
    stopped_by, change = _nearest_change(request)
    return f"{too_large_line(request, least)}; {change or _advice(request, least.memory)}", stopped_by


def too_large_line(request: Request, least: Outcome) -> str:
    """Returns the limit that nothing fits, and the bytes; arguments as `problem_of`."""
    cluster, memory = request.cluster, least.memory
    hbm, host = format_bytes(usable_bytes(cluster)), format_bytes(usable_host_bytes(cluster))
    return (
        f"no plan fits: the smallest plan is {over(least)}, with {format_bytes(memory.hbm_bytes)} of HBM "
        f"({_largest(memory)}) of {hbm} that plans may take and {format_bytes(memory.host)} of host memory"
        f"{_on_host(memory)} of {host}"
    )


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
    name = "per_step" if sequence.given_per_step is not None else "per_pipeline"
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
        ways = [request.way, USUAL][: 1 + request.allows_breadth_first]
        for way in ways:
            frontier = Frontier(request)
            frontier.open(Trial(way_for(config, way), dtype))
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
