"""Which cases run first where time is short: those that decide most, then the rest by worth a second. No jax."""

from __future__ import annotations

from collections.abc import Sequence

from bench.gpu_parts.case import Case

# In this order, whatever they take: together less than ten minutes on an H100.
FIRST = (
    "system/what is here",
    "train/save and resume",
    "step/1B at 128K, all on the host, no CUDA graphs",
    "exact/step",
    "step/8B's widths, 8 layers, at 128K, planned, no CUDA graphs",
    "exact/breadth-first step",
    "overlap/1B at 128K, all on the host",
)
# How much a case decides; the first prefix that a key has counts, and longer prefixes stand first.
WORTH = {
    "step/1B at 128K, all on the host, loops in CUDA graphs": 20,
    "step/1B at 128K, all on the host, loops of two iterations": 150,
    "step/8B's widths, 8 layers": 200,
    "attention/profile": 420,
    "delta/256K tokens, 4 heads, 8 spans": 280,
    "delta": 120,
    "step/1B at 128K, planned, breadth-first": 120,
    "step/1B at 128K, planned": 300,
    "step/1B at 128K, all on the host, breadth-first": 200,
    "step/1B at 128K, kept, breadth-first": 180,
    "step/longest": 2,
    "step/8B": 60,
    "step/Qwen3.5-4B": 240,
    "step": 100,
    "health": 90,
    "exact/breadth-first step": 130,
    "exact/blockwise": 40,
    "exact/step, kernels as they come": 40,
    "exact/the delta rule": 200,
    "exact": 45,
    "peer/torch, 1B at 128K, cudnn attention": 100,
    "peer/torch, 1B at 128K": 190,
    "peer/torch, longest": 80,
    "peer/jax, longest": 1,
    "peer": 60,
    "overlap": 80,
    "attention/blockwise": 1,
    "attention/cudnn, a": 25,
    "attention": 60,
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
