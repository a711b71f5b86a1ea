"""The smallest change of a config with which its plan fits, if the compiler says that the plan does not fit."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from sppo_jax.config import Config
from sppo_jax.files.format_bytes import format_bytes
from sppo_jax.hardware import Cluster
from sppo_jax.hardware.capacity import spare_share
from sppo_jax.search.search import search

_MESH = ("mesh.data", "mesh.pipe", "mesh.seq", "mesh.weights", "optimizer.place")
_TICKS = ("sequence.chunks", "sequence.split", "schedule.name", "schedule.interleave", "schedule.wave")
_STASH = tuple(f"stash.{name}" for name in ("inputs", "attention", "rest", "alpha", "kv_grad_dtype", "kv", "waiting"))
_LENGTH_STEPS = 8


@dataclass(frozen=True, kw_only=True)
class Change:
    """Overrides to add to the command, and the planner's figures with these overrides."""

    overrides: tuple[str, ...]
    hbm_bytes: int
    host_bytes: int

    def describe(self) -> str:
        """Returns the change as one line."""
        sizes = f"{format_bytes(self.hbm_bytes)} of HBM and {format_bytes(self.host_bytes)} of host memory per device"
        return f"the nearest change that fits: {' '.join(self.overrides)} (predicted {sizes})"


def nearest_change(
    reload: Callable[[tuple[str, ...]], Config], config: Config, cluster: Cluster, excess: float
) -> Change | None:
    """Tries changes from the smallest to the largest; returns the first whose plan fits, None if none fits.

    Args:
        reload: reads the config again with more overrides.
        config: the config that does not fit.
        cluster: the devices on which the config does not fit.
        excess: the compiler's bytes divided by the predicted bytes; if this exceeds what plans leave free, devices
            count as smaller.
    """
    excess *= 1 - spare_share(cluster)
    smaller = () if excess <= 1 else (f"hardware.hbm_bytes={int(cluster.device.hbm_bytes / excess)}",)
    for change in _changes(config, cluster):
        overrides = (*change, *smaller)
        try:
            found = search(reload(overrides))
        except ValueError:
            continue  # a change that the other settings do not allow
        if found.fits:
            predicted = found.plan.predicted
            return Change(overrides=overrides, hbm_bytes=max(predicted.hbm_bytes), host_bytes=max(predicted.host_bytes))
    return None


def _changes(config: Config, cluster: Cluster) -> Iterator[tuple[str, ...]]:
    stash, free = _unpin(config, _STASH), _unpin(config, (*_STASH, *_MESH, *_TICKS))
    if config.stash.kv_grad_dtype == "float32":
        yield ("stash.kv_grad_dtype=bfloat16",)
    for unpinned in (stash, free):
        if unpinned:
            yield unpinned
    for step in range(_LENGTH_STEPS - 1, _LENGTH_STEPS // 2, -1):
        yield (*free, _shorter(config, cluster, step))
    if not cluster.topology:
        for times in (2, 4, 8):
            shape = f"{cluster.num_hosts * times}x{cluster.devices_per_host}"
            yield (*free, f"hardware.cluster={cluster.device.name}:{shape}")
    for step in range(_LENGTH_STEPS // 2, 0, -1):
        yield (*free, _shorter(config, cluster, step))


def _shorter(config: Config, cluster: Cluster, step: int) -> str:
    """Returns an override with a shorter length, one that every mesh of the devices divides if it is long enough."""
    length, unit = config.sequence.length * step // _LENGTH_STEPS, cluster.num_devices * cluster.device.tile
    return f"sequence.length={length // unit * unit or length}"


def _unpin(config: Config, names: tuple[str, ...]) -> tuple[str, ...]:
    """Returns overrides that leave the given settings to the planner."""
    pinned = []
    for name in names:
        section, _, field = name.partition(".")
        given = getattr(getattr(config, section), field)
        if given != "auto":
            pinned.append(f"{name}=auto")
    return tuple(pinned)
