"""Corpora of document lengths, and a user's own list."""

import numpy as np
import pytest

from sppo_jax.flex.lengths import (
    corpora,
    padded,
    read_lengths,
    sample_lengths,
    wikipedia_documents,
)
from studies.flexsp_cells import stratified_lengths

RULE = "one whole number of at least 1 per line"


def test_wikipedia_is_the_published_list():
    corpus = corpora()["wikipedia"]
    assert len(corpus.shares) == 426 and corpus.shares[0] == 0 and corpus.shares[-1] == 1
    assert list(corpus.tokens) == sorted(corpus.tokens) and corpus.tokens[-1] == 1_823_777
    lengths = stratified_lengths(corpus, count=20_000, seed=0, longest=2_000_000)
    assert lengths.mean() == pytest.approx(1013.6, rel=0.02)
    assert np.median(sample_lengths(corpus, count=20_000, seed=0)) == pytest.approx(np.median(lengths), rel=0.03)


def test_the_first_documents_of_wikipedia_follow_its_distribution():
    lengths = wikipedia_documents()
    assert len(lengths) == 26_112 and lengths[:5].tolist() == [368, 99, 1330, 945, 188] and lengths.min() >= 1
    corpus, shares = corpora()["wikipedia"], (np.arange(len(lengths)) + 0.5) / len(lengths)
    # Kolmogorov-Smirnov distance of a sample: 1.63 / sqrt(26112) = 0.010 in one sample of a hundred.
    assert np.abs(np.interp(np.sort(lengths), corpus.tokens, corpus.shares) - shares).max() < 0.010


def test_guesses_are_named_so():
    for name, corpus in corpora().items():
        assert name.endswith("-assumed") == corpus.assumed
        assert list(corpus.shares) == sorted(corpus.shares) and list(corpus.tokens) == sorted(corpus.tokens)


@pytest.mark.parametrize("name", corpora())
def test_lengths_depend_on_the_seed_alone(name):
    draw = [sample_lengths(corpora()[name], count=50, seed=seed, longest=4096, multiple=128) for seed in (3, 3, 4)]
    assert draw[0].tolist() == draw[1].tolist() != draw[2].tolist()
    assert draw[0].dtype == np.int64 and draw[0].max() <= 4096 and not (draw[0] % 128).any()


def test_the_numbers_are_those_of_every_machine():
    assert sample_lengths(corpora()["wikipedia"], count=5, seed=0).tolist() == [1412, 895, 260, 150, 360]


def test_stratified_lengths_hold_each_share_once():
    corpus = corpora()["wikipedia"]
    shares = np.interp(
        stratified_lengths(corpus, count=1000, seed=1, longest=192_000) + 0.5, corpus.tokens, corpus.shares
    )
    assert np.abs(np.sort(shares) - (np.arange(1000) + 0.5) / 1000).max() < 0.006


def test_a_limit_below_all_lengths_is_refused():
    with pytest.raises(ValueError, match="longest must be at least 128, the shortest length, got 64"):
        sample_lengths(corpora()["wikipedia"], count=1, seed=0, longest=64, multiple=128)


def test_padding():
    assert padded(np.array([1, 128, 129]), 128).tolist() == [128, 128, 256]


def test_a_users_list(tmp_path):
    (tmp_path / "a.txt").write_text("5\n\n 17 \r\n+3\n")
    assert read_lengths(tmp_path / "a.txt").tolist() == [5, 17, 3]
    np.save(tmp_path / "a.npy", np.array([4, 9], np.uint16))
    found = read_lengths(tmp_path / "a.npy")
    assert found.tolist() == [4, 9] and found.dtype == np.int64


@pytest.mark.parametrize("word", ["-3", "0", "nan", "1.5", "many", "1e3", "9" * 30, "\u0663"])
def test_a_wrong_line_is_named(tmp_path, word):
    (tmp_path / "a.txt").write_text(f"5\n{word}\n", encoding="utf-8")
    with pytest.raises(ValueError, match=f"{RULE}.*a.txt, line 2.*replace or remove the line") as caught:
        read_lengths(tmp_path / "a.txt")
    assert "\n" not in str(caught.value) and word[:10] in str(caught.value)


@pytest.mark.parametrize("text", ["", "\n \n"])
def test_an_empty_list_is_refused(tmp_path, text):
    (tmp_path / "a.txt").write_text(text)
    with pytest.raises(ValueError, match=f"{RULE}.*without any; add the lengths"):
        read_lengths(tmp_path / "a.txt")


@pytest.mark.parametrize(
    "array, message",
    [
        ([3, 0], "got 0 .*index 1"),
        ([3, -2], "got -2 .*index 1"),
        ([3.0, np.nan], "got float64 of shape"),
        ([[1, 2]], "got int64 of shape"),
        (np.zeros(0, np.int64), "without any"),
        ([True], "got bool of shape"),
    ],
)
def test_a_wrong_array_is_named(tmp_path, array, message):
    np.save(tmp_path / "a.npy", array)
    with pytest.raises(ValueError, match=f"{RULE}.*{message}"):
        read_lengths(tmp_path / "a.npy")


@pytest.mark.parametrize("content", [b"", b"text", b"\x93NUMPY"])
def test_a_file_that_is_no_array_is_named(tmp_path, content):
    (tmp_path / "a.npy").write_bytes(content)
    with pytest.raises(ValueError, match=f"{RULE}.*save it with numpy.save"):
        read_lengths(tmp_path / "a.npy")
