"""Packing keeps every token once, with the right target, positions and documents, in a reproducible order."""

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sppo_jax.attention.validate import validate_batch
from sppo_jax.data.loader import Loader
from sppo_jax.data.packing import Packing
from sppo_jax.data.sources import Corpus

SIZES = st.lists(st.integers(1, 23), min_size=1, max_size=12)


def make_corpus(sizes) -> Corpus:
    """Make documents whose tokens are all different, so that each can be followed."""
    ends = np.cumsum(np.array(sizes, np.int64))
    return Corpus(
        tokens=np.arange(ends[-1], dtype=np.int32), starts=ends - sizes, ends=ends, hashes=np.zeros(len(sizes))
    )


@given(sizes=SIZES, length=st.integers(1, 16), pack=st.booleans(), seed=st.integers(0, 3), epoch=st.integers(0, 2))
@settings(max_examples=200, deadline=None)
def test_an_epoch_holds_every_token_once_with_its_target(sizes, length, pack, seed, epoch):
    corpus = make_corpus(sizes)
    packing = Packing(corpus, length=length, pack=pack, seed=seed, epoch=epoch)
    rows = [packing[index] for index in range(len(packing))]
    batch = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    validate_batch(batch, vocab_size=corpus.num_tokens, num_sequences=len(rows), sequence_length=length)
    real = batch["document_ids"] >= 0
    assert Counter(batch["tokens"][real].tolist()) == Counter(range(corpus.num_tokens))
    last = set((corpus.ends - 1).tolist())
    for token, target in zip(batch["tokens"][real], batch["targets"][real], strict=True):
        assert target == (-1 if token in last else token + 1)
    assert (batch["targets"][~real] == -1).all()
    for row in rows:
        check_row(row, corpus, pack)
    if pack:
        assert len(rows) == -(-corpus.num_tokens // length)


def check_row(row, corpus, pack):
    """A sequence is pieces 0, 1, ..., each a run of one document with positions from 0, then padding."""
    num_real = int((row["document_ids"] >= 0).sum())
    assert num_real > 0 and (row["document_ids"][num_real:] == -1).all()
    pieces = row["document_ids"][:num_real]
    assert pieces.max() == len(set(pieces.tolist())) - 1
    assert pack or pieces.max() == 0
    for piece in range(pieces.max() + 1):
        where = np.flatnonzero(row["document_ids"] == piece)
        tokens = row["tokens"][where]
        assert np.array_equal(row["positions"][where], np.arange(len(where)))
        assert np.array_equal(tokens, tokens[0] + np.arange(len(where)))
        assert len(set(np.searchsorted(corpus.ends, tokens, side="right").tolist())) == 1


@given(
    sizes=SIZES,
    length=st.integers(1, 16),
    num_sequences=st.integers(1, 5),
    stop=st.integers(0, 6),
    seed=st.integers(0, 2),
)
@settings(max_examples=100, deadline=None)
def test_a_loader_goes_on_from_its_state(sizes, length, num_sequences, stop, seed):
    def fresh():
        return Loader(make_corpus(sizes), num_sequences=num_sequences, sequence_length=length, seed=seed)

    whole, first = fresh(), fresh()
    batches = [next(whole) for _ in range(stop + 3)]
    for _ in range(stop):
        next(first)
    second = fresh()
    second.state = first.state
    for expected in batches[stop:]:
        got = next(second)
        assert all(np.array_equal(got[name], expected[name]) for name in expected)
    assert second.state == whole.state


@given(sizes=SIZES, length=st.integers(1, 16))
@settings(max_examples=50, deadline=None)
def test_the_order_does_not_depend_on_the_batch_size(sizes, length):
    corpus = make_corpus(sizes)
    one = Loader(corpus, num_sequences=1, sequence_length=length)
    three = Loader(corpus, num_sequences=3, sequence_length=length)
    for _ in range(4):
        expected = np.concatenate([next(one)["tokens"] for _ in range(3)])
        assert np.array_equal(next(three)["tokens"], expected)


def test_epochs_differ_and_seeds_differ():
    corpus = make_corpus([7] * 40)

    def order(**settings):
        packing = Packing(corpus, length=7, **settings)
        return [int(packing[index]["tokens"][0]) for index in range(len(packing))]

    assert order() == order()
    assert order() != order(epoch=1) != order(seed=1)
    assert sorted(order()) == sorted(order(epoch=1))
