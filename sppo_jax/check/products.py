"""Products on all devices at once: their rate, and their values to the last bit; and the rate of device memory.

Operands of the exact products are small whole numbers, so that any order of sums in float32 gives the same bits: a
difference is the device's. Each product is proved on its device too, by a weighted sum of the columns: with whole
numbers (A B) w is A (B w), whatever overflows. So one device by itself is checked as well.

Letters: N rows and columns.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from sppo_jax.check.row import FAILS, Figures, Row, Wanted, by_device, errors, judge_rates, odd_ones
from sppo_jax.profile.measure import matmul_work, stream_work
from sppo_jax.profile.timing import AXIS, Timer

_TURNS = 3
# Shares of the peak and of the median below which a device is slow.
_LEAST_OF_PEAK, _LEAST_OF_MEDIAN = 0.55, 0.93
_LEAST_OF_STREAM = 0.75
_SILENT = "leave the device out: it computes wrong values without a word"


def measure(timer: Timer, side: int, dtype: jnp.dtype) -> Figures:
    """Returns the FLOP/s of each device of this process, and what its exact products came to.

    Args:
        timer: of the devices of this process.
        side: rows and columns of the matrices.
        dtype: of the operands.
    """
    seconds = timer.device_seconds(*matmul_work(side, side, side, dtype))
    exact = jax.shard_map(lambda: _exact(side, dtype), mesh=timer.mesh, in_specs=(), out_specs=P(AXIS), check_vma=False)
    digests, wrong, finite = jax.device_get(jax.jit(exact)())
    return {
        "flops_s": [4.0 * side**3 / one for one in seconds],
        "digests": [f"{value & 0xFFFFFFFF:08x}" for value in digests.tolist()],
        "wrong_rows": wrong.tolist(),
        "finite": finite.tolist(),
    }


def _exact(side: int, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns a digest of some products in a row, how many of their rows are wrong, and whether all are finite."""
    row, column = (lax.broadcasted_iota(jnp.int32, (side, side), axis) for axis in (0, 1))
    a_NN, b_NN = ((row * r + column * c + row * column % 1009) % 5 - 2 for r, c in ((37, 101), (53, 29)))
    weights_N = jnp.arange(side, dtype=jnp.int32) % 7 + 1
    summed_N = jnp.sum(b_NN * weights_N, axis=1, dtype=jnp.int32)

    def turn(_, carry):
        a_NN, digest, wrong, finite = carry
        right_N = jnp.sum(a_NN * summed_N, axis=1, dtype=jnp.int32)
        y_NN = multiply(a_NN.astype(dtype), b_NN.astype(dtype))
        finite &= jnp.all(jnp.isfinite(y_NN))
        y_NN = y_NN.astype(jnp.int32)
        wrong += jnp.sum(jnp.sum(y_NN * weights_N, axis=1, dtype=jnp.int32) != right_N, dtype=jnp.int32)
        digest = digest * 31 + jnp.sum(y_NN * (row * 3 + column * 7 + 1), dtype=jnp.int32)
        return y_NN % 5 - 2, digest, wrong, finite

    zero = jnp.int32(0)
    _, digest, wrong, finite = lax.fori_loop(0, _TURNS, turn, (a_NN, zero, zero, jnp.array(True)))
    return digest[None], wrong[None], finite[None]


def multiply(a_NN: jax.Array, b_NN: jax.Array) -> jax.Array:
    """Returns the product in float32."""
    return jnp.matmul(a_NN, b_NN, preferred_element_type=jnp.float32)


def judge(found: Sequence[Figures], wanted: Wanted) -> Row:
    """Returns the row of the products of all processes."""
    if problem := errors(found):
        return Row(value=problem, verdict=FAILS)
    expected = "the same bits on all devices"
    for name, finite in by_device(found, "finite"):
        if not finite:
            return Row(
                value=f"{name} has products that are not finite", expected=expected, verdict=FAILS, change=_SILENT
            )
    for name, wrong in by_device(found, "wrong_rows"):
        if wrong:
            return Row(value=f"{name} has {wrong} wrong rows", expected=expected, verdict=FAILS, change=_SILENT)
    odd, most = odd_ones(list(by_device(found, "digests")))
    if odd:
        return Row(
            value=f"{', '.join(odd)} with another checksum than {most}",
            expected=expected,
            verdict=FAILS,
            change=_SILENT,
        )
    rates = list(by_device(found, "flops_s"))
    middle = statistics.median(rate for _, rate in rates)
    least = max(_LEAST_OF_PEAK * wanted.matmul_flops_s, _LEAST_OF_MEDIAN * middle)
    row = judge_rates(rates, "FLOP", least, wanted, "look at the clock and the temperature of that device")
    if not wanted.is_timed:
        return Row(value=f"checksum {most} on all devices; {row.value}, not judged")
    return replace(row, value=f"{row.value}, checksum {most}")


def measure_stream(timer: Timer, num_bytes: int) -> Figures:
    """Returns the bytes a second of each device's memory.

    Args:
        timer: of the devices of this process.
        num_bytes: of an array.
    """
    seconds = timer.device_seconds(*stream_work(num_bytes))
    return {"bytes_s": [3 * num_bytes / one for one in seconds]}


def judge_stream(found: Sequence[Figures], wanted: Wanted) -> Row:
    """Returns the row of device memory of all processes."""
    if problem := errors(found):
        return Row(value=problem, verdict=FAILS)
    least = _LEAST_OF_STREAM * wanted.hbm_bytes_s
    return judge_rates(list(by_device(found, "bytes_s")), "B", least, wanted, "look at the memory clock of that device")
