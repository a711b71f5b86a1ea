"""What a plan says of the documents of a config's data, where their lengths are known without tokenizing anything."""

import dataclasses

import numpy as np
import pytest
from report_cases import MODEL

from sppo_jax.commands.plan import run
from sppo_jax.config import config_from_dict, to_yaml
from sppo_jax.data.content import token_files
from sppo_jax.data.open import open_data
from sppo_jax.data.rows.flex import window_pieces
from sppo_jax.data.summary import known
from sppo_jax.data.summary.known import documents_to_plan_for, known_documents, known_rows, made_known, planned_for
from sppo_jax.report.flex.line import gain_of_teams
from sppo_jax.search.search import search

LENGTH = 64


def config_of(source, **data):
    """Returns a config of a source whose tokens are uint16 and whose documents end with 0."""
    data = {"source": source, "separator": 0, "validation_fraction": 0.0} | data
    return config_from_dict({"model": MODEL, "sequence": {"length": LENGTH}, "train": {"steps": 1}, "data": data})


def write(path, sizes, dtype=np.uint16):
    """Writes documents of some sizes; the last token of each is 0."""
    tokens = np.ones(sum(sizes), dtype)
    tokens[np.cumsum(sizes) - 1] = 0
    tokens.tofile(path)
    return str(path)


def counted(config):
    """Returns the mean tokens of a document and the share of pairs, counted in every sequence of an epoch."""
    rows, window = open_data(config).training, config.model.sliding_window or LENGTH
    pairs, sizes = 0, []
    for number in range(len(rows)):
        ids = rows[number]["document_ids"]
        same = (ids[:, None] == ids) & (ids[:, None] >= 0)
        pairs += np.tril(np.triu(same, 1 - window)).sum()
        sizes += np.unique(ids[ids >= 0], return_counts=True)[1].tolist()
    return np.mean(sizes), pairs / len(rows) / np.tril(np.triu(np.ones((LENGTH, LENGTH)), 1 - window)).sum()


def assert_as_counted(found, config):
    mean_tokens, attended = counted(config)
    assert found.mean_tokens == pytest.approx(mean_tokens) and found.attended == pytest.approx(attended)
    window = config.model.window_within(LENGTH)
    for start in range(0, LENGTH, 16):
        assert found.mean.pairs(start, 16, window) == pytest.approx(pairs_of_chunk(config, start, start + 16))


def pairs_of_chunk(config, start, stop):
    """Returns the pairs of a chunk in the mean of an epoch, token by token; a token meets half of itself."""
    rows, window = open_data(config).training, config.model.sliding_window or LENGTH
    positions = [
        np.where(row["document_ids"] >= 0, row["positions"] + 0.5, 0) for row in map(rows.__getitem__, range(len(rows)))
    ]
    return np.minimum(positions, window)[:, start:stop].sum() / len(rows)


@pytest.mark.parametrize("pack", ["whole", "stream", "none"])
@pytest.mark.parametrize("settings", [{}, {"separator": None}, {"validation_fraction": 0.3}, {"fill": 0.5}])
def test_documents_of_token_files_are_counted_exactly(tmp_path, pack, settings):
    rng = np.random.default_rng(0)
    for name in ("a.bin", "b.bin"):
        write(tmp_path / name, rng.integers(1, 150, 40).tolist())
    config = config_of(str(tmp_path), pack=pack, **settings)
    before = known_documents(config)
    assert_as_counted(before, config)
    assert known_documents(config) == before  # now that the files were scanned


@pytest.mark.parametrize("window", [1, 20, 64])
def test_documents_in_a_window_are_relative_to_a_sequence_in_it(tmp_path, window):
    write(tmp_path / "a.bin", np.random.default_rng(0).integers(1, 150, 40).tolist())
    config = config_of(str(tmp_path), pack="stream")
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, sliding_window=window))
    assert_as_counted(known_documents(config), config)


def test_a_model_without_attention_has_no_pairs(tmp_path):
    config = config_of(write(tmp_path / "a.bin", [10, 20, 34] * 9))
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, mixer="delta"))
    found = known_documents(config)
    assert found.attended == 1 and found.mean.shares == {} and found.mean_tokens == pytest.approx(64 / 3)


def test_documents_of_several_sources_count_by_their_weights(tmp_path):
    long, short = write(tmp_path / "long.bin", [64] * 8), write(tmp_path / "short.bin", [8] * 64)
    config = config_of({long: 3, short: 1})
    found = known_documents(config)
    assert found.attended == pytest.approx((3 + 8 * (8 * 9) / (64 * 65)) / 4)
    assert found.mean_tokens == pytest.approx(64 / (3 / 4 + 8 / 4))
    limited = known_documents(config_of({long: 3, short: {"weight": 1, "min_tokens": 8}}))
    assert limited == found


def texts_in(folder):
    """Returns a folder of nine texts of unlike lengths, and its config."""
    texts = folder / "texts"
    texts.mkdir()
    for number in range(9):
        (texts / f"{number}.txt").write_text("word " * (number + 1))
    return texts, config_of(str(texts), cache=str(folder / "cache"))


def test_text_is_known_once_the_cache_holds_its_tokens(tmp_path):
    texts, config = texts_in(tmp_path)
    assert known_documents(config) is None
    assert_as_counted(known_documents(config) if open_data(config) else None, config)
    (texts / "9.txt").write_text("another")
    assert known_documents(config) is None


@pytest.mark.parametrize("source", ["recall", "stdlib", "missing.bin", "s3://bucket/tokens", "hf://datasets/a/b"])
def test_without_known_documents_nothing_is_said(tmp_path, source):
    assert known_documents(config_of(source, cache=str(tmp_path / "cache"))) is None


def test_of_many_documents_a_sample_counts(tmp_path, monkeypatch):
    rng = np.random.default_rng(1)
    config = config_of(write(tmp_path / "a.bin", rng.integers(1, 60, 40_000).tolist()))
    exact = known_documents(config)
    monkeypatch.setattr(known, "_MOST_DOCUMENTS", 8192)
    monkeypatch.setattr(known, "_MOST_PIECES", 4096)
    sample = known_documents(config)
    assert sample != exact and sample.attended == pytest.approx(exact.attended, rel=0.05)
    assert sample.mean_tokens == pytest.approx(exact.mean_tokens, rel=0.05)
    monkeypatch.setattr(token_files, "_LOOKED_AT_BYTES", 1 << 16)
    assert known_documents(config).attended == pytest.approx(exact.attended, rel=0.05)
    monkeypatch.setattr(token_files, "_LOOKED_AT_BYTES", 0)
    assert known_documents(config) is None


def test_text_is_made_known(tmp_path):
    _, config = texts_in(tmp_path)
    assert documents_to_plan_for(config) is None
    found = made_known(config)
    assert found == known_documents(config) == documents_to_plan_for(config)
    assert_as_counted(found, config)


def test_what_is_known_only_while_it_is_open_is_counted_from_there(tmp_path, monkeypatch):
    config = config_of(write(tmp_path / "a.bin", [10, 20, 34, 100] * 9))
    known_before = known_documents(config)
    monkeypatch.setattr(known, "known_spans", lambda *given, **more: None)
    assert known_documents(config) is None and made_known(config) == known_before


def test_data_that_cannot_be_read_are_one_line(tmp_path):
    (tmp_path / "empty").mkdir()
    config = config_of(str(tmp_path / "empty"), cache=str(tmp_path / "cache"))
    assert documents_to_plan_for(config) is None
    with pytest.raises(ValueError, match="data.source") as error:
        made_known(config)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("source", "groups", "is_for", "line"),
    [
        ("tokens", {}, True, ""),
        ("tokens", {"sequence": {"length": LENGTH, "plan_for": "full"}}, False, ""),
        ("tokens", {"planner": "paper"}, False, ""),
        ("stdlib", {}, False, ""),
        ("recall", {}, False, ""),
        ("missing.bin", {}, False, "planned for full documents; `sppo data CONFIG` makes the lengths known"),
        ("s3://bucket/a", {}, False, "planned for full documents; behind an address lengths are known in a run alone"),
    ],
)
def test_what_a_plan_is_for(tmp_path, source, groups, is_for, line):
    data = {"source": write(tmp_path / "a.bin", [20] * 9) if source == "tokens" else source, "separator": 0}
    if source in ("stdlib", "recall"):
        del data["separator"]
    base = {"model": MODEL, "sequence": {"length": LENGTH}, "train": {"steps": 1, "devices": "cpu:1"}}
    config = config_from_dict(base | {"data": data} | groups)
    documents = documents_to_plan_for(config)
    assert (documents is not None) == is_for
    plan = search(config, documents=documents).plan
    assert planned_for(config, plan) == line and (plan.planned_for.documents == "known") == is_for


def test_the_row_of_documents_has_the_gain_of_teams(tmp_path, capsys):
    source = {write(tmp_path / "a.bin", [7, 30, 9] * 40): 3, write(tmp_path / "b.bin", [5] * 90): 1}
    base = {"model": MODEL, "train": {"steps": 1}, "mesh": {"seq": 4}, "hardware": {"cluster": "h100:1x4"}}
    data = {"source": source, "separator": 0, "validation_fraction": 0.0}

    def asked(groups, data=data):
        sequence = {"length": LENGTH, "groups": groups, "per_step": 4, "ulysses": 1}
        return config_from_dict(base | {"sequence": sequence, "data": data})

    config = asked("flex")
    rows, plan = known_rows(config), search(config).plan
    for number in range(3):
        of_run = window_pieces(open_data(config).training, number, 4)
        found = window_pieces(rows, number, 4)
        assert all(np.array_equal(getattr(found, name), getattr(of_run, name)) for name in ("row", "begin", "size"))
    gain = gain_of_teams(config, plan, rows)
    assert gain >= 1 and gain_of_teams(config, plan, None) is None
    assert gain_of_teams(asked("static"), plan, rows) is None
    path = tmp_path / "flex.yaml"
    path.write_text(to_yaml(config))
    assert run([str(path)]) == 0
    assert f"teams make it {gain:.2f}x as fast as packed rows" in " ".join(capsys.readouterr().out.split())


def test_a_plan_is_for_known_documents_or_full_ones():
    with pytest.raises(ValueError, match=r"sequence.plan_for must be documents \| full, got 'some'"):
        config_from_dict({"model": MODEL, "sequence": {"length": LENGTH, "plan_for": "some"}, "train": {"steps": 1}})
