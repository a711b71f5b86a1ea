"""Sources give documents of whole tokens, and refuse what is no such thing."""

import gzip
import json
import warnings

import numpy as np
import pytest
from data_cases import write_tokenizer

from sppo_jax.config import DataConfig
from sppo_jax.data.content import documents as text
from sppo_jax.data.rows.corpus import split_corpus
from sppo_jax.data.sources import tokenizing
from sppo_jax.data.sources.open_source import load_corpus
from sppo_jax.data.tokens.encoding import START_TOKEN, open_encoder


def documents(corpus) -> list[list[int]]:
    return [corpus.read(start, end).tolist() for start, end in zip(corpus.starts, corpus.ends, strict=True)]


def load(path, vocab_size=1000, **settings):
    config = DataConfig(source=str(path), **settings)
    return load_corpus(
        config, config.source, lambda: open_encoder(config, vocab_size=vocab_size), vocab_size=vocab_size
    )


def as_bytes(text) -> list[int]:
    return [START_TOKEN, *text.encode()]


def test_the_standard_library_is_there_in_a_fixed_order():
    corpus, again = load("stdlib", 257), load("stdlib", 257)
    assert corpus.num_tokens > 1_000_000
    tokens = corpus.parts[0][:]
    assert np.array_equal(tokens, again.parts[0][:]) and np.array_equal(corpus.hashes, again.hashes)
    assert (tokens[corpus.starts] == START_TOKEN).all()
    assert (tokens == START_TOKEN).sum() == corpus.num_documents
    train, validation = split_corpus(corpus, 0.05)
    assert 0.01 < validation.num_documents / corpus.num_documents < 0.1
    assert not np.isin(validation.starts, train.starts).any()
    assert train.num_documents + validation.num_documents == corpus.num_documents
    with pytest.raises(ValueError, match="use model.vocab_size=257 or more"):
        load("stdlib", 256)


def test_a_directory_holds_files_of_every_kind_in_the_order_of_their_names(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    pa = pytest.importorskip("pyarrow")
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.txt").write_text("h\u00e9\r\n", encoding="utf-8", newline="")
    (tmp_path / "sub" / "c.jsonl").write_text('{"text": "one", "id": 1}\n\n{"text": ""}\n{"text": "t\\u00fc"}\n')
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "zip"}\n'))
    parquet.write_table(pa.table({"text": ["p", None, "q"], "n": [1, 2, 3]}), tmp_path / "d.parquet")
    np.save(tmp_path / "e.npy", np.array([3, 0, 4]))
    (tmp_path / "notes.md").write_text("not read")
    (tmp_path / ".hidden.txt").write_text("not read")
    text = [as_bytes(text) for text in ("zip", "h\u00e9\r\n", "p", "q", "one", "t\u00fc")]
    assert documents(load(tmp_path, separator=0)) == [*text, [3, 0], [4]]
    assert documents(load(tmp_path / "*.txt")) == [as_bytes("h\u00e9\r\n")]
    assert documents(load(tmp_path / "**" / "*.jsonl*")) == [text[0], *text[4:]]
    assert len(set(load(tmp_path, separator=0).hashes.tolist())) == 8


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (
            ["b.csv.gz", "c.csv.gz", "d.csv.zst"],
            "got 3 of other kinds, which are left out (2 .csv.gz, 1 .csv.zst)",
        ),
        (["b.json2"], "1 of other kinds, which are left out (1 .json2)"),
        (["deep/b.csv", "deep/c.CSV", "LICENSE"], "3 of other kinds, which are left out (2 .csv, 1 without a suffix)"),
        ([f"b.kind{number}" for number in range(9)], "and 3 more kinds)"),
        ([".hidden.zst", ".git/b.zst"], None),
        (["b.txt"], None),
    ],
)
def test_files_of_other_kinds_are_counted_and_said(tmp_path, names, told):
    (tmp_path / "a.txt").write_text("x")
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("y")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load(tmp_path)
    assert [told in str(warning.message) for warning in caught] == ([True] if told else [])
    assert not caught or "\n" not in str(caught[0].message)


@pytest.mark.parametrize("source", ["~/a.txt", "~", "~/*.txt", "~/*", "$HOME/a.txt", "${HOME}", "$HOME/*", "~/$SUB/.."])
def test_a_home_directory_may_be_short(tmp_path, monkeypatch, source):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SUB", ".h")
    (tmp_path / ".h").mkdir()
    (tmp_path / "a.txt").write_text("x")
    assert documents(load(source)) == [as_bytes("x")]


def test_bytes_that_are_no_text_are_kept(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xff\x00\xc3")
    assert documents(load(tmp_path / "a.txt")) == [[START_TOKEN, 255, 0, 195]]


@pytest.mark.parametrize("separator", [None, 0, 7])
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "int32"])
def test_token_files(tmp_path, dtype, separator):
    tokens = np.array([5, 6, 0, 1, 0, 0, 9], dtype)
    np.save(tmp_path / "a.npy", tokens)
    tokens.tofile(tmp_path / "a.bin")
    expected = {None: [[5, 6, 0, 1, 0, 0, 9]], 0: [[5, 6, 0], [1, 0], [0], [9]], 7: [[5, 6, 0, 1, 0, 0, 9]]}[separator]
    assert documents(load(tmp_path / "a.npy", separator=separator)) == expected
    assert documents(load(tmp_path / "a.bin", separator=separator, token_dtype=dtype)) == expected


def test_a_separator_at_the_end_opens_no_empty_document(tmp_path):
    np.save(tmp_path / "a.npy", np.array([5, 0]))
    assert documents(load(tmp_path / "a.npy", separator=0)) == [[5, 0]]


def test_files_that_change_are_read_anew(tmp_path):
    for words in ("one", "other"):
        (tmp_path / "a.txt").write_text(words)
        assert documents(load(tmp_path)) == [as_bytes(words)]
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": "x", "body": "y"}))
    assert documents(load(tmp_path))[1] == as_bytes("x")
    for key, words in (("text", "x"), ("body", "y")):
        assert documents(load(tmp_path / "b.jsonl", text_key=key)) == [as_bytes(words)]
    tokenizer = str(write_tokenizer(tmp_path / "tokenizer.json"))
    for end, ids in (("auto", [0, 2]), ("</s>", [0, 2, 1])):
        assert documents(load(tmp_path / "b.jsonl", tokenizer=tokenizer, end_token=end)) == [ids]


def test_a_long_document_begins_and_ends_once(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "_PIECE_CHARS", 16)
    monkeypatch.setattr(tokenizing, "_BATCH_PIECES", 3)
    lines = [json.dumps({"text": "the cat\n" * count}) for count in (1, 40, 2)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    tokenizer = str(write_tokenizer(tmp_path / "tokenizer.json"))
    corpus = load(tmp_path / "a.jsonl", tokenizer=tokenizer, end_token="</s>")
    assert documents(corpus) == [[0, *[3, 4] * count, 1] for count in (1, 40, 2)]


def test_wrong_sources_are_refused(tmp_path):
    (tmp_path / "odd.bin").write_bytes(b"abc")
    (tmp_path / "empty.bin").write_bytes(b"")
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "text.npy").write_bytes(b"no array")
    (tmp_path / "table.csv").write_bytes(b"a,b")
    (tmp_path / "folder").mkdir()
    np.save(tmp_path / "flat.npy", np.zeros((2, 2), np.int32))
    np.save(tmp_path / "real.npy", np.zeros(4))
    np.save(tmp_path / "none.npy", np.zeros(0, np.int32))
    np.save(tmp_path / "large.npy", np.array([1, 1000]))
    np.save(tmp_path / "small.npy", np.array([1, -2]))
    cases = {
        "odd.bin": "whole uint16 tokens, got 3 bytes",
        "empty.bin": "must hold tokens, got none",
        "empty.txt": "must hold tokens, got none",
        "none.npy": "must hold tokens, got none",
        "text.npy": "must be a readable .npy file",
        "flat.npy": "1-D integer array, got int32",
        "real.npy": "1-D integer array, got float64",
        "large.npy": "got 1000 in .*use model.vocab_size=1001 or more",
        "small.npy": "got -2 in",
        "absent.txt": "must be readable, got .*absent.txt .No such file",
        "absent.bin": "must be readable",
        "absent.npy": "must be readable",
        "absent": "must be readable",
        "table.csv": "must be stdlib or .txt, .jsonl, .json, .parquet, .*, .bin or .npy files, got .*table.csv",
        "folder": "must name files that exist, got .*folder with no .txt",
        "*.json": "must name files that exist, got .*json with no .txt",
    }
    for name, message in cases.items():
        with pytest.raises(ValueError, match=message):
            load(tmp_path / name)


def test_a_single_document_is_cut_and_several_are_held_out_whole(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(100))
    train, validation = split_corpus(load(tmp_path / "a.npy"), 0.1)
    assert documents(train) == [list(range(90))] and documents(validation) == [list(range(90, 100))]
    np.save(tmp_path / "two.npy", np.array([1, 0, 2, 0]))
    train, validation = split_corpus(load(tmp_path / "two.npy", separator=0), 0.0001)
    assert sorted(documents(train) + documents(validation)) == [[1, 0], [2, 0]]
    assert train.num_documents == validation.num_documents == 1
    assert split_corpus(load(tmp_path / "a.npy"), 0.0)[1] is None
    np.save(tmp_path / "one.npy", np.array([1]))
    with pytest.raises(ValueError, match="at least two tokens"):
        split_corpus(load(tmp_path / "one.npy"), 0.5)
