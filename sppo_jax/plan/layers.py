"""How the layers of a model fall on virtual stages, and how many a virtual stage needs."""

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sppo_jax.plan.plan import StashPlan

# Layers of a virtual stage behind which copies can hide.
MIN_HOST_LAYERS = 2


def layers_per_virtual_stage(num_layers: int, pipe: int, interleave: int) -> int:
    """Returns the layers of a virtual stage.

    Raises:
        ValueError: there are more virtual stages than layers, or layers do not divide evenly.
    """
    stages = pipe * interleave
    what = f"mesh.pipe * schedule.interleave = {pipe} * {interleave} = {stages}"
    if stages > num_layers:
        raise ValueError(
            f"each virtual stage must have at least one layer, got {num_layers} layers for {what} virtual stages; "
            f"use at most {num_layers} virtual stages"
        )
    if num_layers % stages:
        below = max(count for count in divisors(num_layers) if count < stages)
        above = min(count for count in divisors(num_layers) if count > stages)
        layers = num_layers // stages * stages
        raise ValueError(
            f"model.num_layers must be a multiple of {what}, got {num_layers}; "
            f"use {below} or {above} virtual stages, or {layers} or {layers + stages} layers"
        )
    return num_layers // stages


def check_host_layers(stash: "StashPlan", layers: int) -> None:
    """Checks that a virtual stage has the layers behind which copies hide, if anything goes to the host.

    Raises:
        ValueError: it has fewer.
    """
    shared = max(stash.alpha) > 0 and "host" in (stash.inputs, stash.attention)
    if (shared or stash.rest == "host") and layers < MIN_HOST_LAYERS:
        raise ValueError(too_few_layers(layers))


def too_few_layers(layers: int) -> str:
    """Returns the error of a virtual stage with too few layers to hide copies behind."""
    return (
        f"a stash on the host must have at least {MIN_HOST_LAYERS} layers a virtual stage to hide its copies, "
        f"got {layers}; lower mesh.pipe or schedule.interleave, or use stash keep"
    )


def divisors(value: int) -> list[int]:
    """Returns the whole numbers that divide `value`, rising."""
    small = [count for count in range(1, math.isqrt(value) + 1) if value % count == 0]
    return small + [value // count for count in reversed(small) if count * count != value]
