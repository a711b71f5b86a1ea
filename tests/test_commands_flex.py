"""`sppo flex` and the line of `sppo data`: gains where exchange is slow, plain words where not, no jax."""

import json
import subprocess
import sys

import numpy as np
import pytest
import yaml

from sppo_jax.cli import main
from sppo_jax.config import config_from_dict
from sppo_jax.data.rows.flex import window_pieces
from sppo_jax.data.rows.lengths import enough_lengths, rows_of_corpus, rows_of_lengths
from sppo_jax.flex.lengths import corpora
from sppo_jax.report.flex.line import teams_line

# Four hosts share a chunk, so that what members exchange goes over the network.
SETTINGS = {
    "model": {"preset": "gpt-7b"},
    "mesh": {"data": 1, "pipe": 1, "seq": 16},
    "sequence": {"length": 32768, "per_step": 4, "chunks": 2, "balance": "equal"},
    "train": {"steps": 1},
    "hardware": {"cluster": "a100-80g:4x4"},
}
ON_ONE_DEVICE = ["mesh.seq=1", "mesh.pipe=16"]


@pytest.fixture
def config(tmp_path, monkeypatch):
    """A config and a file of short documents, in the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(SETTINGS))
    rng = np.random.default_rng(0)
    np.save(tmp_path / "short.npy", rng.integers(100, 900, 900))
    (tmp_path / "whole.txt").write_text("32768\n" * 8)
    return "c.yaml"


def report(words, capsys):
    assert main(["flex", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_short_documents_gain_where_members_are_on_several_hosts(config, capsys):
    found = report([config, "--lengths", "short.npy", "data.fill=0.95", "--windows", "2"], capsys)
    assert found["simulated"] and found["helps"] and len(found["windows"]) == 2
    gains = {name: figures["flex_gains"] for name, figures in found["baselines"].items()}
    assert gains["flex"] == 1 and gains["packed"] > 1.1
    assert gains["static"] >= gains["per_batch"] >= 1 and gains["packed"] >= gains["per_batch"]
    assert found["baselines"]["packed"]["seconds"] == pytest.approx(
        np.mean([window["seconds"]["packed"] for window in found["windows"]])
    )
    assert 0 < found["fill"] <= 0.95
    # Teams cannot save more than packed rows spend on exchange and on waiting.
    assert gains["packed"] <= 1 / (1 - found["exchange_share"] - found["uneven_share"]) * 1.01


def test_cells_hold_all_documents_of_the_first_window_and_bytes_follow_the_levels(config, capsys):
    found = report([config, "--lengths", "short.npy", "data.fill=0.95", "--windows", "1"], capsys)
    cells, levels = found["first_window"]["cells"], found["first_window"]["levels"]
    assert len(cells) == 4 * 2
    assert sum(cell["documents"] for cell in cells) == found["windows"][0]["documents"]
    assert sum(cell["tokens"] for cell in cells) == round(found["fill"] * 4 * 32768)
    assert all(cell["attention_max"] >= cell["attention_mean"] for cell in cells)
    for cell in cells:
        assert cell["stream"] == (not cell["groups"])
        assert cell["stream"] or cell["documents"] == sum(documents for _, _, documents in cell["groups"])
    sent = found["first_window"]["bytes_a_layer"]
    # gpt-7b: 32 key/value heads of 128 in bfloat16; a chunk has 16384 / 16 tokens on a member.
    per_member = {"F": 2 * 32 * 128 * 2 * 1024, "B": 2 * 32 * 128 * (2 + 4) * 1024}
    assert sent["ring"] == sum(15 * per_member[tick["kind"]] for tick in levels)
    near = sum((2 ** int(tick["level"]) - 1) * per_member[tick["kind"]] for tick in levels if tick["level"].isdigit())
    assert {tick["level"] for tick in levels} <= set("012") and not any(cell["stream"] for cell in cells)
    assert sent["grouped"] == near and sent["stream"] == 0
    # Ulysses sends 12 (N + K) H T (R - 1) / R bytes a layer, forward and backward, and the small LSE.
    num_pairs = len(levels) // 2
    assert found["sequence_kind"] == "ulysses"
    assert sent["today"] == pytest.approx(num_pairs * 12 * 64 * 128 * 1024 * 15 / 16, rel=0.01)
    assert sent["flex"] == sent["grouped"] + sent["stream"] < sent["ring"]


def test_documents_as_long_as_rows_gain_nothing_and_the_report_says_so(config, capsys):
    assert main(["flex", config, "--lengths", "whole.txt", "--windows", "1"]) == 0
    text = capsys.readouterr().out
    assert "teams gain nothing here (1.000x, simulated)" in text
    assert "100% of the tokens are in documents that are too long for half of the 16 members" in " ".join(text.split())
    assert "S/1" in text and "stream: 1 document" in text
    assert all(len(line) <= 100 for line in text.splitlines())


def test_full_rows_leave_no_slots_and_the_report_says_so(config, capsys):
    assert main(["flex", config, "--corpus", "wikipedia", "--windows", "1"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "teams gain nothing here (1.000x, simulated): documents fill 100.00% of the rows" in text
    assert "100% of the tokens stay on all members (data.fill=0.98" in text


def test_on_one_device_of_a_chunk_there_is_nothing_to_gain(config, capsys):
    assert main(["flex", config, *ON_ONE_DEVICE, "--corpus", "wikipedia", "--windows", "1"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "teams gain nothing here (1.000x, simulated): mesh.seq is 1, so every document has one device" in text


def test_json_goes_to_a_file_beside_the_text(config, tmp_path, capsys):
    words = ["flex", config, "--corpus", "wikipedia", "--windows", "1", "--json", "found.json"]
    assert main(words) == 0
    text = capsys.readouterr().out
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["verdict"] in text and found["source"] == "corpus wikipedia" and "corpus wikipedia" in text
    assert main([*words[:-1], "-"]) == 0
    assert json.loads(capsys.readouterr().out) == found


def test_the_documents_of_the_config_are_taken_by_default_without_jax(config, tmp_path):
    text = "".join(f"{'word ' * (number % 50)}\n" for number in range(400))
    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for _ in range(40)))
    words = ["flex", config, "data.source=data.jsonl", "data.validation_fraction=0", "--windows", "1"]
    code = f"import sys; from sppo_jax.cli import main; assert main({words!r}) == 0; assert 'jax' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "data.source=data.jsonl: " in done.stdout and "(simulated)" in done.stdout


def test_lengths_are_packed_as_a_run_packs_them_and_leave_the_share_that_is_asked():
    lengths = enough_lengths(corpora()["wikipedia"], tokens=100_000, seed=3)
    assert 100_000 <= lengths.sum() < 100_000 + lengths[-1]
    more = enough_lengths(corpora()["wikipedia"], tokens=200_000, seed=3)
    assert np.array_equal(more[: len(lengths)], lengths)
    rows = rows_of_lengths(lengths, length=4096, pack="whole", seed=0, fill=0.9)
    pieces = window_pieces(rows, 0, len(rows))
    assert pieces.size.sum() == lengths.sum()
    assert (np.bincount(pieces.row, weights=pieces.size) <= 3686).all()
    with pytest.raises(ValueError, match="at least 1 of the 4 of a sequence, got fill 0.1; raise the fill"):
        rows_of_lengths(lengths, length=4, pack="whole", seed=0, fill=0.1)
    with pytest.raises(ValueError, match="at most 10,000,000 pieces .*got about 2.5e"):
        rows_of_lengths(np.full(1, 10**18), length=4, pack="whole", seed=0)


def test_rows_of_a_corpus_are_all_full():
    wanted = {"tokens": 40_000, "length": 4096, "pack": "whole", "seed": 3, "fill": 0.9}
    rows = rows_of_corpus(corpora()["wikipedia"], **wanted)
    lengths = enough_lengths(corpora()["wikipedia"], tokens=40_000, seed=3)
    whole = rows_of_lengths(lengths, length=4096, pack="whole", seed=3, fill=0.9)
    tokens, before = (sorted(int(each.sizes(n).sum()) for n in range(len(each))) for each in (rows, whole))
    assert tokens == before[1:] and before[0] < 0.95 * 3686 <= tokens[0]


LINES = [
    ({"seq": 1, "pipe": 16}, {}, "nothing to gain, mesh.seq is 1"),
    ({"seq": 3}, {}, "mesh.seq must be a power of two, got 3"),
    ({"seq": "auto"}, {}, "mesh.seq is auto; `sppo flex` shows the gain"),
    ({}, {"hardware": {}}, "neither hardware.cluster nor train.devices names the devices"),
    ({"seq": 32}, {}, "the config has no plan: the mesh must have at most the 16 devices"),
    ({}, {}, "teams (sequence.groups): gain 1."),
    ({"seq": "auto", "pipe": 16}, {"sequence": {"groups": "auto"}}, "the plan has mesh.seq=1"),
]


@pytest.mark.parametrize(("mesh", "others", "expected"), LINES)
def test_the_line_of_sppo_data_says_what_teams_gain_or_why_not(mesh, others, expected):
    settings = {**SETTINGS, "mesh": SETTINGS["mesh"] | mesh}
    for name, values in others.items():
        settings[name] = {**SETTINGS[name], **values} if values else {}
    settings["train"] = {"steps": 1}
    config = config_from_dict(settings)
    lengths = enough_lengths(corpora()["wikipedia"], tokens=10**6, seed=0)
    rows = rows_of_lengths(lengths, length=32768, pack="whole", seed=0, fill=0.95)
    line = teams_line(config, rows)
    assert line.startswith("teams (sequence.groups): ") and expected in line and "\n" not in line


def test_sppo_data_ends_with_the_line(config, tmp_path, capsys):
    (tmp_path / "data.txt").write_text("word " * 20000)
    words = ["data", config, "data.source=data.txt", "data.validation_fraction=0"]
    assert main(words) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("teams (sequence.groups): gain ")
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["groups"] == last


def test_flexsp_shows_its_own_teams_of_whole_documents(config, capsys):
    words = [config, "--lengths", "short.npy", "--windows", "2", "data.fill=0.95", "--flexsp", "7b"]
    found = report(words, capsys)["flexsp"]
    assert found["devices"] == 16 and 0 <= found["above_lower_bound"] < 0.1
    # On one degree the fast planner may be slower by its distance from the optimum.
    assert found["seconds"]["static"] >= found["seconds"]["batch"] >= 0.99 * found["seconds"]["flexsp"]
    lengths = [length for each in found["microbatches"] for team in each["groups"] for length in team["tokens"]]
    assert len(lengths) == report(words[:-2], capsys)["windows"][0]["documents"]
    for each in found["microbatches"]:
        assert sum(team["degree"] for team in each["groups"]) <= 16
        assert all(sum(team["tokens"]) <= team["degree"] * found["device_tokens"] for team in each["groups"])
    assert main(["flex", *words]) == 0
    assert f"microbatches of the first step: {len(found['microbatches'])}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["mesh.seq=1", "mesh.pipe=2", "hardware.cluster=a100-80g:1x2", "--flexsp", "13b"], "model states must take"),
        (
            [
                "mesh.seq=2",
                "mesh.pipe=4",
                "mesh.data=16",
                "sequence.per_step=16",
                "hardware.cluster=a100-80g:16x8",
                "--flexsp",
                "7b",
            ],
            "num_devices must be one of",
        ),
    ],
)
def test_flexsp_refuses_devices_without_costs(settings, message, config, capsys):
    assert main(["flex", config, "--lengths", "whole.txt", "--windows", "1", *settings]) == 2
    assert message in capsys.readouterr().err
