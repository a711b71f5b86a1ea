"""Whether breadth-first plans lose by the chunks of equal FLOPs that the search leaves out.

    python -m studies.flops_chunks

Where `sequence.balance` is auto, breadth-first schedules have chunks of equal FLOPs up to 8 a stage. With
`sequence.balance=flops` they have any number. This prints by how much the fastest plan of the first takes longer than
that of the second, over random settings with given numbers of stages and of sequences in a wave. Where the wave is
open, auto also leaves out waves of chunks of equal FLOPs. No jax needed; takes four minutes.
"""

import random
import sys
from itertools import product

from sppo_jax.config import config_from_dict
from sppo_jax.hardware import parse_cluster
from sppo_jax.planner.search import search

K = 1024
MODELS = ("llama3-8b", "gpt-7b", "gpt-13b", "llama3-70b")
CLUSTERS = ("h100:2x8", "a100-80g:8x8", "h100:16x8")
LENGTHS = (64 * K, 256 * K, K * K, 4 * K * K, 1_000_064)
STAGES = (2, 4, 8)
# Sequences of a pipeline, and those of a wave.
SEQUENCES = ((1, 1), (4, 1), (4, 4))
NUM_SETTINGS, SEED = 150, 1


def fastest_s(setting: tuple, balance: str) -> float | None:
    """Returns the seconds of the fastest breadth-first plan of a setting; None if none fits or there is none."""
    model, cluster, length, pipe, (sequences, wave) = setting
    groups = {
        "model": {"preset": model},
        "sequence": {"length": length, "per_pipeline": sequences, "balance": balance},
        "mesh": {"pipe": pipe},
        "schedule": {"name": "breadth-first", "wave": wave},
        "train": {"steps": 1},
    }
    try:
        found = search(config_from_dict(groups), parse_cluster(cluster))
    except ValueError:
        return None
    return found.fastest_s if found.fits else None


def main() -> int:
    settings = random.Random(SEED).sample(list(product(MODELS, CLUSTERS, LENGTHS, STAGES, SEQUENCES)), NUM_SETTINGS)
    ratios = {}
    for setting in settings:
        auto_s, flops_s = fastest_s(setting, "auto"), fastest_s(setting, "flops")
        if auto_s and flops_s:
            ratios[setting] = auto_s / flops_s
    worst = max(ratios, key=ratios.__getitem__)
    print(f"{len(ratios)} of {NUM_SETTINGS} settings have plans of both kinds that fit")
    print(f"auto takes {ratios[worst]:.4f} of the time of flops at most: {worst}")
    print(f"and {sorted(ratios.values())[len(ratios) // 2]:.4f} in the median")
    return 0


if __name__ == "__main__":
    sys.exit(main())
