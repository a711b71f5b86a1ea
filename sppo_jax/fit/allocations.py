"""The host allocations of a compiled program, read from what XLA dumps of its buffers, and whether a pool has them.

The text of a program does not say: XLA puts all host temporaries into one allocation. Each argument is one of its own.
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path

from sppo_jax.files.format_bytes import format_bytes
from sppo_jax.hardware import Cluster, most_pinned_bytes
from sppo_jax.hardware.machine import refused_bytes
from sppo_jax.hardware.pinned_limit import GIB, MOST_WASTE, limit_of, requests_of, smallest_limit
from sppo_jax.plan.plan import Plan

_ASSIGNMENT = "*buffer-assignment.txt"
# XLA's number of pinned host memory.
_HOST = 5
_ALLOCATION = re.compile(r"^allocation \d+: size (\d+),(?: color (\d+),)?(.*)$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class HostAllocations:
    """Bytes of a program's allocations in pinned host memory, in the order in which XLA makes them.

    Args:
        arguments: those that the program is given: the state, and a stash in pieces.
        temporaries: those that it makes.
        limit_gib: the smallest limit of the pool with which a run has them all; None where there is none.
        planned_gib: the limit that a run gets.
        most_gib: the largest limit that the hosts allow; None: not asked.
    """

    arguments: tuple[int, ...]
    temporaries: tuple[int, ...]
    limit_gib: int | None
    planned_gib: int | None
    most_gib: int | None = None

    @property
    def largest_bytes(self) -> int:
        """Bytes of the largest of them."""
        return max((*self.arguments, *self.temporaries), default=0)

    @property
    def problem(self) -> str:
        """Why a run does not get these allocations; empty where it does."""
        if self.limit_gib is not None and self.planned_gib is not None and self.limit_gib <= self.planned_gib:
            if self.most_gib is None or self.planned_gib <= self.most_gib:
                return ""
            return f"{self.planned_gib} GiB of pinned memory per device, of which its host allows {self.most_gib}"
        largest = f"an allocation of {format_bytes(self.largest_bytes)} on the host"
        if self.limit_gib is None or self.planned_gib is None:
            return f"{largest}, for which XLA's pool of pinned memory has no region"
        more = f"{self.limit_gib} GiB of pinned memory per device, {self.planned_gib} planned"
        return f"{largest}, with which the program takes {more}"

    def to_dict(self) -> dict[str, int | None]:
        """Returns the figures as JSON values."""
        return {
            "largest_bytes": self.largest_bytes,
            "number": len(self.arguments) + len(self.temporaries),
            "limit_gib": self.limit_gib,
        }

    def describe(self) -> str:
        """Returns the largest allocation, and what is pinned."""
        count = len(self.arguments) + len(self.temporaries)
        if self.problem or not count:
            return f"DOES NOT FIT: {self.problem}" if self.problem else "none"
        return f"the largest of {count} has {format_bytes(self.largest_bytes)}; a device pins {self.limit_gib} GiB"


def host_allocations(folder: Path, plan: Plan, cluster: Cluster | None = None) -> HostAllocations:
    """Returns the host allocations of a program.

    Args:
        folder: what `xla_dump_to` named while the program alone was compiled.
        plan: whose limit a run gets.
        cluster: whose hosts limit what is pinned; None: nothing does.
    """
    arguments: list[int] = []
    temporaries: list[int] = []
    # The last one: a program may have been compiled a second time.
    for path in sorted(folder.glob(_ASSIGNMENT), key=lambda path: path.stat().st_mtime_ns)[-1:]:
        for size, color, rest in _ALLOCATION.findall(path.read_text(encoding="utf-8")):
            if color and int(color) == _HOST:
                (arguments if " parameter " in rest else temporaries).append(int(size))
    of_state = len(plan.host_arrays.state)
    requests = replace(
        requests_of(plan.host_arrays, max(plan.predicted.host_bytes), plan.host_pieces, plan.saves),
        state=tuple(arguments[:of_state]),
        stash=tuple(arguments[of_state:]),
        temporaries=tuple(temporaries),
    )
    refused, most_gib = refused_bytes(), int(requests.least_bytes * MOST_WASTE) // GIB + 1
    return HostAllocations(
        arguments=tuple(arguments),
        temporaries=requests.temporaries,
        # A plan without host memory has a pool that grows as it is used, and saves have room in it.
        limit_gib=smallest_limit(requests, most_gib, refused) if arguments or temporaries else 0,
        planned_gib=limit_of(plan, refused),
        most_gib=None if cluster is None else most_pinned_bytes(cluster) // GIB,
    )
