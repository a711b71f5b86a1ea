"""Loss by position within a document: the buckets, and what they say of a context."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Mean loss of the targets whose token stands at positions first..last of its document."""

    first: int
    last: int
    num_targets: int
    loss: float

    @property
    def middle(self) -> float:
        """The place of the bucket on a logarithmic axis."""
        return (max(self.first, self.last / 2, 0.5) * (self.last + 1)) ** 0.5


def late_minus_early(buckets: Sequence[Bucket]) -> float | None:
    """Returns the last bucket's loss minus that of the first sixteenth of the positions; below 0 the context helps.

    Args:
        buckets: by rising position.

    Returns:
        Nats a target; None where there are not two buckets, no target among the early ones, or a loss is not finite.
    """
    if len(buckets) < 2:
        return None
    last = buckets[-1]
    early = [bucket for bucket in buckets[:-1] if 16 * (bucket.last + 1) <= last.last + 1] or buckets[:1]
    total = sum(bucket.num_targets for bucket in early)
    if not total:
        return None
    gap = last.loss - sum(bucket.loss * bucket.num_targets for bucket in early) / total
    return gap if math.isfinite(gap) else None
