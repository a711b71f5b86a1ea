"""Rows of tokens from other tools: labels and masks become what is learned."""

import json

import numpy as np
import pytest

from sppo_jax.config import config_from_dict
from sppo_jax.data.open import open_data
from sppo_jax.data.tokens.mask_bit import split_words

IDS = [5, 6, 7, 8, 9]
LABELS = [-100, -100, 7, -100, 9]


def opened(path, rows, *, vocab_size=257, length=16, **data):
    if path.suffix == ".parquet":
        pa = pytest.importorskip("pyarrow")
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    shape = {"vocab_size": vocab_size, "hidden_size": 8, "num_layers": 1, "num_heads": 1, "mlp_size": 8}
    settings = {"source": str(path), "validation_fraction": 0, "cache": str(path.parent / "cache")} | data
    return open_data(
        config_from_dict({"model": shape, "data": settings, "sequence": {"length": length}, "train": {"steps": 1}})
    )


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize(
    ("more", "learned"),
    [
        ({"labels": LABELS}, [0, 0, 1, 0, 1]),
        ({"loss_mask": [0, 0, 1, 0, 1]}, [0, 0, 1, 0, 1]),
        ({"labels_mask": [False, False, True, False, True]}, [0, 0, 1, 0, 1]),
        ({"labels": LABELS, "attention_mask": [0, 1, 1, 1, 0]}, [0, 1, 0]),
        ({"loss_mask": [0.0, 0.0, 1.0, 0.0, 1.0]}, [0, 0, 1, 0, 1]),
        ({"loss_weights": [0, 0, 1, 0, 1], "special_tokens_mask": [1, 0, 0, 0, 0]}, [0, 0, 1, 0, 1]),
        ({"completion_mask": [0, 0, 1, 1, 1], "assistant_masks": [1, 1, 1, 0, 1]}, [0, 0, 1, 0, 1]),
        ({"labels": [-100, 6, 7, 8, 9], "loss_mask": [0, 0, 1, 0, 1], "weight": 1}, [0, 0, 1, 0, 1]),
        ({}, [1, 1, 1, 1, 1]),
    ],
)
def test_labels_and_masks_are_what_is_learned(tmp_path, suffix, more, learned):
    data = opened(tmp_path / f"a{suffix}", [{"input_ids": IDS} | more] * 3)
    tokens = IDS[1:4] if "attention_mask" in more else IDS
    corpus = data.sources[0].training.corpus
    for start, end in zip(corpus.starts, corpus.ends, strict=True):
        words = split_words(corpus.read(start, end))
        assert [words[0].tolist(), words[1].astype(int).tolist()] == [tokens, learned]
    targets = np.concatenate([data.training[row]["targets"] for row in range(len(data.training))])
    wanted = [token for token, learns in zip(tokens[1:], learned[1:], strict=True) if learns]
    assert sorted(targets[targets >= 0].tolist()) == sorted(3 * wanted)
    assert corpus.learned.trained_tokens == 3 * len(wanted)


def test_rows_without_a_target_are_left_out_and_other_labels_are_other_data(tmp_path):
    rows = [{"input_ids": IDS, "labels": LABELS}, {"input_ids": IDS, "labels": [5, -100, -100, -100, -100]}]
    with pytest.warns(UserWarning, match="got 1 of 2 without, which are left out"):
        data = opened(tmp_path / "a.jsonl", rows)
    assert data.sources[0].training.corpus.num_documents == 1
    rows = [{"input_ids": IDS, "labels": IDS}]
    assert opened(tmp_path / "b.jsonl", rows).fingerprint != opened(
        tmp_path / "c.jsonl", [rows[0] | {"labels": LABELS}]
    )
    with pytest.raises(ValueError, match="rows of tokens with something to learn, got 1 without"):
        opened(tmp_path / "d.jsonl", [{"input_ids": IDS, "labels": [-100] * 5}])


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"ids": IDS, "input": 1}, "a row of tokens must have input_ids, got keys ids, input in .*line 1"),
        (
            {"input_ids": IDS, "labels": [*LABELS[1:], -100]},
            "got 7 for token 6 at place 1 in .*line 1; do not shift them",
        ),
        ({"input_ids": IDS, "labels": LABELS[1:]}, "labels must be as long as the ids, got 4 and 5 in .*line 1"),
        ({"input_ids": IDS, "loss_mask": [1]}, "loss_mask must be as long as the ids, got 1 and 5"),
        ({"input_ids": IDS, "loss_mask": [0, -1, -1, 1, 1]}, "loss_mask must hold 0 and 1 .*, got -1 in .*line 1"),
        ({"input_ids": IDS, "loss_mask": [0, 0.5, 1, 1, 1]}, "loss_mask must hold 0 and 1 .*, got 0.5 in .*line 1"),
        ({"input_ids": IDS, "loss_weights": [0.5] * 5}, r"loss_weights must hold .*ignore_keys=\[loss_weights\]"),
        ({"input_ids": IDS, "loss_weights": [1] * 4}, "loss_weights must be as long as the ids, got 4 and 5"),
        ({"input_ids": IDS, "labels": LABELS, "assistant_mask": [2] * 5}, "assistant_mask must hold 0 and 1"),
        ({"input_ids": IDS, "weight": 0.5}, r"weight must be 0 or 1 .*ignore_keys=\[weight\]"),
        ({"input_ids": IDS, "answer_start_idx": 3}, "write it as `loss_mask`"),
        ({"input_ids": IDS, "target_mask": [1] * 5}, "target_mask must be a key that is obeyed"),
        ({"input_ids": [5, 600]}, r"input_ids must lie in 0..256 \(model.vocab_size = 257\), got 600 in .*line 1"),
        ({"input_ids": [[5], [6]]}, "input_ids must be a list of whole numbers"),
        ({"input_ids": "abc"}, "input_ids must be a list of whole numbers"),
        ({"input_ids": [1.5, 2]}, "input_ids must be a list of whole numbers"),
    ],
)
def test_wrong_rows_are_one_line(tmp_path, row, told):
    with pytest.raises(ValueError, match=told) as error:
        opened(tmp_path / "a.jsonl", [row], format="tokens")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "form"), [("a.bin", "chat"), ("a.bin", "text"), ("a.txt", "chat"), ("a.txt", "tokens")]
)
def test_a_format_that_a_file_cannot_have_is_refused(tmp_path, name, form):
    (tmp_path / name).write_bytes(b"ab")
    shape = {"vocab_size": 257, "hidden_size": 8, "num_layers": 1, "num_heads": 1, "mlp_size": 8}
    data = {"source": str(tmp_path / name), "format": form, "cache": str(tmp_path / "cache")}
    config = config_from_dict({"model": shape, "data": data, "sequence": {"length": 4}, "train": {"steps": 1}})
    with pytest.raises(ValueError, match=f"where data.format is {form}, got .*{name}; leave out the file"):
        open_data(config)
