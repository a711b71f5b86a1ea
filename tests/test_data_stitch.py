"""Tokens of a document in pieces are those of the whole text, for tokenizers of every kind."""

import ast
import json
import random
from pathlib import Path

import numpy as np
import pytest

from sppo_jax.config import DataConfig
from sppo_jax.data.content import documents as text
from sppo_jax.data.sources import tokenizing
from sppo_jax.data.sources.open_source import load_corpus
from sppo_jax.data.tokens import stitch
from sppo_jax.data.tokens.encoding import BytesEncoder, open_encoder
from sppo_jax.data.tokens.stitch import Stitcher

tokenizers = pytest.importorskip("tokenizers")
from tokenizers import models, normalizers, pre_tokenizers, trainers  # noqa: E402

CODE = "".join(Path(module).read_text(encoding="utf-8") for module in (ast.__file__, random.__file__))
REGEX = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PREPEND = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def of_regex():
    isolated = pre_tokenizers.Split(tokenizers.Regex(REGEX), "isolated")
    return pre_tokenizers.Sequence([isolated, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def bpe(**settings):
    return models.BPE(unk_token="<unk>", **settings), trainers.BpeTrainer


WORDS = pre_tokenizers.Metaspace("\u2581", "always")
# Each like those of a family: model, normalizer, pre-tokenizer.
KINDS = {
    "llama2": (*bpe(byte_fallback=True), PREPEND, None),
    "mistral": (*bpe(byte_fallback=True), None, pre_tokenizers.Metaspace("\u2581", "first", split=False)),
    "gpt2": (*bpe(), None, pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "roberta": (*bpe(), None, pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "llama3": (*bpe(), None, of_regex()),
    "qwen": (*bpe(), normalizers.NFC(), of_regex()),
    "t5": (models.Unigram(), trainers.UnigramTrainer, None, WORDS),
    "bert": (
        models.WordPiece(unk_token="<unk>"),
        trainers.WordPieceTrainer,
        normalizers.BertNormalizer(),
        pre_tokenizers.BertPreTokenizer(),
    ),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Tokenizers of all kinds, trained on a little code; those that take no words are trained on words."""
    folder = tmp_path_factory.mktemp("tokenizers")
    for name, (model, trainer, normalizer, pre_tokenizer) in KINDS.items():
        tokenizer = tokenizers.Tokenizer(model)
        tokenizer.pre_tokenizer = WORDS if name in ("llama2", "mistral") else pre_tokenizer
        of_bytes = BYTES if name in ("llama2", "mistral") else []
        unknown = {"unk_token": "<unk>"} if name == "t5" else {}
        settings = dict(vocab_size=900, special_tokens=["<unk>", "<s>", *of_bytes], show_progress=False, **unknown)
        tokenizer.train_from_iterator(CODE.splitlines(keepends=True), trainer(**settings))
        tokenizer.pre_tokenizer, tokenizer.normalizer = pre_tokenizer, normalizer
        saved = json.loads(tokenizer.to_str())
        saved["added_tokens"] = saved["added_tokens"][:2]
        (folder / f"{name}.json").write_text(json.dumps(saved))
    return folder


TEXTS = {
    "code": CODE,
    "long lines": CODE.replace("\n", " "),
    "no spaces": CODE.replace("\n", "").replace(" ", ""),
    "empty lines": CODE.replace("\n", "\n\n\n  \n"),
    "windows": CODE.replace("\n", "\r\n"),
    "other scripts": "".join(f"{line}\u00e9e\u0301 \u4f60\u597d\U0001f600\U0001f600\n" for line in CODE.splitlines()),
    "special tokens": CODE.replace("return", "<s>return<s>"),
    "spaces": CODE.replace("    ", " " * 300),
}


def in_pieces(encoder, whole, length):
    pieces = list(text._cut(whole[at : at + length] for at in range(0, len(whole), length)))
    assert len(pieces) > 5
    stitcher = Stitcher(encoder)
    # Batches end anywhere, also within a document, and hold short documents too.
    found = [stitcher.encode(pieces[at : at + 3]) for at in range(0, len(pieces), 3)]
    (after,) = stitcher.encode([("def main():\n", True)])
    (alone,) = encoder.encode(["def main():\n"])
    assert after.tolist() == alone.tolist()
    return np.concatenate([tokens for batch in found for tokens in batch])


@pytest.mark.parametrize("kind", TEXTS)
@pytest.mark.parametrize("name", KINDS)
def test_tokens_of_pieces_are_those_of_the_whole(files, monkeypatch, name, kind):
    monkeypatch.setattr(stitch, "_OVERLAP_CHARS", 1024)
    encoder = open_encoder(DataConfig(tokenizer=str(files / f"{name}.json")), vocab_size=10_000)
    whole = TEXTS[kind][:60_000]
    (expected,) = encoder.encode([whole])
    assert in_pieces(encoder, whole, 7_000).tolist() == expected.tolist()


def test_the_cut_would_show_without_the_text_before(files, monkeypatch):
    """What is tested above differs where pieces are encoded on their own."""
    encoder = open_encoder(DataConfig(tokenizer=str(files / "llama2.json")), vocab_size=10_000)
    whole = CODE[:60_000]
    (expected,) = encoder.encode([whole])
    pieces = text._cut(whole[at : at + 7_000] for at in range(0, len(whole), 7_000))
    assert sum(len(tokens) for tokens in encoder.encode([piece for piece, _ in pieces])) > len(expected)


def test_bytes_need_no_text_before():
    assert in_pieces(BytesEncoder(), CODE[:50_000], 5_000).tolist() == list(CODE[:50_000].encode())


@pytest.mark.parametrize("name", ["llama2", "mistral", "roberta", "t5"])
def test_a_long_document_of_a_file_has_the_tokens_of_its_text(files, monkeypatch, tmp_path, name):
    monkeypatch.setattr(text, "_PIECE_CHARS", 9_000)
    monkeypatch.setattr(tokenizing, "_BATCH_CHARS", 10_000)
    documents = ["x = 1\n", CODE[:40_000], "y\n", CODE[5_000:31_000]]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": document}) for document in documents))
    config = DataConfig(source=str(tmp_path / "a.jsonl"), tokenizer=str(files / f"{name}.json"))
    encoder = open_encoder(config, vocab_size=10_000)
    corpus = load_corpus(config, config.source, lambda: encoder, vocab_size=10_000)
    found = [corpus.read(start, end).tolist() for start, end in zip(corpus.starts, corpus.ends, strict=True)]
    assert found == [tokens.tolist() for tokens in encoder.encode(documents)]
