"""One pass over held-out sequences: each once, in one order, on every mesh and in any number of processes."""

import itertools

import numpy as np
import pytest

from sppo_jax.config.data import RecallConfig
from sppo_jax.data.held_out import OnePass, first_numbers, num_held_out
from sppo_jax.data.rows.mixture import Mixture
from sppo_jax.data.rows.recall import VALIDATION, RecallRows

LENGTH = 8


class Numbered:
    """Endless rows of which row n of an epoch has n + 1 targets, and the loss of each is a number of its own."""

    def __init__(self, size, first=0):
        self.size, self.first = size, first

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        number = index % self.size
        at = np.arange(LENGTH, dtype=np.int32)
        targets = np.where(at < 1 + number % LENGTH, at, -1).astype(np.int32)
        tokens = (1 + self.first + number) * 100 + at
        return {"tokens": tokens, "targets": targets, "positions": at, "document_ids": np.zeros(LENGTH, np.int32)}


def losses_of(row):
    return np.where(row["targets"] >= 0, np.sin(row["tokens"] * 1.7), 1e9)  # what has no target must not count


def measured(rows, num_wanted, data, per_shard, num_processes):
    """Returns loss sum and targets as processes that share the rows of each batch by their mesh measure them."""
    chosen, num_sequences = OnePass(rows, num_wanted=num_wanted), data * per_shard
    total, count = 0.0, 0
    for first in range(0, len(chosen), num_sequences):
        batch = [chosen[first + row] for row in range(num_sequences)]
        shards = [batch[shard * per_shard : (shard + 1) * per_shard] for shard in range(data)]
        owners = [shards[process::num_processes] for process in range(num_processes)]
        for row in itertools.chain.from_iterable(itertools.chain.from_iterable(owners)):
            total += losses_of(row)[row["targets"] >= 0].sum()
            count += (row["targets"] >= 0).sum()
    return total, count


@pytest.mark.parametrize("size", range(1, 10))
def test_the_mean_is_exact_for_any_number_of_sequences_on_any_mesh(size):
    rows = Numbered(size)
    for num_wanted in range(1, 21):
        whole = [rows[index] for index in range(min(size, num_wanted))]
        targets = sum((row["targets"] >= 0).sum() for row in whole)
        mean = sum(losses_of(row)[row["targets"] >= 0].sum() for row in whole) / targets
        for data, per_shard, num_processes in itertools.product((1, 2, 3), (1, 2), (1, 2)):
            total, count = measured(rows, num_wanted, data, per_shard, num_processes)
            assert count == targets and total / count == pytest.approx(mean, abs=1e-12)


def test_batches_have_one_shape_and_padding_without_targets():
    chosen = OnePass(Numbered(4), num_wanted=9)
    batches = list(chosen.batches(3))
    assert len(chosen) == 4 and chosen.num_held_out == 4 and len(batches) == 2
    assert all(batch["tokens"].shape == (3, LENGTH) for batch in batches)
    assert {name: np.unique(batches[1][name][1:]).tolist() for name in batches[1]} == {
        "tokens": [0],
        "targets": [-1],
        "positions": [0],
        "document_ids": [-1],
    }
    assert [row[0] // 100 for batch in batches for row in batch["tokens"]] == [1, 2, 3, 4, 0, 0]
    assert list(OnePass(Numbered(4), num_wanted=0).batches(3)) == []


@pytest.mark.parametrize("weights", [(1.0, 1.0), (9.0, 1.0), (0.05, 2.0)])
@pytest.mark.parametrize("sizes", [(3, 40), (1, 1), (30, 2)])
def test_a_mixture_is_read_in_its_own_order_without_what_was_read(sizes, weights):
    mixture = Mixture([Numbered(sizes[0]), Numbered(sizes[1], first=1000)], weights)
    walked = []
    for number in range(50_000):
        source, own = mixture.place(number)
        if own < sizes[source]:
            walked.append(number)
    assert len(walked) == sum(sizes) == num_held_out(mixture)
    for num_wanted in (1, 2, 7, sum(sizes), 100):
        assert first_numbers(mixture, num_wanted).tolist() == walked[:num_wanted]
    chosen = OnePass(mixture, num_wanted=100)
    assert len({int(chosen[index]["tokens"][0]) for index in range(len(chosen))}) == sum(sizes)


def test_sequences_that_are_drawn_have_no_number_and_keep_their_distances():
    rows = RecallRows(RecallConfig(pairs=2, distances=[4]), length=32, vocab_size=300, seed=0, stream=VALIDATION)
    chosen = OnePass(rows, num_wanted=3)
    assert chosen.num_held_out is None and len(chosen) == 3
    *_, last = chosen.batches(2)
    assert (last["distances"][0] > 0).sum() == 2 and not last["distances"][1].any()
    np.testing.assert_array_equal(last["tokens"][0], rows[2]["tokens"])
