"""Programs that combine features, against the dense model: a few written out, some drawn in CI, many behind `slow`."""

import zlib
from itertools import chain

import pytest
from combinations import draw, features, pairs, possible_pairs
from exactness import TINY
from programs import HOST, Case, compare

from sppo_jax.config import config_from_dict
from sppo_jax.hardware import DEVICES, make_cluster
from sppo_jax.planner.make import make_plan

WRITTEN = {
    "interleaved-hybrid-host-unequal-tied": Case(
        dict(
            chunks=(24, 12), mesh=(1, 2, 4), kind="hybrid", ulysses=2, interleave=2, places=HOST, alpha=(0.6, 1.0)
        ),
        dict(num_layers=8, tied_embeddings=True),
    ),
    "hybrid-data-sequences": Case(
        dict(chunks=(16, 12), mesh=(2, 1, 4), kind="hybrid", ulysses=2, schedule="seq1f1b", sequences=3),
        dict(num_layers=2, qk_norm=True),
        optimised=True,
    ),
    "rest-on-host-unequal": Case(
        dict(chunks=(24, 16, 8), mesh=(1, 2, 2), places=("keep", "keep", "host")), dict(qkv_bias=True)
    ),
    "hybrid-fused-rest-on-host": Case(
        dict(
            chunks=(24, 16, 8),
            mesh=(1, 2, 4),
            kind="hybrid",
            ulysses=2,
            kernel="cudnn",
            places=("host",) * 3,
            alpha=1.0,
        ),
        dict(head_dim=8),
        optimised=True,
    ),
}
