"""Packing keeps every token once, with the right target, positions and documents, in a reproducible order."""

import numpy as np
import pytest
from data_cases import PACKS, SIZES, make_corpus, real_tokens, stack
from hypothesis import given, settings
from hypothesis import strategies as st

from sppo_jax.attention.validate import validate_batch
from sppo_jax.data.rows.packing import PackedRows


@given(
    sizes=SIZES,
    length=st.integers(1, 16),
    pack=PACKS,
    seed=st.integers(0, 3),
    epoch=st.integers(0, 2),
    num_parts=st.integers(1, 3),
)
@settings(max_examples=150)
def test_an_epoch_holds_every_token_once_with_its_target(sizes, length, pack, seed, epoch, num_parts):
    corpus = make_corpus(sizes, num_parts)
    packed = PackedRows(corpus, length=length, pack=pack, seed=seed)
    rows = [packed[epoch * len(packed) + row] for row in range(len(packed))]
    batch = stack(rows)
    validate_batch(batch, vocab_size=corpus.num_tokens, num_sequences=len(rows), sequence_length=length)
    assert real_tokens(rows) == list(range(corpus.num_tokens))
    real = batch["document_ids"] >= 0
    last = set((corpus.ends - 1).tolist())
    for token, target in zip(batch["tokens"][real], batch["targets"][real], strict=True):
        assert target == (-1 if token in last else token + 1)
    assert (batch["targets"][~real] == -1).all()
    for row in rows:
        check_row(row, corpus, pack)
    if pack == "stream":
        assert len(rows) == -(-corpus.num_tokens // length)
        assert packed.layout.num_split <= len(rows) - 1
    else:
        num_pieces = np.bincount([np.searchsorted(corpus.ends, b, side="right") for b in packed.layout.begins])
        assert num_pieces.tolist() == [-(-size // length) for size in sizes]
        assert packed.layout.num_split == sum(size > length for size in sizes)


def check_row(row, corpus, pack):
    """A sequence is pieces 0, 1, ..., each a run of one document with positions from 0, then padding."""
    num_real = int((row["document_ids"] >= 0).sum())
    assert num_real > 0 and (row["document_ids"][num_real:] == -1).all()
    pieces = row["document_ids"][:num_real]
    assert pieces.max() == len(set(pieces.tolist())) - 1
    assert pack != "none" or pieces.max() == 0
    for piece in range(pieces.max() + 1):
        where = np.flatnonzero(row["document_ids"] == piece)
        tokens = row["tokens"][where]
        assert np.array_equal(row["positions"][where], np.arange(len(where)))
        assert np.array_equal(tokens, tokens[0] + np.arange(len(where)))
        assert len(set(np.searchsorted(corpus.ends, tokens, side="right").tolist())) == 1


@pytest.mark.parametrize("pack", ["whole", "stream", "none"])
def test_epochs_differ_and_seeds_differ(pack):
    corpus = make_corpus([7] * 40)

    def order(epoch=0, seed=0):
        packed = PackedRows(corpus, length=7, pack=pack, seed=seed)
        return [int(packed[epoch * 40 + row]["tokens"][0]) for row in range(40)]

    orders = [order(), order(epoch=1), order(seed=1), list(range(0, 280, 7))]
    assert order() == orders[0]
    assert all(sorted(order) == orders[-1] for order in orders)
    for one in range(4):
        for other in range(one):
            assert sum(a == b for a, b in zip(orders[one], orders[other], strict=True)) < 10


@pytest.mark.parametrize("pack", ["whole", "stream", "none"])
def test_rows_that_are_not_filled_have_padding_behind_their_tokens(pack):
    corpus = make_corpus([5, 11, 3, 3, 9, 30, 2])
    rows = PackedRows(corpus, length=12, pack=pack, fill=0.8)
    batches = [rows[index] for index in range(len(rows))]
    assert all((batch["document_ids"][9:] == -1).all() and len(batch["tokens"]) == 12 for batch in batches)
    assert sum(int((batch["document_ids"] >= 0).sum()) for batch in batches) == 63
    assert rows.has_one_document == all(batch["document_ids"].max() == 0 for batch in batches) == (pack == "none")
