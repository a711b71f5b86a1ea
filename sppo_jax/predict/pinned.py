"""What a plan pins on its hosts: the arrays there, the pieces of the stash, the limit of XLA's pool, and a refusal."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from sppo_jax.config import ModelConfig
from sppo_jax.files.format_bytes import format_bytes
from sppo_jax.hardware import Cluster
from sppo_jax.hardware.capacity import PINNED_SHARE, most_pinned_bytes
from sppo_jax.hardware.machine import refused_bytes
from sppo_jax.hardware.pinned_limit import GIB, MOST_WASTE, holds, limit_of, regions, requests_of, smallest_limit
from sppo_jax.hardware.pinned_pool import FIRST_REFUSING_DRIVER, REFUSED_BYTES
from sppo_jax.models.counts import layer_matrices, layer_vectors, num_tables
from sppo_jax.plan.host_arrays import HostArrays, piece_bytes
from sppo_jax.plan.host_pieces import ONE_PIECE
from sppo_jax.plan.plan import Plan
from sppo_jax.predict.memory import Memory
from sppo_jax.predict.shape import MemoryShape
from sppo_jax.program.spread import padded, spread

_MOST_PIECES = 8
# Parameters and the two moments that Adam keeps of them.
_STATES = 3


@dataclass(frozen=True, kw_only=True)
class Pinned:
    """How a plan's bytes on the host are pinned.

    Args:
        arrays: bytes of the arrays.
        pieces: the stash's share in each array, in 1024ths.
        saves: "async" or "blocking"; see `plan.plan.Plan`.
        limit_gib: the pool's limit, which one device pins; 0 where nothing is pinned, None where no limit suffices.
    """

    arrays: HostArrays
    pieces: tuple[int, ...]
    saves: str
    limit_gib: int | None


@lru_cache(maxsize=256)
def state_arrays(model: ModelConfig, layers: int, pipe: int, data: int, seq: int, size: int) -> tuple[int, ...]:
    """Returns the bytes of a device's part of each matrix of the parameters: tables first, then those of layers.

    Args:
        model: the model shape.
        layers: layers of a stage.
        pipe: stages.
        data: pipelines.
        seq: devices of a stage in one pipeline.
        size: bytes of an element.
    """

    def part(dims: tuple[int, ...]) -> int:
        return math.prod(padded(dims, spread(dims, data, seq))) // (data * seq) * size

    table = -(-model.vocab_size // pipe), model.hidden_size
    tables = (part(table) for _ in range(num_tables(model)))
    of_layers = (count * part(dims) for one, count in model.counts(layers) for dims in layer_matrices(one))
    return (*tables, *of_layers)


def pinned_of(memory: Memory, shape: MemoryShape, num_groups: int, num_stages: int, cluster: Cluster) -> Pinned:
    """Chooses pieces and saves with which a plan's bytes fit the pools of its hosts, if any do.

    The stash stays whole wherever that fits. Else it is cut into as few pieces as fit, alike but the last, and of these
    cuts it is the one that pins least.

    Args:
        memory: bytes of a device.
        shape: of the model on a stage.
        num_groups: groups of a stage's layers.
        num_stages: stages.
        cluster: the devices.
    """
    matrices = state_arrays(shape.model, shape.layers * num_groups, num_stages, shape.data, shape.seq, shape.sum_bytes)
    layer_types = shape.model.counts(shape.layers * num_groups)
    vectors = sum(count * sum(map(math.prod, layer_vectors(one))) for one, count in layer_types) * shape.sum_bytes
    state, on_device = ((), (*matrices, vectors)) if shape.optimizer == "device" else (matrices, (vectors,))
    arrays = HostArrays(state=state * _STATES, stash_bytes=memory.host_stash, save=on_device * _STATES)
    copied, saves = replace(arrays, save=(*matrices, vectors) * _STATES), memory.saves(cluster)
    if cluster.device.platform != "gpu" or not memory.host:
        arrays = copied if saves == "async" else arrays
        return Pinned(arrays=arrays, pieces=ONE_PIECE, saves=saves, limit_gib=0)
    refused, most_gib = refused_bytes(), most_pinned_bytes(cluster) // GIB
    if saves == "async":
        pieces, limit = _fewest_pieces(copied, memory.host, saves, most_gib, refused)
        if limit is not None:
            return Pinned(arrays=copied, pieces=pieces, saves=saves, limit_gib=limit)
    pieces, limit = _fewest_pieces(arrays, memory.host, "blocking", most_gib, refused)
    return Pinned(arrays=arrays, pieces=pieces, saves="blocking", limit_gib=limit)


@lru_cache(maxsize=256)
def _fewest_pieces(
    arrays: HostArrays, host_bytes: int, saves: str, most_gib: int, refused: int | None
) -> tuple[tuple[int, ...], int | None]:
    """Returns the pieces and the limit; whole and None where no pieces do."""
    limit = smallest_limit(requests_of(arrays, host_bytes, ONE_PIECE, saves), most_gib, refused)
    if limit is not None or not arrays.stash_bytes or refused is None:
        return ONE_PIECE, limit
    for count in range(max(2, -(-arrays.stash_bytes // refused)), _MOST_PIECES + 1):
        pieces, limit = _best_cut(arrays, host_bytes, saves, count, most_gib, refused)
        if limit is not None:
            return pieces, limit
    return ONE_PIECE, None


def _best_cut(
    arrays: HostArrays, host_bytes: int, saves: str, count: int, most_gib: int, refused: int
) -> tuple[tuple[int, ...], int | None]:
    """Returns so many pieces, alike but the last, with the smallest limit, and the limit; None where no cut fits."""
    whole = sum(ONE_PIECE)
    largest = min((whole - 1) // (count - 1), (refused - 1) * whole // arrays.stash_bytes)
    shares = range(largest, (whole - 1) // count, -1)
    cuts = [(*(share,) * (count - 1), whole - share * (count - 1)) for share in shares]
    all_requests = [(pieces, requests_of(arrays, host_bytes, pieces, saves)) for pieces in cuts]
    least_gib = -(-(host_bytes + sum(arrays.save if saves == "async" else ())) // GIB)
    for limit in range(least_gib, min(most_gib, int(least_gib * MOST_WASTE)) + 1):
        for pieces, requests in all_requests:
            if _fit_alone(requests.stash, limit, refused) and holds(requests, limit, refused):
                return pieces, limit
    return ONE_PIECE, None


def _fit_alone(pieces: tuple[int, ...], limit: int, refused: int) -> bool:
    """Returns whether a pool has the pieces, were nothing else there: quicker than `holds`, which asks more."""
    free = list(regions(limit, refused))
    for size in pieces:
        larger = [region for region in free if region >= size]
        if not larger:
            return False
        free.remove(min(larger))
        free.append(min(larger) - size)
    return True


def pinned_reason(pinned: Pinned, cluster: Cluster) -> str:
    """Says what the devices of a host pin, and why the stash is in pieces if it is; empty where nothing is pinned."""
    memory, per_host = format_bytes(cluster.host_bytes), cluster.devices_per_host
    if pinned.limit_gib == 0:
        return ""
    if pinned.limit_gib is None:
        return (
            f"DOES NOT FIT: of a host's {memory}, XLA's pools may pin {format_bytes(most_pinned_bytes(cluster))} per "
            "device, and the stash fits in no number of pieces"
        )
    pins = f"{format_bytes(pinned.limit_gib * GIB * per_host)} of a host's {memory}"
    if len(pinned.pieces) == 1:
        return pins
    sizes = ", ".join(format_bytes(piece_bytes(pinned.arrays.stash_bytes, share)) for share in pinned.pieces)
    return (
        f"{pins}; the stash is cut into pieces of {sizes}, because drivers since r{FIRST_REFUSING_DRIVER} "
        f"register less than {format_bytes(REFUSED_BYTES)} at once"
    )


def refusal(plan: Plan, cluster: Cluster) -> str:
    """Says in one line why a plan's bytes cannot be pinned on the hosts that are there; empty where they can be.

    Args:
        plan: the plan.
        cluster: the devices; `host_bytes` are what a host really has.
    """
    host_bytes = max(plan.predicted.host_bytes)
    if cluster.device.platform != "gpu" or not host_bytes:
        return ""
    num_devices = min(cluster.devices_per_host, plan.mesh.num_devices)
    needed, there = format_bytes(host_bytes * num_devices), format_bytes(cluster.host_bytes)
    limit_gib = limit_of(plan, refused_bytes())
    change = "use a shorter sequence, more hosts, or a host with more memory (sppo plan --max-length finds the length)"
    if limit_gib is None:
        return (
            f"does not fit: XLA must pin the {needed} of a host in regions below {format_bytes(REFUSED_BYTES)}, got "
            f"host_pieces {list(plan.host_pieces)} that fit no regions; plan again on this machine"
        )
    pinned = limit_gib * GIB * num_devices
    if pinned <= cluster.host_bytes * PINNED_SHARE:
        return ""
    return (
        f"does not fit: the plan pins {format_bytes(pinned)} of a host ({format_bytes(limit_gib * GIB)} for each of "
        f"{num_devices} devices), of which {PINNED_SHARE:.0%} may be pinned, got a host with {there}; {change}"
    )
