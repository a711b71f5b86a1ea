"""Pinned host memory of the largest plans, as XLA's pool takes it, by the replay: before and with the limit of today.

    python -m bench.pinned

Prints a table in Markdown. Plans and replays only, on any machine, in a minute: nothing is pinned, no jax is needed.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

from sppo_jax.config import load_config
from sppo_jax.files.format_bytes import format_bytes
from sppo_jax.hardware import Cluster
from sppo_jax.hardware.pinned_limit import limit_of, requests_of
from sppo_jax.hardware.pinned_pool import REFUSED_BYTES, PinnedPool
from sppo_jax.plan.host_pieces import ONE_PIECE
from sppo_jax.plan.plan import Plan
from sppo_jax.search.make import resolve_cluster
from sppo_jax.search.search import search

GIB = 2**30
CONFIGS = Path(__file__).parents[1] / "configs"
COLUMNS = (
    "config",
    "tokens",
    "needed a device",
    "before: pinned a device",
    "before: a host",
    "limit = pinned a device",
    "pinned a host",
    "of a host's",
    "pieces, in 1024ths",
    "largest allocation",
    "saves",
)


class Case(NamedTuple):
    """A config, and the settings that are changed."""

    config: str
    overrides: tuple[str, ...] = ()


CASES = (
    Case("llama3-8b-1gpu-80g", (f"hardware.host_bytes={700 * GIB}",)),
    Case("llama3-8b-1gpu"),
    Case("llama3-8b-1536k"),
    Case("llama3-8b-5m"),
    Case("llama3-8b-7m-8gpu"),
    Case("gpt-7b-4m-8gpu"),
    Case("qwen3-32b-8gpu"),
    Case("llama3-70b-32gpu"),
    Case("gpt-7b-4m"),
    Case("qwen3-8b-1m-8gpu"),
    Case("qwen3-30b-a3b-1m-8gpu"),
    Case("gemma-3-27b-1m-8gpu"),
    Case("gpt-oss-20b-1m-8gpu"),
    Case("olmo-3-7b-1gpu"),
    Case("qwen3.5-9b-1m-8gpu"),
    Case("qwen3.6-35b-a3b-1m-8gpu"),
    Case("qwen3.5-9b-1gpu"),
)


def before(plan: Plan, cluster: Cluster) -> int | None:
    """Returns the bytes that a device's pool pinned, not filled and with another limit; None where a request fails.

    That limit was twice the bytes on the host and once those on the device, over all devices of a process, up to the
    memory of the machine. The stash was one array.
    """
    host_bytes = max(plan.predicted.host_bytes)
    needed = cluster.devices_per_host * (2 * host_bytes + max(plan.predicted.hbm_bytes))
    pool = PinnedPool(min(math.ceil(needed / GIB), cluster.host_bytes // GIB) * GIB, REFUSED_BYTES)
    requests = requests_of(plan.host_arrays, host_bytes, ONE_PIECE, plan.saves)
    if None in [pool.allocate(size) for size in requests.state]:
        return None
    step = [pool.allocate(size) for size in requests.temporaries]
    if not requests.save:
        return None if None in step else pool.pinned_bytes
    for chunk in step:
        if chunk is not None:
            pool.free(chunk)
    beside = [pool.allocate(size) for size in (*requests.save, *requests.temporaries)]
    return None if None in (*step, *beside) else pool.pinned_bytes


def row(case: Case, plan: Plan | None = None) -> tuple[str, ...]:
    """Returns the cells of a config, whose plan is searched where it is not given."""
    config = load_config(CONFIGS / f"{case.config}.yaml", list(case.overrides))
    plan, cluster = plan or search(config).plan, resolve_cluster(config)
    old, limit = before(plan, cluster), limit_of(plan, REFUSED_BYTES)
    host_bytes, devices = max(plan.predicted.host_bytes), cluster.devices_per_host
    requests = requests_of(plan.host_arrays, host_bytes, plan.host_pieces, plan.saves)
    return (
        case.config,
        f"{plan.sequence_length:,}",
        f"{(host_bytes + sum(requests.save)) / GIB:.1f} GiB",
        "fails" if old is None else f"{old / GIB:.0f} GiB",
        "fails" if old is None else f"{devices * old / GIB:.0f} GiB",
        "none" if limit is None else f"{limit} GiB",
        "none" if limit is None else f"{devices * limit} GiB",
        f"{cluster.host_bytes / GIB:.0f} GiB",
        " : ".join(map(str, plan.host_pieces)) if len(plan.host_pieces) > 1 else "whole",
        format_bytes(max(*requests.stash, *requests.temporaries, 0)),
        plan.saves,
    )


def report() -> str:
    """Returns the table."""
    rows = [COLUMNS, ("---",) * len(COLUMNS), *map(row, CASES)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


if __name__ == "__main__":
    print(report())
