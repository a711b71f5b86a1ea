"""Batches hold every sequence once, in one order, whoever reads them and however often they are stopped."""

import numpy as np
import pytest
from data_cases import PACKS, SIZES, make_corpus, stack
from hypothesis import given, settings
from hypothesis import strategies as st

from sppo_jax.data.loader import Loader
from sppo_jax.data.rows.mixture import Mixture
from sppo_jax.data.rows.packing import PackedRows


def same(got, expected) -> bool:
    return got.keys() == expected.keys() and all(np.array_equal(got[name], expected[name]) for name in expected)


@given(
    sizes=SIZES,
    length=st.integers(1, 16),
    pack=PACKS,
    per_process=st.integers(1, 3),
    num_processes=st.lists(st.sampled_from([1, 2, 4]), min_size=1, max_size=4),
    steps=st.lists(st.integers(0, 3), min_size=4, max_size=4),
    ahead=st.integers(0, 3),
    mixed=st.booleans(),
)
@settings(max_examples=80)
def test_any_processes_in_any_sessions_read_the_same_sequences(
    sizes, length, pack, per_process, num_processes, steps, ahead, mixed
):
    """Each session has processes and a batch size of its own, and goes on from the state that the last one left."""
    rows, read, state = PackedRows(make_corpus(sizes), length=length, pack=pack), [], {"sequence": 0}
    if mixed:
        rows = Mixture([rows, PackedRows(make_corpus(sizes, first=1000), length=length, seed=1)], [2, 1])
    for count, num_steps in zip(num_processes, steps, strict=False):
        num_sequences = count * per_process
        loaders = []
        for process in range(count):
            mine = range(process * per_process, (process + 1) * per_process)
            loader = Loader(rows, num_sequences=num_sequences, local_rows=mine, num_batches_ahead=ahead)
            loader.state = state
            loaders.append(loader)
        for _ in range(num_steps):
            parts = [next(loader) for loader in loaders]
            read += [{name: part[name][row] for name in part} for part in parts for row in range(per_process)]
        states = [loader.state for loader in loaders]
        assert all(each == {"sequence": len(read)} for each in states)
        state = states[0]
        for loader in loaders:
            loader.close()
    assert all(same(row, rows[index]) for index, row in enumerate(read))


def test_setting_the_state_goes_back_and_forth():
    rows = PackedRows(make_corpus([5] * 20), length=5)
    loader = Loader(rows, num_sequences=4, local_rows=[1, 3])
    batches = [next(loader) for _ in range(7)]
    for at in (3, 0, 6):
        loader.state = {"sequence": 4 * at}
        assert same(next(loader), batches[at]) and loader.state == {"sequence": 4 * at + 4}
    assert same(batches[6], stack([rows[25], rows[27]]))
    loader.close()


def test_a_row_that_fails_says_so_when_its_batch_is_due():
    class Torn:
        def __len__(self):
            return 100

        def __getitem__(self, index):
            if index == 5:
                raise OSError("the disk is gone")
            return {"tokens": np.full(2, index)}

    loader = Loader(Torn(), num_sequences=2, local_rows=[0, 1])
    assert [int(next(loader)["tokens"][1, 0]) for _ in range(2)] == [1, 3]
    with pytest.raises(OSError, match="the disk is gone"):
        next(loader)
    assert loader.state == {"sequence": 4}
    loader.close()
