"""Files of tokens that were written in another dtype, with a header, or without the separator."""

import gzip
import io
import struct
import warnings
import zipfile

import numpy as np
import pytest

from sppo_jax.config import DataConfig
from sppo_jax.data.sources.open_source import load_corpus


def load(path, vocab_size=50_000, **settings):
    """Returns the documents of a source, and the warnings."""
    config = DataConfig(source=str(path), **settings)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        corpus = load_corpus(config, config.source, lambda: None, vocab_size=vocab_size)
    return corpus, [str(warning.message) for warning in caught]


def tokens_below(vocab_size, count=1000, dtype=np.uint16):
    rng = np.random.default_rng(0)
    return (vocab_size * rng.random(count) ** 6).astype(dtype)


@pytest.mark.parametrize(
    ("dtype", "separator", "most"), [("uint8", 256, 255), ("uint16", 70_000, 65_535), ("uint16", 100_257, 65_535),
                                     ("uint32", 2**32, 2**32 - 1), ("int32", 2**31, 2**31 - 1)]
)  # fmt: skip
@pytest.mark.parametrize("suffix", [".bin", ".npy"])
def test_a_separator_that_the_dtype_cannot_hold_is_refused(tmp_path, dtype, separator, most, suffix):
    values = np.ones(9, dtype)
    path = tmp_path / f"a{suffix}"
    values.tofile(path) if suffix == ".bin" else np.save(path, values)
    change = "set data.token_dtype" if suffix == ".bin" else "write the file in a wider dtype"
    with pytest.raises(ValueError, match=f"{dtype} can hold, at most {most}, got {separator} for .*; {change}"):
        load(path, separator=separator, token_dtype=dtype)


@pytest.mark.parametrize("suffix", [".bin", ".npy"])
def test_a_separator_that_never_occurs_is_told_of_once(tmp_path, suffix):
    for name, values in (("a", [1, 2, 0, 3]), ("b", [1, 2]), ("c", [3, 3]), ("d", [0])):
        array = np.array(values, np.uint16)
        array.tofile(tmp_path / f"{name}.bin") if suffix == ".bin" else np.save(tmp_path / name, array)
    corpus, (told,) = load(tmp_path, separator=0)
    assert corpus.num_documents == 5
    assert "data.separator=0 never occurs" in told and f"b{suffix} and 1 more files" in told and "\n" not in told
    assert load(tmp_path, separator=None)[1] == [] == load(tmp_path / f"a{suffix}", separator=0)[1]


@pytest.mark.parametrize(
    ("vocab_size", "written", "read", "told"),
    [
        (50_000, "uint32", "uint16", "every second token is 0 or nearly so"),
        (50_000, "int64", "uint16", "every second token is 0 or nearly so"),
        (50_000, "int64", "uint32", "every second token is 0 or nearly so"),
        (50_000, "int64", "int32", "every second token is 0 or nearly so"),
        (300, "uint16", "uint8", "every second token is 0 or nearly so"),
        (151_936, "uint32", "uint16", "data.token_dtype=uint16 cannot hold every token of model.vocab_size=151936"),
        (128_256, "uint16", "uint16", "data.token_dtype=uint16 cannot hold every token of model.vocab_size=128256"),
        (50_000, "uint8", "uint8", "data.token_dtype=uint8 cannot hold every token of model.vocab_size=50000"),
    ],
)
def test_a_dtype_that_is_too_narrow_is_told_of(tmp_path, vocab_size, written, read, told):
    most = min(vocab_size, np.iinfo(written).max)
    for name in ("a.bin", "b.bin"):
        tokens_below(most, dtype=written).tofile(tmp_path / name)
    _, (line,) = load(tmp_path, vocab_size, token_dtype=read)
    assert told in line and "set data.token_dtype to the dtype of the file" in line and "a.bin and 1 more" in line


@pytest.mark.parametrize(
    ("vocab_size", "values", "dtype"),
    [
        (50_000, tokens_below(50_000), "uint16"),
        (151_936, tokens_below(151_936, dtype=np.uint32), "uint32"),
        (257, tokens_below(256, dtype=np.uint8), "uint8"),  # bytes, and a token that no byte is
        (24, (np.arange(1000) % 23).astype(np.uint16), "uint16"),
        (50_000, np.zeros(1000, np.uint16), "uint16"),
        (50_000, np.array([5, 0] * 9, np.uint16), "uint16"),  # too few to tell
    ],
)
def test_a_dtype_that_suits_is_not(tmp_path, vocab_size, values, dtype):
    values.tofile(tmp_path / "a.bin")
    assert load(tmp_path / "a.bin", vocab_size, token_dtype=dtype)[1] == []


def zipped():
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as out:
        out.writestr("data.pkl", "x" * 99)
    return file.getvalue()


def saved():
    file = io.BytesIO()
    np.save(file, np.arange(50))
    return file.getvalue()


HEADERS = {
    "a .npy file": (saved(), "a .npy file"),
    "weights": (zipped(), "a .zip file, such as weights of PyTorch"),
    "llm.c, GPT-2": (struct.pack("<256i", 20240520, 1, 40, *[0] * 253) + bytes(80), "a file with the header of llm.c"),
    "llm.c, Llama 3": (struct.pack("<256i", 20240801, 7, 40, *[0] * 253) + bytes(160), "the header of llm.c"),
    "gzip": (gzip.compress(bytes(500)).ljust(100, b"\0"), "a .gz file"),
    "zstd": (b"\x28\xb5\x2f\xfd" + bytes(60), "a .zst file"),
    "parquet": (b"PAR1" + bytes(60), "a .parquet file"),
    "an index": (b"MMIDIDX\x00\x00" + bytes(63), "an index of Megatron"),
}


@pytest.mark.parametrize("kind", HEADERS)
def test_other_files_with_the_suffix_are_refused_by_what_they_are(tmp_path, kind):
    content, what = HEADERS[kind]
    (tmp_path / "a.bin").write_bytes(content)
    with pytest.raises(ValueError, match=f"must hold tokens and no header, got .*{what}.* in .*a.bin"):
        load(tmp_path)
