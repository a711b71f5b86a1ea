"""Collectives within hosts and between them: whole numbers that must arrive as they were sent, and the rates.

Between hosts each device sends to its like on the next host, in a ring; then hosts in pairs, so that every host meets
log2(hosts) others: a host that is slow with all of them is itself slow.

Letters: E elements of a device, D devices that exchange.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from sppo_jax.check.row import FAILS, NOT_JUDGED, SLOW, Figures, Row, Wanted, by_device, errors, rate
from sppo_jax.profile.copies import paired_bytes_s
from sppo_jax.profile.exchanges import rate_of, ring_bytes_s
from sppo_jax.profile.timing import AXIS, Timer

_LEAST_SHARE, _LEAST_OF_MEDIAN, _LEAST_BESIDE = 0.6, 0.8, 0.8
# What a device sends differs from what any other does by so much in each element.
_STRIDE = 100_003
OPERATIONS = ("ring", "all-to-all", "all-gather", "reduce-scatter")


def measure_values(timer: Timer, elements: int) -> Figures:
    """Returns how many elements arrive wrong on each device of this process, by collective.

    Args:
        timer: of devices that exchange, of this process and others.
        elements: that a device sends; a multiple of the number of devices.
    """
    size = len(timer.devices)
    elements = -(-elements // size) * size
    step = jax.shard_map(
        lambda: _wrong(size, elements), mesh=timer.mesh, in_specs=(), out_specs=P(AXIS), check_vma=False
    )
    shards = jax.jit(step)().addressable_shards
    counts = [shard.data[0].tolist() for shard in sorted(shards, key=lambda shard: shard.index[0].start or 0)]
    return {name: [count[number] for count in counts] for number, name in enumerate(OPERATIONS)}


def _wrong(size: int, elements: int) -> jax.Array:
    """Returns the wrong elements of each collective, [1, collectives]."""
    rank, part = lax.axis_index(AXIS), elements // size

    def sent_E(device) -> jax.Array:
        return lax.iota(jnp.int32, elements) + jnp.int32(device) * _STRIDE

    ranks = lax.iota(jnp.int32, size)
    ring_E = permute(sent_E(rank), [(k, (k + 1) % size) for k in range(size)])
    all_DE = jax.vmap(sent_E)(ranks)
    parts_DE = lax.all_to_all(sent_E(rank).reshape(size, part), AXIS, 0, 0)
    right_DE = lax.dynamic_slice(all_DE, (jnp.int32(0), rank * part), (size, part))
    gathered_DE = lax.all_gather(sent_E(rank), AXIS)
    summed_E = lax.psum_scatter(sent_E(rank), AXIS, tiled=True)
    results = (ring_E, parts_DE, gathered_DE, summed_E)
    rights = (sent_E((rank + size - 1) % size), right_DE, all_DE, jnp.sum(right_DE, axis=0, dtype=jnp.int32))
    counts = [jnp.sum(got != right, dtype=jnp.int32) for got, right in zip(results, rights, strict=True)]
    return jnp.stack(counts)[None]


def permute(x_E: jax.Array, pairs: Sequence[tuple[int, int]]) -> jax.Array:
    """Returns what the device gets that comes before this one in some pairs."""
    return lax.ppermute(x_E, AXIS, pairs)


def measure_rates(timer: Timer, elements: int) -> Figures:
    """Returns the bytes a second that each device of this process sends in a ring, and in an all-to-all.

    Args:
        timer: of devices that exchange.
        elements: of 4 bytes that a device sends.
    """
    return {way: rate_of(timer, way, 4 * elements) for way in ("ring", "all-to-all")}


def measure_between(timer: Timer, num_hosts: int, elements: int) -> Figures:
    """Returns the bytes a second that each device of this process sends to other hosts: in a ring, then in pairs.

    Args:
        timer: of all devices, host after host.
        num_hosts: hosts of as many devices each.
        elements: of 4 bytes that a device sends.
    """
    return {"steps": [ring_bytes_s(timer, pairs, 4 * elements) for pairs in host_steps(num_hosts, len(timer.devices))]}


def host_steps(num_hosts: int, num_devices: int) -> list[list[tuple[int, int]]]:
    """Returns who sends to whom: a ring of hosts, then pairs of hosts whose numbers differ in one digit of two.

    Args:
        num_hosts: hosts.
        num_devices: of all hosts, the same number each, host after host.
    """
    per_host, digits = num_devices // num_hosts, max(1, math.ceil(math.log2(num_hosts)))
    targets = [[(host + 1) % num_hosts for host in range(num_hosts)]]
    for digit in range(digits):
        others = [host ^ (1 << digit) for host in range(num_hosts)]
        # A host without a partner has nobody to send to.
        targets.append([other if other < num_hosts else host for host, other in enumerate(others)])
    return [
        [(host * per_host + k, target * per_host + k) for host, target in enumerate(hosts) for k in range(per_host)]
        for hosts in targets
    ]


def judge_values(found: Sequence[Figures], wanted: Wanted) -> Row:
    """Returns the row of a host's, or of all hosts', collectives; figures of values and of rates together."""
    if problem := errors(found):
        return Row(value=problem, verdict=FAILS, change="look at NCCL's lines (NCCL_DEBUG=WARN)")
    if not found[0].get("ring_values"):
        return Row(value="one device, nothing to exchange", verdict=NOT_JUDGED)
    return _wrong_values(found) or _rates(found, wanted)


def _wrong_values(found: Sequence[Figures]) -> Row | None:
    """Returns the row of the first wrong values; None where all are right."""
    for name in OPERATIONS:
        for device, count in by_device(found, f"{name}_values"):
            if count:
                value = f"{name}: {count} wrong elements on {device}"
                change = "leave that device and its neighbours out, and test them by nccl-tests"
                return Row(value=value, expected="what was sent", verdict=FAILS, change=change)
    return None


def _rates(found: Sequence[Figures], wanted: Wanted) -> Row:
    if "ring" not in found[0]:
        return Row(value="all values are right")
    lowest = {way: min(by_device(found, way), key=lambda value: value[1]) for way in ("ring", "all-to-all")}
    text = ", ".join(f"{way} {rate(value, 'B')}" for way, (_, value) in lowest.items())
    free = [one["free_bytes"] for one in found if one.get("free_bytes") is not None]
    text += f", {min(free) / 2**30:.2f} GiB of a device free behind them" if free else ""
    if not wanted.is_timed:
        return Row(value=f"all values are right; {text}, not judged")
    least = _LEAST_SHARE * wanted.link_bytes_s
    name, slowest = min(lowest.values(), key=lambda value: value[1])
    expected = f"at least {rate(least, 'B')}"
    if slowest < least:
        change = f"look at the links of {name} (nvidia-smi nvlink -s, nvidia-smi topo -m)"
        return Row(value=text, expected=expected, verdict=SLOW, change=change)
    return Row(value=text, expected=expected)


def judge_between(found: Sequence[Figures], wanted: Wanted) -> Row:
    """Returns the row of what hosts send to each other; a host counts by the best of its steps."""
    if problem := errors(found):
        return Row(value=problem, verdict=FAILS, change="look at NCCL's lines (NCCL_DEBUG=WARN) and at the network")
    if "steps" not in found[0]:
        return Row(value="one host", verdict=NOT_JUDGED)
    if wrong := _wrong_values(found):
        return wrong
    best: dict[str, float] = {}
    for one in found:
        mine = max(min(step) for step in one["steps"])
        best[one["host"]] = min(mine, best.get(one["host"], math.inf))
    middle, slowest = statistics.median(best.values()), min(best, key=lambda host: best[host])
    ring = min(min(one["steps"][0]) for one in found)
    text = f"ring {rate(ring, 'B')} a device; {slowest} at best {rate(best[slowest], 'B')} of {rate(middle, 'B')}"
    if not wanted.is_timed:
        return Row(value=text, verdict=NOT_JUDGED)
    expected = f"at least {rate(_LEAST_SHARE * wanted.network_bytes_s, 'B')}"
    if best[slowest] < _LEAST_OF_MEDIAN * middle or ring < _LEAST_SHARE * wanted.network_bytes_s:
        change = f"look at the network cards of {slowest}, and at NCCL_IB_HCA and NCCL_SOCKET_IFNAME"
        return Row(value=text, expected=expected, verdict=SLOW, change=change)
    return Row(value=text, expected=expected)


def measure_beside(timer: Timer, elements: int, copied: int) -> Figures:
    """Returns the share of a ring's rate that is left beside copies to the host and back.

    Args:
        timer: of devices that exchange.
        elements: of 4 bytes that a device sends.
        copied: of 4 bytes that it copies meanwhile.
    """
    alone, beside = paired_bytes_s(timer, elements, copied)
    return {"left": [b / a for a, b in zip(alone, beside, strict=True)]}


def judge_beside(found: Sequence[Figures], wanted: Wanted) -> Row:
    """Returns the row of collectives beside host copies."""
    if problem := errors(found):
        return Row(value=problem, verdict=FAILS)
    if "left" not in found[0]:
        return Row(value="one device, nothing to exchange", verdict=NOT_JUDGED)
    name, least = min(by_device(found, "left"), key=lambda value: value[1])
    text, expected = f"{least:.0%} of the ring's rate is left on {name}", f"at least {_LEAST_BESIDE:.0%}"
    verdict = SLOW if wanted.is_timed and least < _LEAST_BESIDE else NOT_JUDGED if not wanted.is_timed else "ok"
    return Row(value=text, expected=expected, verdict=verdict)
