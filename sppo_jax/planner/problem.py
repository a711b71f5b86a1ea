"""Why no plan fits: the bytes that are too many, and the nearest change."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate

from sppo_jax.config import Config
from sppo_jax.planner.evaluate import Outcome
from sppo_jax.planner.floors import room_bytes
from sppo_jax.planner.hunt import Hunt
from sppo_jax.planner.memory import Memory
from sppo_jax.planner.nearest_mesh import released
from sppo_jax.planner.nodes import start_of
from sppo_jax.planner.request import Request, read_request
from sppo_jax.units import format_bytes

# Settings that are released together, nearest first.
_RELEASED = (
    ("stash", ("alpha",)),
    ("stash", ("rest",)),
    ("stash", ("inputs", "attention", "rest", "alpha")),
    ("stash", ("kv_grad_dtype",)),
    ("sequence", ("chunks",)),
    ("sequence", ("kind", "ulysses")),
    ("schedule", ("name", "interleave")),
    ("mesh", ("pipe", "seq")),
)
# What holds device memory, in words.
HOLDERS = {
    "params": "parameters and optimizer",
    "weights": "weights to compute with",
    "grads": "gradients",
    "kv": "K/V",
    "kv_grad": "dK/dV",
    "stash": "stash",
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
    over_hbm = memory.hbm_bytes - room_bytes(cluster)
    over_host = memory.host - cluster.device_host_bytes
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
    room, host = format_bytes(room_bytes(cluster)), format_bytes(cluster.device_host_bytes)
    line = (
        f"no plan fits: the least one is {over(request, least)}, with {format_bytes(memory.hbm_bytes)} of HBM "
        f"({_largest(memory)}) of {room} that plans may take and {format_bytes(memory.host)} of host memory of {host}; "
        f"{change or _advice(request, memory)}"
    )
    return line, stopped_by


def _largest(memory: Memory) -> str:
    """Returns the largest holders of device memory with their bytes."""
    parts = sorted(memory.hbm.items(), key=lambda item: -item[1])
    below = sum(total < _SHARE_NAMED * memory.hbm_bytes for total in accumulate(size for _, size in parts))
    return ", ".join(f"{HOLDERS[name]} {format_bytes(size)}" for name, size in parts[: min(below + 1, _MOST_NAMED)])


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
        try:
            relaxed = read_request(config, request.cluster)
            dtype = config.stash.kv_grad_dtype
            found = Hunt(relaxed, "bfloat16" if dtype == "auto" else dtype, start_of(relaxed)).least()
        except ValueError:
            continue
        if found.memory.fits(request.cluster):
            mesh, places = found.choice.layout.mesh, "/".join(found.choice.places)
            return names, (
                f"{names} stops it: without it, e.g. pipe {mesh.pipe} x seq {mesh.seq} with "
                f"{len(found.choice.chunk_lengths)} chunks, stash {places} fits"
            )
    return "", ""


def _released(config: Config) -> Iterator[tuple[str, Config]]:
    """Yields the config with some of its pinned settings left to the planner, and what these are."""
    if config.planner == "paper":
        yield "planner=paper", replace(config, planner="search")
    for given, _, free in released(config, _RELEASED):
        yield ", ".join(f"{name}={value}" for name, value in given.items()), free
