"""Figures as people read them."""

import math

NOT_FINITE = "not finite"


def format_figure(value: float | None, form: str) -> str:
    """Returns a figure in a format such as ".4f"; "not finite" for what is not, and for its place in JSON, None."""
    return NOT_FINITE if value is None or not math.isfinite(value) else format(value, form)


def format_bytes(value: float) -> str:
    """Returns bytes in the largest binary unit that leaves a figure of at least 1: "1.5 GiB", "340 MiB"."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.0f} {units[0]}" if value >= 100 else f"{value:.3g} {units[0]}"
