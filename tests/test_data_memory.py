"""What opening data takes: few bytes a document for the layout, and of the text a few blocks."""

import json
import tracemalloc

import numpy as np
import pytest

from sppo_jax.config import DataConfig, config_from_dict
from sppo_jax.data.content import documents as text
from sppo_jax.data.forms import json_rows
from sppo_jax.data.open import open_data
from sppo_jax.data.rows import best_fit, corpus, packing
from sppo_jax.data.sources import tokenizing
from sppo_jax.data.sources.open_source import load_corpus
from sppo_jax.data.tokens.encoding import open_encoder


def peak_bytes(action):
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("length", [4096, 64])
def test_a_layout_takes_64_bytes_a_document_at_most(tmp_path, monkeypatch, length):
    for module in (best_fit, corpus, packing):
        monkeypatch.setattr(module, "_BLOCK", 1 << 10)
    count = 100_000
    sizes = np.random.default_rng(0).integers(1, 70, count)
    tokens = np.ones(int(sizes.sum()), np.uint16)
    tokens[np.cumsum(sizes) - 1] = 0
    tokens.tofile(tmp_path / "a.bin")
    config = config_from_dict(
        {
            "model": {"vocab_size": 300, "hidden_size": 8, "num_layers": 1, "num_heads": 1, "mlp_size": 8},
            "sequence": {"length": length},
            "train": {"steps": 1},
            "data": {"source": str(tmp_path / "a.bin"), "separator": 0, "cache": str(tmp_path / "cache")},
        }
    )
    open_data(config)  # the file is looked through once
    assert peak_bytes(lambda: open_data(config)) <= 64 * count + (1 << 20)


@pytest.mark.parametrize("form", ["a.txt", "a.jsonl", "a.json"])
def test_text_is_never_read_whole(tmp_path, monkeypatch, form):
    monkeypatch.setattr(text, "_PIECE_CHARS", 1 << 12)
    monkeypatch.setattr(tokenizing, "_BATCH_CHARS", 1 << 12)
    monkeypatch.setattr(json_rows, "_BLOCK_BYTES", 1 << 12)
    monkeypatch.setattr(corpus, "_BLOCK", 1 << 10)
    peaks = []
    for count in (10, 1000, 10_000):  # the first one imports and compiles what the others use
        lines = [f"line {number} of a text\n" for number in range(count)]
        rows = [json.dumps({"text": line}) for line in lines]
        content = {"a.txt": "".join(lines), "a.jsonl": "\n".join(rows), "a.json": f"[{','.join(rows)}]"}[form]
        folder = tmp_path / str(count)
        folder.mkdir()
        (folder / form).write_text(content)
        del content, rows, lines
        config = DataConfig(source=str(folder / form), cache=str(folder / "cache"))
        encoder = open_encoder(config, vocab_size=300)
        peaks.append(peak_bytes(lambda config=config, e=encoder: load_corpus(
            config, config.source, lambda: e, vocab_size=300)))  # fmt: skip
    documents = 0 if form == "a.txt" else 9000
    assert peaks[2] - peaks[1] < 50_000 + 8 * documents, peaks
