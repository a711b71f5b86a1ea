"""A mixture keeps its shares in every stretch, and every source its own epochs."""

import numpy as np
import pytest
from data_cases import make_corpus, real_tokens
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sppo_jax.data.loader import Loader
from sppo_jax.data.rows.mixture import BLOCK, Mixture, block_counts
from sppo_jax.data.rows.packing import PackedRows


class Numbers:
    """Sequences that say which they are."""

    def __init__(self, size, source=0):
        self.size, self.source = size, source

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return {"tokens": np.array([self.source, index], np.int32)}


@given(weights=st.lists(st.floats(0.01, 5), min_size=1, max_size=5), start=st.integers(0, 3 * BLOCK))
@example(weights=[1, 2, 0.3], start=2 * BLOCK - 20)
@settings(max_examples=60)
def test_every_source_is_read_in_order_and_in_its_share(weights, start):
    mixture = Mixture([Numbers(7, source) for source in range(len(weights))], weights)
    drawn = mixture.num_drawn(start)
    assert sum(drawn) == start
    share = np.array(weights) / sum(weights)
    for index in range(start, start + 50):
        source, own = mixture.place(index)
        assert own == drawn[source] and mixture[index]["tokens"].tolist() == [source, own]
        drawn[source] += 1
        # Never far from the exact share: a sequence or two, and what rounding to a block costs.
        exact = share * (index + 1)
        assert (np.abs(np.array(drawn) - exact) <= len(weights) + (index + 1) / BLOCK).all()


@given(sizes=st.lists(st.integers(1, 400), min_size=1, max_size=4), data=st.data())
@settings(max_examples=60)
def test_an_epoch_ends_when_every_source_has_been_seen_whole(sizes, data):
    weights = [data.draw(st.floats(0.1, 3)) for _ in sizes]
    mixture = Mixture([Numbers(size) for size in sizes], weights)
    drawn = mixture.num_drawn(len(mixture))
    assert all(count >= size for count, size in zip(drawn, sizes, strict=True))
    before = mixture.num_drawn(len(mixture) - 1)
    assert any(count < size for count, size in zip(before, sizes, strict=True))


@pytest.mark.parametrize("pack", ["whole", "stream", "none"])
def test_each_source_keeps_its_own_epochs_over_stops(pack):
    sizes = {0: [5, 9, 3, 30, 8], 1000: [2, 2, 60], 2000: [17]}
    sources = [PackedRows(make_corpus(each, first=first), length=8, pack=pack) for first, each in sizes.items()]
    mixture, state, read = Mixture(sources, [3, 1, 0.5]), {"sequence": 0}, []
    while len(read) < 90:
        loader = Loader(mixture, num_sequences=3, local_rows=range(3))
        loader.state = state
        for _ in range(2):
            batch = next(loader)
            read += [{name: batch[name][row] for name in batch} for row in range(3)]
        state = loader.state
        loader.close()
    for source, first in zip(sources, sizes, strict=True):
        mine = [row for row in read if first <= row["tokens"][0] < first + 1000]
        for epoch in range(len(mine) // len(source)):
            once = real_tokens(mine[epoch * len(source) : (epoch + 1) * len(source)])
            assert once == list(range(first, first + sum(sizes[first])))
    assert min(mixture.num_drawn(90)) >= 10


def test_shares_are_met_by_largest_remainders():
    assert block_counts([1, 1, 1]).tolist() == [3334, 3333, 3333]
    assert block_counts([0.7, 0.3]).tolist() == [7000, 3000]
    with pytest.raises(ValueError, match="at least one of 10000 sequences, got a weight of 1e-06"):
        block_counts([1, 1e-6])
