"""The stored results of flexible teams are those of today's code where no clock decides, and hold what is said."""

import json

import numpy as np
import pytest

from bench import flex, flex_simulated
from bench.flex_counts import Sent, count, forward_ticks, placed, sent_bytes
from sppo_jax.flex.lengths import corpora, sample_lengths

STALE = "bench/results/flex.json is stale: make it again with `python -m bench.flex`"
RESULTS = json.loads(flex.RESULT.read_text(encoding="utf-8"))
MEASURED, PLACEMENTS = RESULTS["measured"], ("static", "packed", "per_batch", "flex")
STATIC_PROGRAM = "groups=static, packed"


@pytest.mark.parametrize("part", flex.PARTS)
def test_each_part_names_its_date_hardware_version_and_command(part):
    own = RESULTS[part]
    assert own["date"] >= "2026-11-22" and "cores" in own["hardware"] and own["jax"]
    assert own["command"].startswith("python -m bench.flex")


@pytest.mark.parametrize("corpus", flex.LONGEST)
@pytest.mark.parametrize("kind", flex.KINDS)
def test_stored_counts_are_todays(kind, corpus):
    stored = MEASURED["cases"][f"{kind}, {corpus}"]["rows"]
    today = flex.counted(MEASURED["members"], kind, corpus)
    assert set(stored) == {*PLACEMENTS, STATIC_PROGRAM}
    for name, columns in today.items():
        predicted_s = columns.pop("predicted_s")
        assert {key: stored[name][key] for key in columns} == columns, STALE
        assert stored[name]["predicted_s"] == pytest.approx(predicted_s), STALE


def test_all_placements_learn_the_same():
    for case in MEASURED["cases"].values():
        rows = case["rows"]
        assert len({row["pairs"] for row in rows.values()}) == 1
        for name in ("per_batch", "flex", STATIC_PROGRAM):
            assert rows[name]["loss"] == pytest.approx(rows["packed"]["loss"], rel=1e-5)
        assert all(len(row["ratios"]) == MEASURED["rounds"] for row in rows.values())
        assert rows["packed"]["ratio_to_packed"] == 1 and rows["flex"]["predicted_s"] <= rows["packed"]["predicted_s"]


def test_bytes_from_placements_are_those_from_tags():
    shape = flex.plan_and_shape(8, "flex", "ring")[1]
    sent = Sent(heads=8, kv_heads=8, head_dim=16, layers=2, stream="ring")
    for baseline, batches in placed(flex.corpus_rows("all lengths"), 0, shape).values():
        cells = [window.cells for window in baseline.windows]
        ticks = [forward_ticks(own.far, own.level, shape) for own in cells]
        found = count(batches, shape, sent)
        assert found["sent_bytes"] == sum(sent_bytes(own, sent, shape.members) for own in ticks)
        assert sum(found["forward_ticks"].values()) == sum(len(own.level) for own in ticks)


def test_bytes_of_a_level_follow_the_formulas():
    ring, ulysses = (Sent(heads=8, kv_heads=2, head_dim=4, layers=3, stream=kind) for kind in ("ring", "ulysses"))
    assert [ring.near(level) for level in range(3)] == [0, 16 * 2 * 4 * 3, 3 * 16 * 2 * 4 * 3]
    assert ring.far(8) == 7 * 16 * 2 * 4 * 3 and ulysses.far(8) == 12 * 10 * 4 * 3 * 7 // 8


@pytest.mark.filterwarnings("ignore")
def test_stored_shares_of_a_rings_bytes_are_todays():
    assert flex_simulated.bytes_row("ring", flex_simulated.ROOMY, flex_simulated.NUM_CHECKED) == pytest.approx(
        RESULTS["bytes"]["check"]
    ), STALE


def test_groups_halve_the_bytes_of_a_ring_where_rows_have_padding():
    rows = {(row["stream"], row["fill"]): row for row in RESULTS["bytes"]["rows"]}
    assert set(rows) == {(kind, fill) for kind in ("ring", "ulysses") for fill in flex_simulated.WINDOWS}
    assert all(row["windows"] == flex_simulated.WINDOWS[row["fill"]] for row in rows.values())
    assert all(row["gain_least"] >= 1 for row in rows.values())
    assert rows["ring", flex_simulated.ROOMY]["share_of_ring"] <= 0.5
    assert rows["ring", 1.0]["share_of_ring"] > 0.5  # rows without padding leave nothing to deal


@pytest.mark.filterwarnings("ignore")
def test_stored_seconds_beside_published_ratios_are_todays_and_not_judged():
    own = RESULTS["published"]
    assert own["published"] == {"over FlexSP, at most": 1.69, "over Seq1F1B, 96K": 1.40}
    assert own["kind"] == "simulation with the planner's costs; not judged"
    row = next(row for row in own["rows"] if row["corpus"] == "commoncrawl-assumed" and row["longest"] == 98_304)
    lengths = sample_lengths(
        corpora()[row["corpus"]], count=flex_simulated.BATCH, seed=0, longest=int(98_304 * flex_simulated.ROOMY)
    )
    mesh = {"pipe": 4, "seq": 8, "length": 98_304, "chunks": 4}
    for system, groups in (("merge", "flex"), ("seq1f1b", "static")):
        seconds = flex_simulated.batch_seconds(lengths, **mesh, groups=groups)
        assert seconds == pytest.approx(row["seconds"][system]["4"][0]), STALE
    assert all(row["over_seq1f1b"] >= 1 for row in own["rows"])


def test_planning_stalls_no_loop():
    own = RESULTS["stall"]
    assert own["steps"] == 200 and own["flex"]["stall"] < 0.01
    assert own["step_s"] <= own["predicted_step_s"]


def test_windows_are_timed_by_their_rows():
    class Endless:
        def __getitem__(self, index):
            return {"tokens": np.full(4, index)}

    rows = flex_simulated.TimedRows(Endless())
    waited = list(flex_simulated.waits(rows, 2, 0.0))
    assert len(waited) == 2 and len(rows.window_s()) >= 2 and min(rows.window_s()) >= 0


def test_the_table_shows_every_part():
    text = flex.table(RESULTS)
    assert all(f"| {kind}, {corpus} | flex |" in text for kind in flex.KINDS for corpus in flex.LONGEST)
    assert all(word in text for word in ("share of a ring's", "not judged", "stall:"))


def test_parts_are_written_one_by_one(tmp_path, monkeypatch):
    monkeypatch.setattr(flex, "PARTS", {"a": lambda args, say: {"x": 1}, "b": lambda args, say: {"y": args.rounds}})
    out = tmp_path / "flex.json"
    assert flex.main(["--parts", "a", "--out", str(out)]) == 0
    assert flex.main(["--parts", "b", "--rounds", "7", "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["a"]["x"] == 1 and found["b"]["y"] == 7 and found["b"]["command"].endswith(f"--out {out}")


def test_groups_on_one_device_are_refused(monkeypatch):
    monkeypatch.setattr("jax.devices", lambda: [None])
    with pytest.raises(ValueError, match="at least 2 devices, got 1; use --devices cpu:8"):
        flex.measured(flex.parse(["--devices", "auto"]), print)
