"""Part `copies`: copies to the host and back, alone, at once and beside products: loops of the GPUs' part `health`."""

from __future__ import annotations

from bench.gpu_parts.case import Case
from bench.gpu_parts.health import FILL, programs, run

__all__ = ["cases", "programs", "run"]
_LOOPS = [FILL, "products", "copy back", "copy both ways", "products, copy both ways"]


def cases(*, tiny: bool) -> list[Case]:
    """List the case."""
    settings = {"squares": [8192], "side": 8192, "turns": 16, "num_products": 3, "run_s": 0.3, "loops": _LOOPS}
    if tiny:
        settings |= {"squares": [64], "side": 64, "turns": 4, "run_s": 0.001, "loops": [FILL, _LOOPS[-1]]}
    return [
        Case(
            part="copies",
            name="host copies",
            settings=settings,
            expected_s=10 if tiny else 90,
            limit_s=400,
            folder="tpu_parts",
        )
    ]
