"""What packing would save where every document has sequences of its own."""

import numpy as np
import pytest
from tiny_runs import make_config

from sppo_jax.data.rows.corpus import corpus_of
from sppo_jax.data.summary.fill import Fill, fill_of


def corpus(*sizes):
    return corpus_of(np.zeros(sum(sizes)), np.cumsum(sizes), ["a"], [len(sizes)])


def with_pack(pack):
    return make_config("unused", sequence={"length": 64, "chunks": 4}, data={"source": "unused", "pack": pack})


def test_shares_are_those_of_the_places_with_and_without_packing():
    config = with_pack("none")
    found = fill_of(config, [(0.5, corpus(16, 16, 16, 16)), (0.5, corpus(64, 32))])
    assert found == Fill(apart=0.5 * 0.25 + 0.5 * 0.75, packed=0.5 * 1.0 + 0.5 * 0.75)
    assert fill_of(with_pack("whole"), [(1.0, corpus(16))]) is None and fill_of(config, []) is None


def test_a_line_says_what_packing_saves_where_most_places_are_empty():
    fill = Fill(apart=0.25, packed=0.75)
    line = fill.warning(30, 2.0)
    assert "leaves 75% of the places of sequences empty; data.pack=whole would leave 25%, and save 40 of 60 s" in line
    assert "save 67% of the steps" in fill.warning(30, None)
    assert Fill(apart=0.5, packed=1.0).warning(30, 2.0) == Fill(apart=0.25, packed=0.25).warning(30, 2.0) == ""


@pytest.mark.parametrize("command", ["plan", "data"])
def test_commands_tell(tmp_path, monkeypatch, capfd, command):
    from sppo_jax.cli import main

    monkeypatch.chdir(tmp_path)
    np.save("tokens.npy", np.tile(np.arange(8), 20).astype(np.uint16))
    (tmp_path / "c.yaml").write_text(
        "model: {vocab_size: 24, hidden_size: 16, num_layers: 4, num_heads: 2, mlp_size: 32}\n"
        "data: {source: tokens.npy, separator: 0, pack: none, validation_fraction: 0}\n"
        "sequence: {length: 64}\ntrain: {steps: 10}\nhardware: {cluster: 'cpu:1x1'}\n"
    )
    assert main([command, "c.yaml"]) == 0
    (line,) = (line for line in capfd.readouterr().err.splitlines() if "data.pack=none leaves 88%" in line)
    assert "s (simulated) for the same documents" in line
