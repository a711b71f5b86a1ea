"""Rows in pinned host memory: written in order, read in order, in reverse and by a table, and added to; to the bit.

Compilers for GPUs have read reversed rows from wrong places (openxla/xla#46231), and updated slices wrongly where
starts are only known as the program runs, beside a shift by such a start (openxla/xla#49119, #49120).

Letters: R rows of the buffer, E elements of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from sppo_jax.arrays import buffers
from sppo_jax.check.row import FAILS, Figures, Row, Wanted, by_device, errors, odd_ones
from sppo_jax.compat import compiler_options, to_device, to_host
from sppo_jax.profile.timing import AXIS, Timer

NUM_ROWS = 64
ORDERS = ("in order", "in reverse", "by table", "behind a shift")


def measure(timer: Timer, elements: int) -> Figures:
    """Returns how many elements are wrong on each device of this process, by the order of reading, and a checksum.

    Args:
        timer: gives the devices.
        elements: of a row.
    """
    table_R = np.random.default_rng(0).permutation(NUM_ROWS).astype(np.int32)
    specs = {"mesh": timer.mesh, "in_specs": P(), "out_specs": P(AXIS), "check_vma": False}
    options = compiler_options(timer.devices[0].platform, True, 1, tables=True)
    # The shift is an argument, so that the compiler does not know it.
    everywhere = jax.jit(jax.shard_map(partial(_rows, elements), **specs), compiler_options=options)
    wrong, digests = jax.device_get(everywhere(table_R, np.array([3], np.int32)))
    return {
        "orders": {order: wrong[:, number].tolist() for number, order in enumerate(ORDERS)},
        "digests": [f"{value & 0xFFFFFFFF:08x}" for value in digests.tolist()],
    }


def _rows(elements: int, table_R: jax.Array, shift_1: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the wrong elements of each order, [1, orders], and a checksum of all that was read, [1]."""

    def right_E(row) -> jax.Array:
        return lax.iota(jnp.int32, elements) * 3 + jnp.int32(row) * 1009

    def write(row, host_RE):
        return buffers.write(host_RE, (row,), to_host(right_E(row)))

    host_RE = to_host(jnp.zeros((NUM_ROWS, elements), jnp.int32))
    host_RE = lax.fori_loop(0, NUM_ROWS, write, host_RE)
    host_RE = lax.optimization_barrier(host_RE)
    places = (lambda i: i, lambda i: NUM_ROWS - 1 - i, lambda i: table_R[i])

    def read_all(place):
        def turn(i, carry):
            wrong, digest = carry
            row_E = read(host_RE, place(i), elements)
            wrong += jnp.sum(row_E != right_E(place(i)), dtype=jnp.int32)
            return wrong, digest * 31 + jnp.sum(row_E * (lax.iota(jnp.int32, elements) + 1), dtype=jnp.int32)

        return lax.fori_loop(0, NUM_ROWS, turn, (jnp.int32(0), jnp.int32(0)))

    found = [read_all(place) for place in places]
    wrong = [*(count for count, _ in found), _shifted(host_RE, shift_1[0], elements, right_E)]
    digest = sum((digest for _, digest in found), jnp.int32(0))
    return jnp.stack(wrong)[None], digest[None]


def _shifted(host_RE: jax.Array, shift: jax.Array, elements: int, right_E) -> jax.Array:
    """Adds shifted rows into a buffer on the device, as gradients of keys are added; returns the wrong elements."""

    def turn(i, sums_RE):
        row_E = read(host_RE, i, elements)
        twice_E = jnp.concatenate([row_E, row_E])
        shifted_E = lax.dynamic_slice(twice_E, (shift,), (elements,))
        return buffers.add(sums_RE, (i, shift), shifted_E)

    sums_RE = lax.fori_loop(0, NUM_ROWS, turn, jnp.zeros((NUM_ROWS, 2 * elements), jnp.int32))
    places_E = (lax.iota(jnp.int32, elements) + shift) % elements
    right_RE = jax.vmap(
        lambda row: (
            jnp.zeros(2 * elements, jnp.int32).at[shift + lax.iota(jnp.int32, elements)].set(right_E(row)[places_E])
        )
    )(lax.iota(jnp.int32, NUM_ROWS))
    return jnp.sum(sums_RE != right_RE, dtype=jnp.int32)


def read(host_RE: jax.Array, row: jax.Array, elements: int) -> jax.Array:
    """Returns a row of a buffer on the host, on the device."""
    return to_device(buffers.read(host_RE, (row,), (elements,)))


def judge(found: Sequence[Figures], wanted: Wanted) -> Row:
    """Returns the row of values on the host: `orders` has, by name, the wrong elements of each device."""
    expected, change = "every row as it was written", "install jax 0.11.1 or newer, or keep the stash on the device"
    if problem := errors(found):
        return Row(value=problem, verdict=FAILS, change="look at ulimit -l and at the memory of the host")
    for order in found[0]["orders"]:
        counts = list(by_device([{**one, "x": one["orders"][order]} for one in found], "x"))
        for name, count in counts:
            if count:
                value = f"{count} wrong elements of rows read {order} on {name}"
                return Row(value=value, expected=expected, verdict=FAILS, change=change)
    odd, _ = odd_ones(list(by_device(found, "digests")))
    if odd:
        return Row(value=f"{odd[0]} with another checksum", expected=expected, verdict=FAILS, change=change)
    return Row(value=f"rows read {', '.join(found[0]['orders'])}", expected=expected)
