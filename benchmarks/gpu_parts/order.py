"""Which cases run first where time is short: those that decide most, then the rest by worth a second. No jax."""

from __future__ import annotations

from collections.abc import Sequence

from gpu_parts.case import Case

# In this order, whatever they take: together less than ten minutes on an H100.
FIRST = (
    "system/what is here",
    "exact/heads of 128",
    "probe/loops",
    "probe/loops in CUDA graphs",
    "attention/cudnn, a large rectangle",
    "pool/20 GiB",
    "pool/20 GiB, tight limit",
    "step/1B at 128K, kept",
    "step/1B at 128K, all on the host",
    "overlap/1B at 128K, all on the host",
    "exact/step",
)
# How much a case decides; the first prefix that a key has counts, and longer prefixes stand first.
WORTH = {
    "step/1B at 128K, all on the host, loops in CUDA graphs": 300,
    "step/1B at 128K, planned": 250,
    "attention/profile": 300,
    "attention/blockwise": 5,
    "attention": 60,
    "health": 90,
    "peer/torch, 1B at 128K": 200,
    "exact/breadth-first step": 220,
    "exact/blockwise": 40,
    "exact/step, kernels as they come": 40,
    "exact": 70,
    "step/longest": 2,
    "step/8B": 100,
    "step": 100,
    "peer/jax, longest": 1,
    "peer": 80,
    "overlap": 80,
    "flex": 60,
}
_OTHER_WORTH = 50


def ordered(cases: Sequence[Case]) -> list[Case]:
    """Return cases in the order in which they run."""
    return sorted(cases, key=lambda case: (_place(case), -worth(case.key) / case.expected_s))


def worth(key: str) -> float:
    """Return how much a case decides, beside other cases."""
    return next((points for prefix, points in WORTH.items() if key.startswith(prefix)), _OTHER_WORTH)


def _place(case: Case) -> int:
    return FIRST.index(case.key) if case.key in FIRST else len(FIRST)
