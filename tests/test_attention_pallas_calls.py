"""The check of the kernel for TPUs, interpreted: it passes the kernel, and finds what is broken in it."""

import re

import jax.numpy as jnp
import pytest

from sppo_jax.attention.check import CallHeads, find_difference
from sppo_jax.attention.intervals import Intervals
from sppo_jax.attention.pallas_blocks import Blocks
from sppo_jax.attention.tpu import backward as pallas_backward
from sppo_jax.attention.tpu import check_calls as pallas_calls
from sppo_jax.attention.tpu import forward as pallas_forward
from sppo_jax.attention.tpu.check_calls import checked_kernel
from sppo_jax.attention.tpu.pallas import PallasKernel

HEADS = CallHeads(2, 1, 128)
BLOCKS = Blocks(128, 128, 128, 2, vmem_bytes=2**26, is_interpreted=True)


def find(dtype=jnp.bfloat16, **how):
    return find_difference(HEADS, dtype, kernel=checked_kernel(BLOCKS), **how)


@pytest.mark.parametrize(
    ("dtype", "has_window"),
    [
        (jnp.bfloat16, True),
        pytest.param(jnp.float32, False, marks=pytest.mark.slow),
        pytest.param(jnp.bfloat16, False, marks=pytest.mark.slow),
        pytest.param(jnp.float32, True, marks=pytest.mark.slow),
    ],
)
def test_the_kernel_passes(dtype, has_window):
    assert find(dtype, has_window=has_window) is None


def one_key_more(patch):
    make = pallas_calls.with_blocks

    def with_blocks(intervals: Intervals, *given):
        return make(Intervals(intervals.lo, jnp.where(intervals.hi > intervals.lo, intervals.hi + 1, 0)), *given)

    patch.setattr(pallas_calls, "with_blocks", with_blocks)


def whole_edges(patch):
    """Takes blocks at an edge of a mask for blocks that are visible as a whole, forward."""
    read = pallas_forward.read_field

    def read_field(word, name):
        field = read(word, name)
        return jnp.where(field == pallas_forward.EDGE, pallas_forward.FULL, field) if name == "kind" else field

    patch.setattr(pallas_forward, "read_field", read_field)


def forgotten_state(patch):
    def begin(_, __, top, total, acc):
        top[...] = jnp.full_like(top, pallas_forward._MASKED)
        total[...], acc[...] = jnp.zeros_like(total), jnp.zeros_like(acc)

    patch.setattr(pallas_forward, "_resume", begin)


def forgotten_sums(patch):
    """Writes dK and dV of a block over what was there."""
    arrive = pallas_backward._Copies.arrive

    def forget(copies):
        arrive(copies)
        copies.held[copies.slot] = jnp.zeros(copies.held.shape[1:], copies.held.dtype)

    patch.setattr(pallas_backward._Copies, "arrive", forget)


def forgotten_dq(patch):
    differentiate = PallasKernel.differentiate
    patch.setattr(PallasKernel, "differentiate", lambda *given: differentiate(*given[:-1], None))


def one_core(patch):
    gradient = PallasKernel.gradient
    patch.setattr(PallasKernel, "gradient", lambda kernel, dq: gradient(kernel, dq[:1]))


@pytest.mark.parametrize(
    "break_it,found",
    [
        pytest.param(one_key_more, "out of the rectangle", marks=pytest.mark.slow),
        pytest.param(whole_edges, "out of the rectangle", marks=pytest.mark.slow),
        (forgotten_state, "out of the rectangle"),
        pytest.param(forgotten_sums, "dK of the rectangle", marks=pytest.mark.slow),
        pytest.param(forgotten_dq, "dQ of the rectangle", marks=pytest.mark.slow),
        (one_core, "dQ of the rectangle"),
    ],
)
def test_a_broken_kernel_is_found(break_it, found, monkeypatch):
    break_it(monkeypatch)
    assert re.match(found, find() or "nothing")


def test_a_window_that_begins_too_early_is_found(monkeypatch):
    make = pallas_calls.with_blocks
    early = lambda intervals, *given: make(Intervals(jnp.maximum(intervals.lo - 1, 0), intervals.hi), *given)  # noqa: E731
    monkeypatch.setattr(pallas_calls, "with_blocks", early)
    assert re.match("out of the band of 24 keys", find(has_window=True) or "nothing")
