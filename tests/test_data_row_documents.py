"""A pre-tokenized row of several documents keeps its boundaries, whatever field marks them."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from row_cases import opened

from sppo_jax.data.content.row_documents import (
    BOUNDS,
    LENGTHS,
    MASK,
    PACKED,
    PACKED_BOUNDS,
    POSITIONS,
    SEGMENTS,
    STARTS,
)
from sppo_jax.data.sources.token_rows import tokens_of

SIZES = (8, 5, 7)


def fields(sizes, padding=0):
    """Returns every field that bounds documents of some sizes, padding behind the last."""
    numbers = np.repeat(np.arange(len(sizes)), sizes).tolist()
    ends = np.cumsum((0, *sizes)).tolist()
    positions = [at for size in sizes for at in range(size)]
    found = {
        MASK: [number + 1 for number in numbers] + [0] * padding,
        **{key: positions + [0] * padding for key in POSITIONS},
        **{key: list(sizes) + ([padding] if padding else []) for key in LENGTHS},
        **{key: [number + 1 for number in numbers] + [0] * padding for key in SEGMENTS},
        **{key: ends[:-1] + ([ends[-1]] if padding else []) for key in STARTS},
        **{key: ends + ([ends[-1] + padding] if padding else []) for key in BOUNDS},
        PACKED: {PACKED_BOUNDS: ends + ([ends[-1] + padding] if padding else []), "right_padding_length": padding},
    }
    return found


KEYS = tuple(fields(SIZES))
# One of each kind: their names have the same meaning.
OF_EACH_KIND = (MASK, POSITIONS[0], LENGTHS[0], SEGMENTS[0], STARTS[0], BOUNDS[0], PACKED)


def sizes_of(row, num_tokens=20, padding=0):
    documents, _ = tokens_of({"input_ids": list(range(10, 10 + num_tokens))} | row, 1000, "a.jsonl line 3")
    joined = np.concatenate([tokens for tokens, _ in documents])
    assert joined.tolist() == list(range(10 + padding, 10 + padding + len(joined)))
    return tuple(len(tokens) for tokens, _ in documents)


def refused(row, *said):
    with pytest.raises(ValueError) as error:
        sizes_of(row)
    told = str(error.value)
    assert "\n" not in told and len(told) < 400 and all(word in told for word in ("a.jsonl line 3", *said)), told


@pytest.mark.parametrize("key", KEYS)
def test_each_field_alone_bounds_documents(key):
    assert sizes_of({key: fields(SIZES)[key]}) == SIZES
    assert sizes_of({key: fields((20,))[key]}) == (20,)
    value = fields(SIZES)[key]
    assert (
        sizes_of({key: {PACKED_BOUNDS: np.array(value[PACKED_BOUNDS])} if key == PACKED else np.array(value)}) == SIZES
    )


@pytest.mark.parametrize("key", KEYS)
def test_padding_behind_documents_is_left_out(key):
    row = {key: fields(SIZES, padding=4)[key], "attention_mask": [1] * 20 + [0] * 4}
    if key == MASK:
        row = {key: fields(SIZES, padding=4)[key]}
    assert sizes_of(row, 24) == SIZES
    if key in (*SEGMENTS, *POSITIONS):
        # Without a mask: segments know padding, and a position of 0 is a document of one token, which has no target.
        assert sizes_of({key: fields(SIZES, padding=4)[key]}, 24) == SIZES
    if key in (*LENGTHS, *STARTS, *BOUNDS):
        # A field may count tokens without the padding too.
        assert sizes_of({key: fields(SIZES)[key], "attention_mask": [1] * 20 + [0] * 4}, 24) == SIZES
        left = {key: fields(SIZES)[key], "attention_mask": [0] * 4 + [1] * 20}
        assert sizes_of(left, 24, padding=4) == (SIZES if key not in STARTS else (4, 5, 11))


@pytest.mark.parametrize(("first", "second"), list(itertools.combinations(OF_EACH_KIND, 2)))
def test_pairs_agree_or_are_refused(first, second):
    one, other = fields(SIZES), fields((8, 6, 6))
    assert sizes_of({first: one[first], second: one[second]}) == SIZES
    refused({first: one[first], second: other[second]}, "must agree", first, second, "differ at token 13")
    refused({first: other[first], second: one[second]}, "must agree", first, second, "differ at token 13")
    refused({first: one[first], second: fields((20,))[second]}) if second != MASK else None


def test_all_fields_at_once():
    assert sizes_of(fields(SIZES)) == SIZES
    assert sizes_of(fields(SIZES, padding=4), 24) == SIZES


@pytest.mark.parametrize(
    ("positions", "sizes"),
    [
        ([*range(3, 11), *range(2, 14)], (8, 12)),
        ([*range(100, 108), *range(100, 112)], (8, 12)),
        ([*range(512, 520), *range(12)], (8, 12)),
        ([*range(20)], (20,)),
        ([*range(7, 27)], (20,)),
    ],
)
def test_positions_may_start_again_anywhere(positions, sizes):
    assert sizes_of({"position_ids": positions}) == sizes


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"position_ids": [*range(8), *range(100, 112)]}, "must rise by 1 or start again, got 100 after 7"),
        ({"position_ids": [list(range(20))] * 3}, "three positions a token"),
        ({"position_ids": [[at] * 3 for at in range(20)]}, "three positions a token"),
        ({"position_ids": list(range(19))}, "as long as the ids, got 19 and 20"),
        ({"attention_mask": [1] * 10 + [-1] * 10}, "attention_mask must be 0 for padding and 1, 2, ..."),
        ({"attention_mask": [1] * 5 + [2] * 5 + [1] * 10}, "got 1 again behind another document"),
        ({"segment_ids": [3] * 5 + [4] * 5 + [3] * 10}, "got 3 again behind another document"),
        ({"segment_ids": [0] * 5 + [4] * 5 + [0] * 10}, "got 0 again behind another document"),
        ({"segment_ids": [1] * 19}, "segment_ids must be as long as the ids, got 19 and 20"),
        (
            {"segment_ids": [1] * 16 + [0] * 4, "attention_mask": [1] * 20},
            "attention_mask and segment_ids that differ at",
        ),
        ({"seq_lengths": [8, 8]}, "must add up to the row's tokens, 20, got 16"),
        ({"seq_lengths": [28, -8]}, "must add up to the row's tokens"),
        ({"seq_lengths": [[8, 12]]}, "must be a list of whole numbers"),
        ({"seq_lengths": [10.5, 9.5]}, "must be a list of whole numbers"),
        ({"seq_start_id": [1, 8]}, "must rise from 0 within the row's tokens, 20, got [1, 8]"),
        ({"seq_start_id": [0, 8, 4]}, "must rise from 0"),
        ({"seq_start_id": []}, "must rise from 0"),
        ({"seq_start_id": [0, 21]}, "must rise from 0"),
        ({"cu_seqlens": [0, 8]}, "must rise from 0 to the number of the row's tokens, 20, got [0, 8]"),
        ({"packing_params": {"sequence_boundaries": [0, 8]}}, "data.ignore_keys=[packing_params]"),
    ],
)
def test_wrong_fields_are_one_line(row, told):
    refused(row, told)


def test_values_that_are_no_bounds_are_passed_over():
    row = {"document_ids": ["a", "b"], "doc_ids": "x", "sequence_id": 7, "lengths": 20, "seq_lens": "20", PACKED: {}}
    assert sizes_of(row) == (20,)
    # A mask with a hole is one document, as it always was.
    assert sizes_of({"attention_mask": [1] * 20}) == (20,)
    documents, _ = tokens_of({"input_ids": [1, 2, 3, 4], "attention_mask": [1, 0, 1, 1]}, 9, "x")
    assert [tokens.tolist() for tokens, _ in documents] == [[1, 3, 4]]
    # Positions that skip are bounds where another field says so.
    skips = {"position_ids": [*range(8), *range(100, 112)], "seq_lengths": [8, 12]}
    assert sizes_of(skips) == (8, 12)


def test_a_mask_beside_starts_is_about_the_next_token():
    ids, mask = [5, 6, 7, 8, 9, 10, 11], [False, True, True, False, True, False, False]
    documents, marks = tokens_of({"input_ids": ids, "loss_mask": mask, "seq_start_id": [0, 4]}, 20, "x")
    assert [(tokens.tolist(), learned.astype(int).tolist()) for tokens, learned in documents] == [
        ([5, 6, 7, 8], [0, 0, 1, 1]),
        ([9, 10, 11], [0, 1, 0]),
    ]
    assert marks == ("loss_mask of the token after its place",)
    plain, _ = tokens_of({"input_ids": ids, "loss_mask": mask, "seq_lengths": [4, 3]}, 20, "x")
    assert plain[0][1].astype(int).tolist() == [0, 1, 1, 0]


@given(st.lists(st.integers(2, 9), min_size=1, max_size=5), st.sampled_from(KEYS), st.integers(0, 3), st.data())
@settings(max_examples=60, deadline=None)
def test_documents_of_a_row_are_those_of_rows_of_their_own(sizes, key, padding, data):
    total = sum(sizes)
    ids = data.draw(st.lists(st.integers(0, 99), min_size=total, max_size=total))
    labels = [token if data.draw(st.booleans()) else -100 for token in ids]
    row = {"input_ids": ids + [0] * padding, "labels": labels + [-100] * padding, key: fields(sizes, padding)[key]}
    if padding and key != MASK:
        row["attention_mask"] = [1] * total + [0] * padding
    found, _ = tokens_of(row, 100, "x")
    firsts = np.cumsum((0, *sizes))
    for at, (tokens, learned) in enumerate(found):
        part = slice(firsts[at], firsts[at + 1])
        ((alone, own),), _ = tokens_of({"input_ids": ids[part], "labels": labels[part]}, 100, "x")
        assert tokens.tolist() == alone.tolist() and learned.tolist() == own.tolist()
    assert len(found) == len(sizes)


@pytest.mark.parametrize("key", OF_EACH_KIND)
def test_packed_rows_in_a_file_are_the_data_of_single_rows(tmp_path, key):
    ids = list(range(10, 30))
    whole = [{"input_ids": ids, "labels": ids, key: fields((8, 12))[key]}] * 3
    single = [{"input_ids": part, "labels": part} for part in (ids[:8], ids[8:])] * 3
    packed, alone = (opened(tmp_path, rows, length=32).sources[0].training for rows in (whole, single))
    assert packed.corpus.digest == alone.corpus.digest
    assert (packed.corpus.starts == alone.corpus.starts).all() and (packed.corpus.ends == alone.corpus.ends).all()
    assert packed.corpus.learned == alone.corpus.learned and alone.corpus.learned.trained_tokens == 54
    for row in range(len(packed)):
        assert all((packed[row][name] == alone[row][name]).all() for name in packed[row])
