"""Packing by sizes gives the very bins that placing one item after another gives."""

from bisect import bisect_left, insort

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sppo_jax.data.rows.best_fit import best_fit


def one_by_one(sizes, capacity) -> list[int]:
    """Best-fit-decreasing as in a textbook; returns the space left in each bin."""
    rooms: list[int] = []
    for size in sorted(sizes, reverse=True):
        at = bisect_left(rooms, size)
        room = rooms.pop(at) if at < len(rooms) else capacity
        insort(rooms, room - size)
    return rooms


@given(data=st.data(), capacity=st.integers(1, 40))
@settings(max_examples=150)
def test_bins_are_those_of_best_fit_decreasing(data, capacity):
    sizes = np.array(data.draw(st.lists(st.integers(1, capacity), min_size=1, max_size=60)))
    items, firsts = best_fit(sizes, capacity)
    assert sorted(items.tolist()) == list(range(len(sizes)))
    assert firsts[0] == 0 and firsts[-1] == len(sizes) and (np.diff(firsts) > 0).all()
    rooms = [capacity - int(sizes[items[a:b]].sum()) for a, b in zip(firsts[:-1], firsts[1:], strict=True)]
    assert sorted(rooms) == one_by_one(sizes.tolist(), capacity)


def test_many_items_of_few_sizes_take_few_steps():
    sizes = np.random.default_rng(0).integers(1, 50, 200_000)
    items, firsts = best_fit(sizes, 1000)
    filled = np.add.reduceat(sizes[items], firsts[:-1])
    assert filled.max() <= 1000 and filled[:-1].mean() > 999
