"""What the seconds of a stage depend on: its shape, what its backward computes again, and where its weights are."""

import math
from typing import NamedTuple

from sppo_jax.plan.parts import MeshShape


class StageShape(NamedTuple):
    """A stage, and how its devices share a sequence.

    Attributes:
        mesh: devices along each axis.
        ulysses: devices over which heads are spread.
        ring: devices round which keys and values, or queries, travel; `ulysses * ring == mesh.seq`.
        layers: layers of a virtual stage, in the mean.
        compute_bytes: bytes of an activation.
        kernel: the attention kernel, "blockwise", "cudnn" or "pallas".
        length: tokens of a sequence.
        ring_pass: what travels on the ring: "kv", "q", or "auto" for the fewer bytes.
        backward_queries: of a call of attention's backward at most, in layers without a window; 0: all of a chunk.
    """

    mesh: MeshShape
    ulysses: int
    ring: int
    layers: float
    compute_bytes: int
    kernel: str
    length: int
    ring_pass: str = "auto"
    backward_queries: int = 0


class Recompute(NamedTuple):
    """How much of a forward its backward computes again.

    Attributes:
        linear: how often the linear parts: 0, 1, or 2 from a stage's input alone.
        attention: whether attention.
        reach: the tokens of the sequence that a tick may reach for its backward to compute attention again.
        rewrite_kv: the share of backwards in whose ticks keys and values are exchanged and written again.
        kv: whether they are computed again there, too.
        tails: whether layers with a window write their keys and values again in the backward of a chunk, behind a
            tail; see `rules.has_tails`.
        whole: whether layers with a window or a state run again whole, for the layers behind them in their group.
        layers: the share of layers that run once more where keys and values are made again, instead of `kv`.
    """

    linear: int = 0
    attention: bool = False
    reach: float = math.inf
    rewrite_kv: float = 0.0
    kv: bool = False
    tails: bool = False
    whole: bool = False
    layers: float = 0.0


class WeightsPlace(NamedTuple):
    """Where the weights of a stage are during a step.

    Attributes:
        again: how often a stage gathers the weights of all its layers, and scatters their sums, after the first time.
        gathers_tables: whether the embedding and the head are gathered in each tick that needs them.
        on_host: whether parameters and moments wait on the host.
    """

    again: tuple[float, float] = (0.0, 0.0)
    gathers_tables: bool = False
    on_host: bool = False
