"""How the layers of a model fall on virtual stages, and the numbers that divide them."""

import math


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


def divisors(value: int) -> list[int]:
    """Returns the whole numbers that divide `value`, rising."""
    small = [count for count in range(1, math.isqrt(value) + 1) if value % count == 0]
    return small + [value // count for count in reversed(small) if count * count != value]
