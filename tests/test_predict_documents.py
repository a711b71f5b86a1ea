"""The pairs that documents leave by position, against counts token by token; groups of sequences by their pairs."""

import numpy as np
import pytest

from bench.documents import alike, drawn, packed
from sppo_jax.config import config_from_dict
from sppo_jax.models.counts import chunk_pairs
from sppo_jax.predict.seconds import documents as module
from sppo_jax.predict.seconds.documents import CELLS, NUM_ROWS, documents_of

LENGTH = 4 * CELLS
TINY = dict(vocab_size=256, hidden_size=32, num_layers=2, num_heads=4, mlp_size=64)


def model_of(**settings):
    """Returns a small model."""
    return config_from_dict({"model": TINY | settings, "sequence": {"length": LENGTH}, "train": {"steps": 1}}).model


def random_rows(count, seed=0):
    """Returns the sizes of the pieces of some sequences; the ends of some are padding."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        ends = np.unique(rng.integers(1, LENGTH + 1, rng.integers(1, 9)))
        rows.append(np.diff(np.concatenate([[0], ends])))
    return rows


def counted(row, start, stop, window):
    """Returns the pairs of the queries of a chunk token by token; a token meets half of itself."""
    positions = np.concatenate([*(np.arange(size) for size in row), np.full(LENGTH - sum(row), -0.5)])
    return np.minimum(positions[start:stop] + 0.5, window or LENGTH).sum()


@pytest.mark.parametrize("window", [0, 3, 100])
def test_pairs_of_chunks_are_those_of_the_tokens(window):
    rows = random_rows(NUM_ROWS)
    found = documents_of([packed(rows)], model_of(sliding_window=window), LENGTH)
    for start, stop in ((0, LENGTH), (0, 4), (64, 256), (256, LENGTH)):
        each = sorted(counted(row, start, stop, window) for row in rows)
        pairs = [one.pairs(start, stop - start, window) for one in found.rows]
        assert sorted(pairs) == pytest.approx(each) and found.mean.pairs(start, stop - start, window) == pytest.approx(
            np.mean(each)
        )
    whole = [one.pairs(0, LENGTH, window) for one in found.rows]
    assert whole == pytest.approx(sorted(whole), rel=0.02)


@pytest.mark.parametrize("window", [0, 30])
def test_one_document_has_all_pairs_of_any_chunk(window):
    found = alike(model_of(sliding_window=window), LENGTH, LENGTH).mean
    for start, tokens in ((0, LENGTH), (0, 1), (5, 17), (100, 333), (LENGTH - 1, 1), (LENGTH, 0)):
        assert found.pairs(start, tokens, window) == pytest.approx(chunk_pairs(start, tokens, window))


def test_layers_with_a_window_have_pairs_of_their_own():
    kinds = {"near": {"sliding_window": 16}, "full": {}}
    model = config_from_dict(
        {
            "model": TINY | {"layers": "1x(near,full)", "layer_types": kinds},
            "sequence": {"length": LENGTH},
            "train": {"steps": 1},
        }
    ).model
    found = alike(model, LENGTH, 64).mean
    late = {window: found.pairs(256, 64, window) / chunk_pairs(256, 64, window) for window in (0, 16)}
    assert late[0] == pytest.approx(64 * 32 / (64 * 288)) and 0.8 < late[16] < 1


def test_the_first_chunk_keeps_more_of_its_pairs_than_the_last():
    found = drawn(model_of(), LENGTH, 50).mean
    shares = [found.pairs(start, 64) / chunk_pairs(start, 64) for start in range(0, LENGTH, 64)]
    assert shares[0] > 0.5 > 0.2 > shares[-1] > 0


def test_sequences_of_several_sources_count_by_their_weights():
    long, short = packed([[LENGTH]] * 3, 0.75), packed([[1] * LENGTH] * 5, 0.25)
    found = documents_of([long, short], model_of(), LENGTH)
    pairs = [one.pairs(0, LENGTH) for one in found.rows]
    assert pairs == pytest.approx([LENGTH / 2] * 2 + [LENGTH**2 / 2] * 6)
    assert found.mean_tokens == pytest.approx(LENGTH / (0.75 + 0.25 * LENGTH))
    third = documents_of([long._replace(weight=2 / 3), short._replace(weight=1 / 3)], model_of(), LENGTH)
    # Of the third group a part of two thirds is short.
    assert third.rows[2].pairs(0, LENGTH) == pytest.approx((2 * LENGTH / 2 + LENGTH**2 / 2) / 3)


def test_of_many_sequences_a_sample_counts_by_position(monkeypatch):
    exact = drawn(model_of(), LENGTH, 60, num_rows=512)
    monkeypatch.setattr(module, "_MOST_COUNTED", 64)
    sample = drawn(model_of(), LENGTH, 60, num_rows=512)
    assert sample.attended == exact.attended and sample.rows != exact.rows
    for one, other in zip(sample.rows, exact.rows, strict=True):
        assert one.pairs(0, LENGTH) == pytest.approx(other.pairs(0, LENGTH), rel=0.1)


def test_a_model_without_attention_has_no_pairs():
    found = alike(model_of(mixer="delta"), LENGTH, 10)
    assert found.attended == 1 and found.mean.shares == {}
