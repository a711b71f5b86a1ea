"""What a breadth-first plan may do in more than one way: keys and values, waiting chunks, weights, optimizer.

Each way has a usual value. The search looks for the fastest plan with the usual values first, and then with others,
one change at a time, as far as the config leaves them open (`search.search`).
"""

from dataclasses import dataclass, replace

from sppo_jax.config import Config
from sppo_jax.plan.table import BREADTH_FIRST


@dataclass(frozen=True, kw_only=True)
class Dials:
    """What a breadth-first plan does where the config says "auto" and its chunks and places allow it.

    Args:
        kv: how keys and values reach the backward: "rebuild", "keep" or "host".
        waiting: where chunks wait between two groups of layers: "keep" or "host".
        weights: what a device holds of its stage's layers during a step: "gathered" or "resident".
        optimizer: where parameters and moments wait: "device" or "host".
    """

    kv: str = "rebuild"
    waiting: str = "keep"
    weights: str = "gathered"
    optimizer: str = "device"


def with_room_on_the_host(config: Config, dials: Dials) -> Dials | None:
    """Returns the dials with the waiting room on the host, for where nothing fits; None if the config decides."""
    return replace(dials, waiting="host") if config.stash.waiting == "auto" else None


def with_optimizer_on_the_host(config: Config, dials: Dials, platform: str) -> Dials | None:
    """Returns the dials with the optimizer on the host, for where nothing fits; None if config or devices decide."""
    asked = config.schedule.name not in ("auto", BREADTH_FIRST) or config.mesh.weights == "resident"
    # Where the schedule is open, keys and values that are kept leave breadth-first plans out.
    asked |= config.schedule.interleave == 1 or (config.schedule.name == "auto" and config.stash.kv == "keep")
    if config.optimizer.place != "auto" or asked or platform != "gpu":
        return None
    return replace(dials, optimizer="host")


def faster_ways(config: Config, dials: Dials) -> list[Dials]:
    """Returns other dials that may make a step shorter and take more memory, as far as the config leaves them open."""
    others = []
    if config.stash.kv == "auto":
        others += [replace(dials, kv=kv) for kv in ("keep", "host")]
    if config.mesh.weights == "auto" and "host" not in (config.optimizer.place, dials.optimizer):
        others.append(replace(dials, weights="resident"))
    return others
