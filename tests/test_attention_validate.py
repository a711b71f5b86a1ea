"""The batch contract: each rule is broken once."""

import numpy as np
import pytest
from exactness import random_batch

from sppo_jax.attention.validate import check_one_document, validate_batch


def check(batch, **settings):
    validate_batch(batch, vocab_size=20, num_sequences=2, sequence_length=30, **settings)


@pytest.fixture
def batch():
    return random_batch(np.random.default_rng(0), 2, 30, 20, documents=3, padding=4)


def test_a_good_batch_passes(batch):
    check(batch)
    check(batch, contiguous=True)


@pytest.mark.parametrize(
    ("key", "where", "value", "message"),
    [
        ("tokens", (0, 3), 20, "'tokens' must lie in 0..19"),
        ("targets", (1, 0), -2, "'targets' must lie in -1..19"),
        ("positions", (0, 0), -1, "'positions' must not be negative"),
        (
            "targets",
            (1, 28),
            3,
            r"padding \(document_ids of -1\) must have no target, got one at token 28",
        ),
        ("document_ids", (0, 0), 7, "document_ids must not decrease"),
        ("positions", (1, 29 - 4), 0, "positions must increase within a document"),
    ],
)
def test_broken_rules_say_what_to_change(batch, key, where, value, message):
    batch[key][where] = value
    with pytest.raises(ValueError, match=message):
        check(batch)


def test_only_bands_of_the_fused_kernel_want_each_position_of_a_document(batch):
    check(batch, consecutive=True)
    batch["positions"][0] *= 2
    check(batch)
    with pytest.raises(ValueError, match="positions must rise by one .*, got a larger step in sequence 0; number the"):
        check(batch, consecutive=True)


def test_missing_keys_and_wrong_shapes(batch):
    with pytest.raises(ValueError, match="'tokens' must have the plan's shape"):
        validate_batch(batch, vocab_size=20, num_sequences=2, sequence_length=31)
    del batch["targets"]
    with pytest.raises(ValueError, match="no 'targets'"):
        check(batch)


def test_a_second_document_is_refused_where_sequences_hold_one(batch):
    rows = random_batch(np.random.default_rng(0), 2, 30, 20, documents=1, padding=4)
    rows["document_ids"][0], rows["targets"][0] = -1, -1  # padding alone
    check_one_document(rows["document_ids"])
    rows["document_ids"][1, :20] += 1
    rows["document_ids"][1, 20:26] += 4
    message = (
        "a sequence must hold one document at most .*, got documents 1 and 4 in sequence 1; give each document a "
        "sequence of its own, or plan with data.pack=whole"
    )
    check(rows)
    for wrong, words in ((rows, message), (batch, "a sequence must hold one document at most")):
        with pytest.raises(ValueError, match=words):
            check_one_document(wrong["document_ids"])


def test_only_the_fused_kernel_wants_documents_in_one_piece(batch):
    first = np.flatnonzero(batch["document_ids"][1] == 0)
    for key in ("document_ids", "targets"):
        batch[key][1, first[len(first) // 2]] = -1
    check(batch)
    with pytest.raises(ValueError, match="padding within a document of sequence 1; move padding between documents"):
        check(batch, contiguous=True)
