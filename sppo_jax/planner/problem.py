"""Why no plan fits: the bytes that are too many, and the nearest change."""

import dataclasses
from collections.abc import Iterator
from dataclasses import replace

from sppo_jax.config import Config
from sppo_jax.planner.evaluate import Outcome
from sppo_jax.planner.floors import room_bytes
from sppo_jax.planner.hunt import Hunt
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
    parts = sorted(memory.hbm.items(), key=lambda item: -item[1])[:2]
    held = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts)
    stopped_by, change = _nearest_change(request)
    line = (
        f"no plan fits: the least one is {over(request, least)}, with {format_bytes(memory.hbm_bytes)} of HBM "
        f"({held}) of {format_bytes(room_bytes(cluster))} that plans may take and {format_bytes(memory.host)} of host "
        f"memory of {format_bytes(cluster.device_host_bytes)}; {change}"
    )
    return line, stopped_by


def _nearest_change(request: Request) -> tuple[str, str]:
    """Returns the settings that stop every plan, empty if it is not them, and what to change."""
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
    return "", "use more devices or a shorter sequence (sppo plan --min-devices, --max-length)"


def _released(config: Config) -> Iterator[tuple[str, Config]]:
    """Yields the config with some of its pinned settings left to the planner, and what these are."""
    if config.planner == "paper":
        yield "planner=paper", replace(config, planner="search")
    for group, names in _RELEASED:
        settings = getattr(config, group)
        pinned = {name: getattr(settings, name) for name in names if getattr(settings, name) != _free(settings, name)}
        if pinned:
            free = {name: _free(settings, name) for name in pinned}
            shown = ", ".join(f"{group}.{name}={value}" for name, value in pinned.items())
            yield shown, replace(config, **{group: replace(settings, **free)})


def _free(settings: object, name: str) -> object:
    """Returns the value of a setting that leaves it to the planner: its default."""
    fields = dataclasses.fields(settings)  # type: ignore[arg-type]
    return next(field.default for field in fields if field.name == name)
