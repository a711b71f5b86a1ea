"""The smallest limit of XLA's pool of pinned host memory with which a run gets all that it asks for.

A run fills the pool to its limit before anything else, region by region, each as large as the pool can make it
(`processes.host_pool`). So nothing is lost to powers of two, and nothing is pinned later. A pool below 512 GiB is one
region, which holds the state, the stash and a save's copy in any order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from sppo_jax.hardware.pinned_pool import PinnedPool, rounded
from sppo_jax.plan.host_arrays import HostArrays
from sppo_jax.plan.plan import Plan

GIB, MIB = 2**30, 2**20
# No limit is tried that is larger than the bytes by more than this.
MOST_WASTE = 1.1
# A line of the stash is cut at multiples of 512 bytes: a piece may be larger than its share by this part of the stash.
_SLACK_SHARE = 1 / 4096


@dataclass(frozen=True, kw_only=True)
class Requests:
    """What a run asks of one device's pool, in bytes.

    Args:
        state: arrays of the state that wait on the host, in the order in which a run makes them; they stay.
        stash: arrays of the stash that are made before the first step, in order; they stay.
        temporaries: allocations of the step's program in the order in which XLA makes them; free between steps.
        save: arrays of the copy that an asynchronous save writes while steps go on.
        passing: the largest array that a blocking save copies between two steps; 0 for none.
    """

    state: tuple[int, ...] = ()
    stash: tuple[int, ...] = ()
    temporaries: tuple[int, ...] = ()
    save: tuple[int, ...] = ()
    passing: int = 0

    @property
    def least_bytes(self) -> int:
        """Bytes that are held at once: no pool can do with less."""
        return sum(map(rounded, (*self.state, *self.stash, *self.temporaries, *self.save)))


@lru_cache(maxsize=1024)
def _filled(limit_gib: int, refused_bytes: int | None) -> PinnedPool:
    """Returns a pool that is filled to its limit, with nothing given out."""
    pool = PinnedPool(limit_gib * GIB, refused_bytes)
    chunks = []
    while region := pool.largest_region_bytes():
        chunks.append(pool.allocate(region))
    for chunk in chunks:
        assert chunk is not None  # the region was there for it
        pool.free(chunk)
    return pool


def regions(limit_gib: int, refused_bytes: int | None) -> tuple[int, ...]:
    """Returns the bytes of the regions of a pool that a run fills.

    Args:
        limit_gib: the pool's limit.
        refused_bytes: a registration of so many bytes or more fails; None: none does.
    """
    return tuple(_filled(limit_gib, refused_bytes).regions)


def fill_requests(limit_gib: int, refused_bytes: int | None) -> tuple[int, ...]:
    """Returns the requests, in bytes, with which a run fills a pool: each makes a region, and is whole MiB of it.

    Args:
        limit_gib: the pool's limit.
        refused_bytes: a registration of so many bytes or more fails; None: none does.
    """
    return tuple(region // MIB * MIB for region in regions(limit_gib, refused_bytes) if region >= MIB)


def requests_of(arrays: HostArrays, host_bytes: int, host_pieces: tuple[int, ...], saves: str) -> Requests:
    """Returns what a run asks of the pool of a device.

    Args:
        arrays: of the plan.
        host_bytes: of a device on the host, in a step.
        host_pieces: of the plan.
        saves: of the plan, "async" or "blocking".
    """
    pieces, temporaries = arrays.of_step(host_bytes, host_pieces)
    slack = int(arrays.stash_bytes * _SLACK_SHARE)
    return Requests(
        state=arrays.state,
        stash=tuple(size + slack for size in pieces),
        temporaries=temporaries,
        save=arrays.save if saves == "async" else (),
        passing=max(arrays.save, default=0) if saves == "blocking" else 0,
    )


def limit_of(plan: Plan, refused_bytes: int | None) -> int | None:
    """Returns the smallest limit in GiB with which a plan runs, 0 where it pins nothing, None where there is none.

    Args:
        plan: the plan.
        refused_bytes: a registration of so many bytes or more fails; None: none does.
    """
    host_bytes = max(plan.predicted.host_bytes)
    if not host_bytes:
        return 0
    requests = requests_of(plan.host_arrays, host_bytes, plan.host_pieces, plan.saves)
    return smallest_limit(requests, int(requests.least_bytes * MOST_WASTE) // GIB + 1, refused_bytes)


def pinned_with(plan: Plan, limit_gib: int, filled_gib: int, refused_bytes: int | None) -> int:
    """Returns the bytes that a device's pool pins for a plan with another limit than the plan's; 0 if a request fails.

    Args:
        plan: the plan.
        limit_gib: the pool's limit.
        filled_gib: the limit to which the run fills the pool.
        refused_bytes: a registration of so many bytes or more fails; None: none does.
    """
    requests = requests_of(plan.host_arrays, max(plan.predicted.host_bytes), plan.host_pieces, plan.saves)
    return holds(requests, limit_gib, refused_bytes, fill_requests(filled_gib, refused_bytes))


def holds(requests: Requests, limit_gib: int, refused_bytes: int | None, given: tuple[int, ...] | None = None) -> int:
    """Returns the bytes that one device's pool pins in a run; 0 where a request fails.

    The pool is filled; then come the state, the stash, a step, a save, and steps beside it. A restored state is made in
    any order, so several orders are tried, and the largest figure counts.

    Args:
        requests: what the run asks for.
        limit_gib: the pool's limit.
        refused_bytes: a registration of so many bytes or more fails; None: none does.
        given: the requests with which the run fills the pool, where they were chosen for another limit or driver.
    """
    most = 0
    for state in _orders(requests.state):
        if given is None:
            pool = _filled(limit_gib, refused_bytes).fork(limit_gib * GIB)
        else:
            pool = PinnedPool(limit_gib * GIB, refused_bytes)
            if not _passes(pool, given, stays=False):
                return 0
        done = (
            _passes(pool, state)
            and _passes(pool, requests.stash)
            and _passes(pool, requests.temporaries, stays=False)
            and _passes(pool, (requests.passing,) if requests.passing else (), stays=False)
            and _passes(pool, requests.save)
            and _passes(pool, requests.temporaries)
        )
        if not done:
            return 0
        most = max(most, pool.pinned_bytes)
    return most


def _passes(pool: PinnedPool, sizes: tuple[int, ...], stays: bool = True) -> bool:
    """Asks for arrays, and gives them back unless they stay; returns whether the pool had all of them."""
    chunks = []
    for size in sizes:
        chunk = pool.allocate(size)
        if chunk is None:
            return False
        chunks.append(chunk)
    for chunk in () if stays else chunks:
        pool.free(chunk)
    return True


def _orders(state: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yields orders of a state: the run's own, largest first, smallest first."""
    yield state
    if len(set(state)) > 1:
        yield tuple(sorted(state, reverse=True))
        yield tuple(sorted(state))


@lru_cache(maxsize=4096)
def smallest_limit(requests: Requests, most_gib: int, refused_bytes: int | None) -> int | None:
    """Returns the smallest limit in GiB with which a run gets all that it asks for; None where there is none.

    The run pins so much, as it fills the pool; so of all limits this one pins least.

    Args:
        requests: what the run asks for.
        most_gib: the largest limit to try.
        refused_bytes: a registration of so many bytes or more fails; None: none does.
    """
    sizes = (*requests.state, *requests.stash, *requests.temporaries, *requests.save)
    if refused_bytes is not None and max(sizes, default=0) >= refused_bytes:
        return None
    for gib in range(max(1, -(-requests.least_bytes // GIB)), most_gib + 1):
        if holds(requests, gib, refused_bytes):
            return gib
    return None
