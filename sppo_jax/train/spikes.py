"""Losses that jump out of their recent range."""

from __future__ import annotations

import statistics
from collections import deque

_WINDOW, _MIN_STEPS, _MIN_SIGMAS = 50, 20, 6.0


class LossSpikes:
    """Remembers the losses of the last steps, and finds those far above them."""

    def __init__(self) -> None:
        """Remember nothing yet: the first 20 losses are never spikes."""
        self._recent: deque[float] = deque(maxlen=_WINDOW)

    def check(self, loss: float) -> str | None:
        """Take the next loss; returns a sentence if it is a spike.

        A spike lies 6 deviations above the median of the last 50 losses; the deviation is the median one (times
        1.48, as of a normal distribution), which the spikes before do not widen.

        Args:
            loss: in nats a target; finite.
        """
        recent = list(self._recent)
        self._recent.append(loss)
        if len(recent) < _MIN_STEPS:
            return None
        middle = statistics.median(recent)
        deviation = 1.4826 * statistics.median(abs(each - middle) for each in recent)
        if loss <= middle + _MIN_SIGMAS * deviation or loss <= middle * 1.02:
            return None
        return f"loss spike: {loss:.4f}, where the last {len(recent)} had a median of {middle:.4f}"
