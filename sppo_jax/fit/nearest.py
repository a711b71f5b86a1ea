"""The smallest change of a config under which its plan would fit, where the compiler says that it does not."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from sppo_jax.config import Config
from sppo_jax.hardware import Cluster
from sppo_jax.planner.search import Found, search
from sppo_jax.units import format_bytes

_AUTO = (
    "mesh.data",
    "mesh.pipe",
    "mesh.seq",
    "sequence.chunks",
    "sequence.kind",
    "schedule.name",
    "schedule.interleave",
)
_STASH = ("stash.inputs", "stash.attention", "stash.rest", "stash.alpha", "stash.kv_grad_dtype")
_LENGTH_STEPS = 8


@dataclass(frozen=True, kw_only=True)
class Change:
    """Overrides to add to the command, and the plan's figures under them, as predicted."""

    overrides: tuple[str, ...]
    hbm_bytes: int
    host_bytes: int

    def describe(self) -> str:
        """Return the change as one line."""
        sizes = f"{format_bytes(self.hbm_bytes)} of HBM and {format_bytes(self.host_bytes)} of host memory a device"
        return f"the nearest change that fits: {' '.join(self.overrides)} (predicted {sizes})"


def nearest_change(
    reload: Callable[[tuple[str, ...]], Config], config: Config, cluster: Cluster, excess: float
) -> Change | None:
    """Try changes from the smallest to the largest; return the first whose plan fits, None if none does.

    Args:
        reload: reads the config anew with more overrides.
        config: the config that does not fit.
        cluster: the devices it does not fit on.
        excess: the compiler's bytes over the predicted ones, a factor that is put on every prediction.
    """
    for overrides in _changes(config, cluster):
        try:
            found = search(reload(overrides))
        except ValueError:
            continue  # a change that the other settings do not allow
        if found.fits and _hbm_bytes(found) * max(1.0, excess) <= cluster.device.hbm_bytes:
            return Change(
                overrides=overrides, hbm_bytes=_hbm_bytes(found), host_bytes=max(found.plan.predicted.host_bytes)
            )
    return None


def _hbm_bytes(found: Found) -> int:
    return max(found.plan.predicted.hbm_bytes)


def _changes(config: Config, cluster: Cluster) -> Iterator[tuple[str, ...]]:
    stash, free = _unpin(config, _STASH), _unpin(config, (*_STASH, *_MESH, *_TICKS))
    if config.stash.kv_grad_dtype == "float32":
        yield ("stash.kv_grad_dtype=bfloat16",)
    for unpinned in (stash, free):
        if unpinned:
            yield unpinned
    for step in range(_LENGTH_STEPS - 1, _LENGTH_STEPS // 2, -1):
        yield (*free, f"sequence.length={config.sequence.length * step // _LENGTH_STEPS}")
    if not cluster.topology:
        for times in (2, 4, 8):
            shape = f"{cluster.num_hosts * times}x{cluster.devices_per_host}"
            yield (*free, f"hardware.cluster={cluster.device.name}:{shape}")
    for step in range(_LENGTH_STEPS // 2, 0, -1):
        yield (*free, f"sequence.length={config.sequence.length * step // _LENGTH_STEPS}")


def _unpin(config: Config, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return overrides that leave settings to the planner, of those that are not."""
    pinned = []
    for name in names:
        group, _, field = name.partition(".")
        given = getattr(getattr(config, group), field)
        if given != "auto":
            pinned.append(f"{name}=auto")
    return tuple(pinned)
