"""What a search tries before layouts: an order of layers and chunks; where weights, chunks and optimizer wait."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Way:
    """What a plan does where the config leaves it open.

    Args:
        breadth_first: whether the schedule is breadth-first; else it is any of the others.
        weights: what a device holds of its stage's layers in a breadth-first schedule, "gathered" or "resident".
        waiting: where chunks wait between two groups of layers, "keep" or "host".
        optimizer: where parameters and moments wait, "device" or "host".
    """

    breadth_first: bool = False
    weights: str = "gathered"
    waiting: str = "keep"
    optimizer: str = "device"
