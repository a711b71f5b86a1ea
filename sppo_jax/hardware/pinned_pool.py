"""A replay of XLA's pool of pinned host memory: which regions it registers, and which it cannot have.

A GPU's host arrays come from one pool a device, `tsl::BFCAllocator` as `GetGpuHostAllocator` makes it (read in the
sources of XLA of 2026-11; no jax here, nothing is allocated). The pool registers a whole region at a time, and every
page of a region is taken:

* a request that no free chunk holds needs a new region. Regions have the size of a power of two, at least 2 MiB, that
  holds the request; each region that did not have to grow doubles the next one;
* the pool's limit cuts a region short, and fails a request that is larger than what is left;
* where a registration fails, the pool tries 0.9 of its size, again and again, as long as the request fits;
* drivers from r580 on refuse to register 2^39 bytes or more in one call, whatever memory is free;
* a request takes the smallest free chunk that holds it. The rest of the chunk stays free where it is 128 MiB or more,
  or at least as large as the request. Freed neighbours within a region join. Regions never join and are never
  given back.
"""

from __future__ import annotations

import struct
from bisect import insort
from dataclasses import dataclass, field

# Drivers from this one on refuse to register so many bytes or more in one call.
FIRST_REFUSING_DRIVER = 580
REFUSED_BYTES = 2**39

_UNIT = 256
_FIRST_REGION_BYTES = 2 * 2**20
_SPLIT_BYTES = 128 * 2**20


def _float32(value: float) -> float:
    return struct.unpack("f", struct.pack("f", value))[0]


_NEXT_TRY = _float32(0.9)


def rounded(num_bytes: int) -> int:
    """Returns the bytes that the pool gives for a request: a multiple of 256."""
    return -(-num_bytes // _UNIT) * _UNIT


def next_try(num_bytes: int) -> int:
    """Returns the bytes that the pool tries to register after a failed registration; XLA computes them in float32."""
    return min(rounded(int(_float32(_float32(num_bytes) * _NEXT_TRY))), num_bytes - _UNIT)


@dataclass(eq=False)
class PoolPiece:
    """Neighbouring bytes of a region, free or given out.

    Args:
        num_bytes: size.
        place: number of the region, and the chunk's first byte in the region.
        before: the chunk before this one in the region.
        after: the chunk behind this one in the region.
        is_free: whether the chunk may be given out.
    """

    num_bytes: int
    place: tuple[int, int]
    before: PoolPiece | None = None
    after: PoolPiece | None = None
    is_free: bool = True

    def __lt__(self, other: PoolPiece) -> bool:
        return (self.num_bytes, self.place) < (other.num_bytes, other.place)


@dataclass
class PinnedPool:
    """One device's pool.

    Args:
        limit_bytes: the pool's limit, of XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB.
        refused_bytes: a registration of so many bytes or more fails; None: none does.
        regions: bytes of each region, in the order in which they were registered.
    """

    limit_bytes: int
    refused_bytes: int | None = REFUSED_BYTES
    regions: list[int] = field(default_factory=list)
    _free: list[PoolPiece] = field(default_factory=list)
    _region_bytes: int = 0

    def __post_init__(self) -> None:
        self._region_bytes = rounded(min(self.limit_bytes, _FIRST_REGION_BYTES))

    @property
    def pinned_bytes(self) -> int:
        """Bytes of all regions."""
        return sum(self.regions)

    @property
    def free_bytes(self) -> tuple[int, ...]:
        """Bytes of each free chunk, smallest first."""
        return tuple(chunk.num_bytes for chunk in self._free)

    def fork(self, limit_bytes: int) -> PinnedPool:
        """Returns a pool in the same state with another limit, at least the pinned bytes; no chunk is given back."""
        pool = PinnedPool(limit_bytes, self.refused_bytes, list(self.regions))
        pool._region_bytes = self._region_bytes
        pool._free = [PoolPiece(chunk.num_bytes, chunk.place) for chunk in self._free]
        return pool

    def allocate(self, num_bytes: int) -> PoolPiece | None:
        """Returns the chunk that a request gets; None where XLA fails with RESOURCE_EXHAUSTED."""
        wanted = rounded(num_bytes)
        chunk = self._best_fit(wanted)
        if chunk is None and self._extend(wanted):
            chunk = self._best_fit(wanted)
        return chunk

    def free(self, chunk: PoolPiece) -> None:
        """Gives a chunk back; free neighbours join."""
        chunk.is_free = True
        for first, second in ((chunk.before, chunk), (chunk, chunk.after)):
            if first is not None and second is not None and first.is_free and second.is_free:
                chunk = self._join(first, second)
        insort(self._free, chunk)

    def _join(self, first: PoolPiece, second: PoolPiece) -> PoolPiece:
        self._free = [chunk for chunk in self._free if chunk is not first and chunk is not second]
        first.num_bytes += second.num_bytes
        first.after = second.after
        if second.after is not None:
            second.after.before = first
        return first

    def _best_fit(self, wanted: int) -> PoolPiece | None:
        chunk = next((chunk for chunk in self._free if chunk.num_bytes >= wanted), None)
        if chunk is None:
            return None
        self._free.remove(chunk)
        chunk.is_free = False
        rest = chunk.num_bytes - wanted
        if rest and (rest >= wanted or rest >= _SPLIT_BYTES):
            region, start = chunk.place
            behind = PoolPiece(rest, (region, start + wanted), before=chunk, after=chunk.after)
            if chunk.after is not None:
                chunk.after.before = behind
            chunk.num_bytes, chunk.after = wanted, behind
            insort(self._free, behind)
        return chunk

    def _extend(self, wanted: int) -> bool:
        """Registers a region for a request; returns whether there is one."""
        region_bytes = self._region_bytes
        while wanted > region_bytes:
            region_bytes *= 2
        region = self._registered(region_bytes)
        if not region or wanted > region:
            return False
        # A region that did not have to grow doubles the next one.
        self._region_bytes = region_bytes if region_bytes > self._region_bytes else 2 * region_bytes
        insort(self._free, PoolPiece(region, (len(self.regions), 0)))
        self.regions.append(region)
        return True

    def _registered(self, region_bytes: int) -> int:
        """Returns the bytes that are registered in the place of a region; 0 where the limit leaves none."""
        region = min(region_bytes, (self.limit_bytes - self.pinned_bytes) // _UNIT * _UNIT)
        while self.refused_bytes is not None and region >= self.refused_bytes:
            region = next_try(region)
        return region

    def largest_region_bytes(self) -> int:
        """Returns the bytes of the largest region that a request can make the pool register now; 0 for none."""
        region_bytes, largest = self._region_bytes, self._registered(self._region_bytes)
        while region_bytes < self.limit_bytes:
            region_bytes *= 2
            region = self._registered(region_bytes)
            if region > region_bytes // 2:  # else no request that it holds makes the pool ask for so much
                largest = max(largest, region)
        return largest
