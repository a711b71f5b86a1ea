"""The two questions before a launch: the longest sequence that fits a cluster, the smallest cluster for a length."""

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from sppo_jax.config import Config
from sppo_jax.hardware import Cluster
from sppo_jax.hardware.sizes import doubled_sizes, every_size, resized
from sppo_jax.search.collector import without_collector
from sppo_jax.search.feasible import Feasibility, Form
from sppo_jax.search.search import Found, search
from sppo_jax.search.space.request import resolve_cluster

# Of the longest sequence: how exactly it is found.
_LENGTH_PARTS = 16
_MOST_TOKENS = 2**30
# Why the plan that is least too large does not fit is worked out for one size alone.
_TOO_LARGE = "no plan fits"


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One size of several.

    Args:
        size: tokens of the sequence, or devices.
        name: the size in words: the same, or the cluster.
        found: what the search found; None where the fastest plan was not searched.
        problem: empty if a plan fits, else what stops it.
        is_possible: whether the settings allow a plan of this size.
    """

    size: int
    name: str
    found: Found | None
    problem: str
    is_possible: bool = True


@dataclass(frozen=True, kw_only=True)
class Bound:
    """The size at which plans begin or cease to fit.

    Args:
        best: the longest sequence or the smallest cluster that fits; None: nothing that was tried does.
        stopped: the nearest beyond it for which there is a plan, which does not fit; None: none was searched.
        tried: all sizes, in their order.
        seconds: seconds that they took.
    """

    best: Trial | None
    stopped: Trial | None
    tried: tuple[Trial, ...]
    seconds: float


class _Trials:
    """Sizes, each asked once whether a plan fits; the fastest plan is searched at the answer alone."""

    def __init__(self, name: Callable[[int], str], ask: Callable[[int], tuple[Config, Cluster | None]]) -> None:
        """Starts without trials.

        Args:
            name: the size in words.
            ask: the settings and devices of a size.
        """
        self.name, self.ask = name, ask
        self.known: dict[int, Trial] = {}
        self.too_large: dict[int, Feasibility] = {}
        self.forms: tuple[Form, ...] = ()
        self.start_s = time.perf_counter()

    def start(self, size: int, found: Found) -> None:
        """Begins with the fastest plan of a size."""
        self.known[size] = Trial(size=size, name=self.name(size), found=found, problem=found.problem)

    def possible(self, sizes: Iterable[int]) -> int:
        """Returns the first size that the settings allow.

        Raises:
            ValueError: they allow none; why, and what to change, for the first size.
        """
        problem = ""
        for size in sizes:
            fits = self.fits(size)
            if fits or self.known[size].is_possible:
                return size
            problem = problem or self.known[size].problem
        raise ValueError(problem)

    def fits(self, size: int) -> bool:
        """Returns whether a plan of a size fits."""
        if size not in self.known:
            self.known[size] = self._trial(size)
        return not self.known[size].problem

    def settles(self, size: int) -> bool:
        """Searches the fastest plan of a size that fits; returns whether a run gets the memory of that plan too."""
        if self.known[size].found is None:
            found = search(*self.ask(size))
            self.known[size] = replace(self.known[size], found=found, problem=found.problem)
        return not self.known[size].problem

    def bound(self, best: int | None, stopped: int | None) -> Bound:
        known = self.known
        if stopped in self.too_large:
            known[stopped] = replace(known[stopped], problem=self.too_large[stopped].problem())
        return Bound(
            best=None if best is None else known[best],
            stopped=None if stopped is None else known.get(stopped),
            tried=tuple(known.values()),
            seconds=time.perf_counter() - self.start_s,
        )

    def _trial(self, size: int) -> Trial:
        try:
            config, cluster = self.ask(size)
            if config.planner == "paper":
                found = search(config, cluster)
                return Trial(size=size, name=self.name(size), found=found, problem=found.problem)
            asked = Feasibility(config, cluster, self.forms)
        except ValueError as error:
            return Trial(size=size, name=self.name(size), found=None, problem=str(error), is_possible=False)
        if asked.found is None:
            self.too_large[size] = asked
            return Trial(size=size, name=self.name(size), found=None, problem=_TOO_LARGE)
        self.forms = asked.forms
        return Trial(size=size, name=self.name(size), found=None, problem="")


@without_collector()
def max_length(config: Config, cluster: Cluster | None = None, *, found: Found | None = None) -> Bound:
    """Finds the longest sequence that fits: by doubling near the config's length, then by halving the interval.

    Only lengths that suit every mesh of the devices are tried, whether or not the config's length does. What fits is
    taken to fit at every shorter length. The answer is exact to a sixteenth of it, and `stopped` says how much more
    does not fit. Only the answer's fastest plan is searched.

    Args:
        config: the settings; all that is "auto" is open again for every length.
        cluster: the devices, as in `search`.
        found: what `search` found for the config as it is, if known.

    Raises:
        ValueError: a setting pins the length, or there is no plan of any length.
    """
    for name, value in (("sequence.chunks", config.sequence.chunks), ("stash.alpha", config.stash.alpha)):
        if isinstance(value, tuple):
            raise ValueError(
                f"{name} must be auto or one number for --max-length, got a list of {len(value)}; set {name}=auto"
            )
    if config.schedule.table is not None:
        raise ValueError(
            "schedule.name must be the name of a schedule for --max-length, got schedule.table, which fixes the "
            "length; set "
            "schedule.name"
        )

    def ask(tokens: int) -> tuple[Config, Cluster | None]:
        return replace(config, sequence=replace(config.sequence, length=tokens)), cluster

    resolved = resolve_cluster(config, cluster)
    unit = math.lcm(resolved.num_devices, config.mesh.pinned.get("seq", 1)) * resolved.device.tile
    start = unit * 2 ** max(0, round(math.log2(config.sequence.length / unit)))
    trials = _Trials(lambda tokens: f"{tokens:,}", ask)
    if found is not None and start == config.sequence.length:
        trials.start(start, found)
    start = trials.possible([start, *_doubled(start, _MOST_TOKENS), *_halved(start, unit)])
    low, high = _bracket(trials, start, unit, _MOST_TOKENS)
    if low is None:
        return trials.bound(low, high)
    # No finer than the answer is wanted.
    step = max(unit, low // _LENGTH_PARTS // unit * unit)
    while high is not None and high - low > step:
        middle = low + max(1, (high - low) // step // 2) * step
        low, high = (middle, high) if trials.fits(middle) else (low, middle)
    while low > 0 and not (trials.fits(low) and trials.settles(low)):
        low, high = low - step, low
    return trials.bound(low if low > 0 else None, high)


@without_collector()
def min_devices(config: Config, cluster: Cluster | None = None, *, found: Found | None = None) -> Bound:
    """Finds the smallest cluster that a plan fits: 1, 2, 4, ... devices of one host, then whole hosts.

    Sizes are halved or doubled from the given cluster on, up to 128 hosts, and those without a mesh are passed over;
    between the last two, numbers of hosts are tried by halving the interval. Slices of TPUs have the shapes that exist.
    A host of fewer devices keeps all of its memory.

    Args:
        config: the settings; all that is "auto" is open again for every size.
        cluster: the kind of devices and hosts to start from, as in `search`.
        found: what `search` found for the config as it is, if known.

    Raises:
        ValueError: the settings pin the number of devices, or no size has a mesh.
    """
    pinned = config.mesh.pinned
    if len(pinned) == 3:
        raise ValueError(
            f"one axis of the mesh must be auto for --min-devices, got mesh.data={pinned['data']}, "
            f"mesh.pipe={pinned['pipe']}, mesh.seq={pinned['seq']}; set one axis to auto"
        )
    base = resolve_cluster(config, cluster)
    per_host = base.devices_per_host if base.num_hosts > 1 else base.device.devices_per_host
    given = math.prod(pinned.values())

    def devices(size: int) -> Cluster:
        if base.device.platform == "tpu":
            return resized(base, size) or base
        return replace(base, num_hosts=max(1, size // per_host), devices_per_host=min(size, per_host), topology=())

    def ask(size: int) -> tuple[Config, Cluster]:
        if size % given:
            shown = " * ".join(f"mesh.{name}={value}" for name, value in pinned.items())
            raise ValueError(f"{shown} does not divide {size} devices")
        return config, devices(size)

    sizes = doubled_sizes(base, per_host, given)
    nearest = max((size for size in sizes if size <= base.num_devices), default=sizes[0])
    trials = _Trials(lambda size: devices(size).name, ask)
    if found is not None and devices(nearest) == base:
        trials.start(nearest, found)
    smaller = [size for size in reversed(sizes) if size < nearest]
    start = trials.possible([nearest, *smaller, *(size for size in sizes if size > nearest)])
    low, high = _least(trials, sizes, start)
    every = every_size(base, per_host)
    while between := _hosts_between(every, per_host, low, high):
        middle = between[(len(between) - 1) // 2]
        low, high = (low, middle) if trials.fits(middle) else (middle, high)
    larger = [size for size in sizes if high is not None and size > high]
    while high is not None and not (trials.fits(high) and trials.settles(high)):
        low, high = high, larger.pop(0) if larger else None
    # Most numbers of hosts suit no mesh: what says more is the nearest that does, and is too small.
    possible = [size for size, one in trials.known.items() if one.is_possible and (high is None or size < high)]
    return trials.bound(high, low if low is None else max(possible, default=low))


def _hosts_between(sizes: list[int], per_host: int, low: int | None, high: int | None) -> list[int]:
    """Returns the numbers of whole hosts between two, in devices; none where one of the two is less than a host."""
    if low is None or high is None or low < per_host:
        return []
    return [size for size in sizes if low < size < high]


def _doubled(size: int, most: int) -> list[int]:
    return [size * 2**power for power in range(1, (most // size).bit_length())]


def _halved(size: int, least: int) -> list[int]:
    return [size // 2**power for power in range(1, (size // least).bit_length())]


def _bracket(trials: _Trials, size: int, least: int, most: int) -> tuple[int | None, int | None]:
    """Returns the largest size that fits and the smallest that does not, a factor of two apart."""
    if trials.fits(size):
        for larger in _doubled(size, most):
            if not trials.fits(larger):
                return size, larger
            size = larger
        return size, None
    for smaller in _halved(size, least):
        if trials.fits(smaller):
            return smaller, size
        if not trials.known[smaller].is_possible:
            # Too short for the settings: nothing shorter can be planned.
            break
        size = smaller
    return None, size


def _least(trials: _Trials, sizes: list[int], start: int) -> tuple[int | None, int | None]:
    """Returns the largest size that does not fit and the smallest that does, neighbours among those with a mesh."""
    smaller = [size for size in reversed(sizes) if size < start]
    if trials.fits(start):
        without_mesh = None
        for size in smaller:
            if trials.fits(size):
                start = size
            elif trials.known[size].is_possible:
                return size, start
            else:
                without_mesh = size
        return without_mesh, start
    low = start
    for size in (size for size in sizes if size > start):
        if trials.fits(size):
            return low, size
        low = size
    return low, None
