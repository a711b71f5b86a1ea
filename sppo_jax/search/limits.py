"""The two questions before a launch: the longest sequence that fits a cluster, the smallest cluster for a length."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from sppo_jax.config import Config
from sppo_jax.hardware import Cluster
from sppo_jax.search.request import resolve_cluster
from sppo_jax.search.search import Found, search

# Of the longest sequence: how exactly it is found.
_LENGTH_PARTS = 16
_MOST_TOKENS = 2**30
_MOST_HOSTS = 128


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One search of several.

    Args:
        size: tokens of the sequence, or devices.
        name: the size in words: the same, or the cluster.
        found: what the search found; None: the settings allow no plan of this size.
        problem: empty if a plan fits, else what stops it.
    """

    size: int
    name: str
    found: Found | None
    problem: str


@dataclass(frozen=True, kw_only=True)
class Bound:
    """The size at which plans begin or cease to fit.

    Args:
        best: the longest sequence or the smallest cluster that fits; None: nothing that was tried does.
        stopped: the nearest beyond it for which there is a plan, which does not fit; None: none was searched.
        tried: all searches, in their order.
        seconds: seconds that they took.
    """

    best: Trial | None
    stopped: Trial | None
    tried: tuple[Trial, ...]
    seconds: float


class _Trials:
    """Searches at several sizes, each once, for so many seconds."""

    def __init__(self, run: Callable[[int], Trial], budget_s: float, known: dict[int, Trial]) -> None:
        self.run, self.known = run, known
        self.start_s, self.budget_s = time.perf_counter(), budget_s

    def fits(self, size: int) -> bool:
        if size not in self.known:
            self.known[size] = self.run(size)
        return not self.known[size].problem

    def seconds(self) -> float:
        return time.perf_counter() - self.start_s

    def in_time(self) -> bool:
        return self.seconds() < self.budget_s

    def bound(self, best: int | None, stopped: int | None) -> Bound:
        known = self.known
        return Bound(
            best=None if best is None else known[best],
            stopped=None if stopped is None else known.get(stopped),
            tried=tuple(known.values()),
            seconds=self.seconds(),
        )


def max_length(
    config: Config, cluster: Cluster | None = None, *, found: Found | None = None, budget_s: float = 30.0
) -> Bound:
    """Finds the longest sequence that fits: by doubling from the config's length, then by halving the interval.

    What fits is taken to fit at every shorter length, which holds as far as lengths divide alike; the answer is exact
    to a sixteenth of it, or less so where time runs out: `stopped` says how much more does not fit.

    Args:
        config: the settings; all that is "auto" is searched again for every length.
        cluster: the devices, as in `search`.
        found: what `search` found for the config as it is, if known.
        budget_s: seconds after which the answer is not refined further.

    Raises:
        ValueError: a setting pins the length.
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

    def run(tokens: int) -> Trial:
        longer = replace(config, sequence=replace(config.sequence, length=tokens))
        return _trial(tokens, f"{tokens:,}", lambda: search(longer, cluster))

    length = config.sequence.length
    first = _trial(length, f"{length:,}", lambda: found or search(config, cluster), refuse=True)
    trials = _Trials(run, budget_s, {length: first})
    low, high = _bracket(trials, length, _MOST_TOKENS)
    if low is None or high is None:
        return trials.bound(low, high)
    # Lengths that suit every mesh of these devices; no finer than the answer is wanted.
    resolved = resolve_cluster(config, cluster)
    unit = resolved.num_devices * resolved.device.tile
    step = max(unit, low // _LENGTH_PARTS // unit * unit)
    while high - low > step and trials.in_time():
        middle = low + max(1, (high - low) // step // 2) * step
        low, high = (middle, high) if trials.fits(middle) else (low, middle)
    return trials.bound(low, high)


def min_devices(
    config: Config, cluster: Cluster | None = None, *, found: Found | None = None, budget_s: float = 30.0
) -> Bound:
    """Finds the smallest cluster that a plan fits: 1, 2, 4, ... devices of one host, then whole hosts.

    Sizes are halved or doubled from the given cluster on, up to 128 hosts; between the last two, numbers of hosts are
    tried by halving the interval. A host of fewer devices keeps all of its memory.

    Args:
        config: the settings; all that is "auto" is searched again for every size.
        cluster: the kind of devices and hosts to start from, as in `search`.
        found: what `search` found for the config as it is, if known.
        budget_s: seconds after which the answer is not refined further.

    Raises:
        ValueError: the settings pin the number of devices.
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

    def run(size: int) -> Trial:
        smaller = replace(base, num_hosts=max(1, size // per_host), devices_per_host=min(size, per_host), topology=())
        if size % given:
            shown = " * ".join(f"mesh.{name}={value}" for name, value in pinned.items())
            return Trial(size=size, name=smaller.name, found=None, problem=f"{shown} does not divide {size} devices")
        return _trial(size, smaller.name, lambda: search(config, smaller))

    sizes = list(_sizes(per_host))
    start = max((size for size in sizes if size <= base.num_devices), default=sizes[0])
    trials = _Trials(run, budget_s, {})
    if found is not None and start == base.num_devices and base.devices_per_host == min(start, per_host):
        trials.known[start] = _trial(start, base.name, lambda: found)
    low, high = _least(trials, sizes, sizes.index(start))
    if low is None or high is None:
        return trials.bound(high, low)
    while high - low > per_host and trials.in_time():
        middle = low + (high - low) // per_host // 2 * per_host
        low, high = (low, middle) if trials.fits(middle) else (middle, high)
    # Most numbers of hosts suit no mesh: what says more is the nearest that does, and is too small.
    smaller = [size for size, trial in trials.known.items() if size < high and trial.found is not None]
    return trials.bound(high, max(smaller, default=low))


def _trial(size: int, name: str, run: Callable[[], Found], *, refuse: bool = False) -> Trial:
    """Returns one search; settings that allow no plan of its size count as not fitting, unless they are refused."""
    try:
        found = run()
    except ValueError as error:
        if refuse:
            raise
        return Trial(size=size, name=name, found=None, problem=str(error))
    return Trial(size=size, name=name, found=found, problem=found.problem)


def _bracket(trials: _Trials, size: int, most: int) -> tuple[int | None, int | None]:
    """Returns the largest size that fits and the smallest that does not, a factor of two apart."""
    if trials.fits(size):
        while 2 * size <= most:
            if not trials.fits(2 * size):
                return size, 2 * size
            size *= 2
        return size, None
    while size > 1:
        if trials.fits(size // 2):
            return size // 2, size
        if trials.known[size // 2].found is None:
            # Too short for the settings: nothing shorter can be planned.
            break
        size //= 2
    return None, size


def _sizes(per_host: int) -> Iterator[int]:
    size = 1
    while size < per_host:
        yield size
        size *= 2
    hosts = 1
    while hosts <= _MOST_HOSTS:
        yield hosts * per_host
        hosts *= 2


def _least(trials: _Trials, sizes: list[int], index: int) -> tuple[int | None, int | None]:
    """Returns the largest size that does not fit and the smallest that does, neighbours in `sizes`."""
    if trials.fits(sizes[index]):
        while index and trials.fits(sizes[index - 1]):
            index -= 1
        return (sizes[index - 1] if index else None), sizes[index]
    while index + 1 < len(sizes):
        index += 1
        if trials.fits(sizes[index]):
            return sizes[index - 1], sizes[index]
    return sizes[index], None
