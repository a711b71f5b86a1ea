"""Loss by position within a document, and what the context before a position is worth."""

from __future__ import annotations

import math
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


@dataclass(frozen=True, kw_only=True)
class ContextGain:
    """Mean losses of the targets with more than `beyond` tokens before them in their document.

    Args:
        beyond: tokens.
        num_targets: such targets.
        whole: loss in nats a target with all the tokens before.
        cut: loss of the same targets with `beyond / 2` to `beyond` tokens before.
    """

    beyond: int
    num_targets: int
    whole: float
    cut: float

    @property
    def gain(self) -> float:
        """Nats a target by which the tokens further back lower the loss; below 0 they raise it."""
        return self.cut - self.whole

    @property
    def text(self) -> str:
        """The gain in words, with its number of targets."""
        if not math.isfinite(self.gain):
            return f"context beyond {self.beyond:,} tokens: not finite ({self.num_targets:,} targets)"
        word = "gains" if self.gain >= 0 else "COSTS"
        return f"context beyond {self.beyond:,} tokens {word} {abs(self.gain):.4f} nats ({self.num_targets:,} targets)"

    def to_dict(self) -> dict[str, float]:
        """Returns the fields and the gain, as metrics.jsonl has them."""
        fields = {"beyond": self.beyond, "num_targets": self.num_targets, "whole": self.whole, "cut": self.cut}
        return {**fields, "gain": self.gain}
