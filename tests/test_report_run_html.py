"""A run's page: whole in itself, showing what the files say, whatever state they are in."""

import json
import random
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest
from run_cases import CASES, LENGTH, event, healthy, metrics, torn, troubled, two_steps, write_run
from test_report_plan_html import VOID, _Nesting

from sppo_jax.data.positions import ContextGain
from sppo_jax.report.run import charts as run_charts
from sppo_jax.report.run.figures import (
    Point,
    duration,
    figures_of_run,
    series,
    smooth,
    thin,
    validations,
)
from sppo_jax.report.run.html import run_html, write_report
from sppo_jax.report.run.run_files import read_run_dir
from sppo_jax.report.run.words import event_rows, head_cards, skip_rows, summary
from sppo_jax.train.checkpoints.run_dir import claimed

TITLES = (
    *("Loss", "Validation loss by position in the context", "Recall by distance", "Memory"),
    *("Token accuracy", "Entropy"),
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return {name: make(tmp_path_factory.mktemp("runs") / name) for name, make in CASES.items()}


@pytest.fixture(scope="module")
def figures(runs):
    return {name: figures_of_run(read_run_dir(path)) for name, path in runs.items()}


@pytest.mark.parametrize("name", CASES)
def test_the_page_is_well_formed_and_needs_nothing_else(runs, name):
    before = {path.name for path in runs[name].iterdir()}
    path = write_report(runs[name])
    assert {each.name for each in runs[name].iterdir()} == before | {"report.html"} and path.name == "report.html"
    text = path.read_text(encoding="utf-8")
    parser = _Nesting()
    parser.feed(text.partition("<script>")[0])
    assert set(parser.open) <= {"html", "body"} | VOID
    assert not re.search(r"(src|href)\s*=|url\(|import\s|fetch\(|XMLHttp", text)
    assert not re.search(r"https?://(?!www\.w3\.org)", text) and "prefers-color-scheme: dark" in text
    for picture in re.findall(r"<svg.*?</svg>", text, re.S):
        ElementTree.fromstring(picture)
    words = " ".join(parser.words)
    for gone in ("nan ", "None", "inf "):
        assert gone not in re.sub(r"a loss of nan and a gradient norm of inf", "", words)
    assert len(text) < 500_000


@pytest.mark.parametrize(
    ("name", "word", "why"),
    [
        ("healthy", "finished", "all 2,000 steps done"),
        ("troubled", "running", "as of"),
        ("begun", "starting", "no step is logged yet"),
        ("two_steps", "running", "as of"),
        ("torn", "stopped answering", "wrote nothing for 2 d 0 h"),
    ],
)
def test_the_head_says_how_the_run_stands(figures, name, word, why):
    status = figures[name].status
    assert status.word == word and why in status.why
    page = run_html(figures[name])
    assert page.index(f"<b>{word}</b>") < page.index("Curves")


def test_a_stop_is_told_with_its_reason_until_the_run_goes_on(tmp_path):
    path = write_run(tmp_path / "r", [metrics(9, random.Random(0))], [])
    for events, word in (
        ([{"kind": "start"}, {"kind": "stop", "text": "SIGTERM; saved step 9"}], "stopped"),
        ([{"kind": "stop", "text": "SIGTERM; saved step 9"}, {"kind": "resume", "step": 9}], "running"),
    ):
        (path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
        status = figures_of_run(read_run_dir(path)).status
        assert status.word == word and ("SIGTERM" in status.why) == (word == "stopped")


def test_a_run_whose_process_is_gone_has_stopped_answering(tmp_path):
    """Its lock died with it; of another host's lock nothing is known here."""
    path = write_run(tmp_path / "r", [metrics(9, random.Random(0))], [])

    def status():
        return figures_of_run(read_run_dir(path)).status

    with claimed(path):
        assert status().word == "running"
    assert status().word == "stopped answering"
    (path / "lock").write_text("process 1 on another-host\n")
    assert status().word == "running"


def test_every_chart_is_drawn_wide_and_narrow_and_empty_ones_say_what_is_missing(figures):
    full, empty = run_html(figures["healthy"]), run_html(figures["begun"])
    assert all(f"<b>{title}</b>" in full for title in TITLES)
    assert full.count("class='broad'") == full.count("class='narrow'") == 11 and "class='empty'" not in full
    assert "class='broad'" not in empty and empty.count("class='empty'") == 7
    assert "Recall by distance" not in empty and "The plan, and why" in empty and "one step, as predicted" in empty


def test_the_newest_validation_is_strong_and_the_first_is_faint(figures):
    lines = run_charts.position_panel(figures["healthy"]).series
    assert len(lines) == 12
    strengths = [line.strength for line in lines]
    assert strengths == sorted(strengths) and strengths[0] < 0.5 and strengths[-1] == 1.0
    assert [line.name for line in lines if line.name] == ["step 167", "step 2,000"]
    middles = lines[-1].x
    assert all(
        after == pytest.approx(2 * before, rel=0.02) for before, after in zip(middles[1:], middles[2:], strict=False)
    )


def test_the_gain_by_context_is_shown_where_it_was_measured(figures, tmp_path):
    gain = {"beyond": 8192, "num_targets": 70, "whole": 2.0, "cut": 2.125, "gain": 0.125}
    rows = [{"step": 3, "validation_loss": 2.5, "gain_by_context": [gain, {"beyond": 64}]}]
    (shown,) = validations(rows)
    assert shown.gains == (ContextGain(beyond=8192, num_targets=70, whole=2.0, cut=2.125),)
    run = replace(figures["healthy"], validations=(shown,))
    assert ("+0.1250", "nats gained by context beyond 8,192 tokens", "") in head_cards(run)
    assert "context beyond 8,192 tokens gains 0.1250 nats (70 targets)" in summary(run)
    assert not any("context" in text for _, text, _ in head_cards(figures["healthy"]))


def test_accuracy_is_shown_where_it_was_measured(figures, tmp_path):
    run = figures["healthy"]
    share = f"{run.data.rows[-1]['token_accuracy']:.1%}"
    assert (share, "token accuracy of step 2,000", "") in head_cards(run)
    assert summary(run).splitlines()[1].endswith(f"at step 2,000, token accuracy {share}")
    older = [{k: v for k, v in metrics(9, random.Random(0)).items() if k not in ("token_accuracy", "entropy")}]
    before = figures_of_run(read_run_dir(write_run(tmp_path / "r", older, [])))
    assert not before.accuracy and not {"Token accuracy", "Entropy"} & set(re.findall("<b>(.*?)</b>", run_html(before)))


def test_the_first_steps_do_not_flatten_the_rest(figures):
    run = figures["healthy"]
    raw, smoothed, validation = run_charts.loss_panel(run).series
    assert run.loss[0].value > 11 and max(*raw.y, *smoothed.y) < 6 and raw.x[0] > 1
    assert list(validation.y) == [v.loss for v in run.validations]


def test_troubles_are_marked_and_listed(figures):
    run = figures["troubled"]
    loss = run_charts.loss_panel(run)
    assert [rule.x for rule in loss.rules] == [250, 500, 1000]
    named = {line.name: line for line in loss.series}
    assert list(named["skipped step"].x) == [300, 301, 302, 303, 900]
    assert list(named["spike"].x) == [610, 611, 612] and max(named["spike"].y) < 10
    assert [row[0] for row in skip_rows(run)] == ["900", "303", "302", "301", "300"]
    kinds = [row[2] for row in event_rows(run)]
    assert kinds[0] == "corrupt" and kinds[-1] == "start" and kinds.count("skip") == 2
    assert [row[::2] for row in event_rows(figures["healthy"])] == [
        ("2,000", "stop"),
        ("250-2,000", "save"),
        ("0", "start"),
    ]
    assert "5 skipped steps" in summary(run) and "3 resumes" in summary(run) and summary(run).count("\n") == 4


def test_seconds_are_those_of_the_lines(figures):
    run = figures["healthy"]
    rows = run.data.rows
    assert run.trained_s == pytest.approx(sum(row["step_s"] + row.get("validation_s", 0) for row in rows))
    assert run.parts_s["saving"] == pytest.approx(sum(row["save_s"] for row in rows))
    assert run.tokens == 2000 * (2 * LENGTH - 40) and run.places == 2000 * 2 * LENGTH and run.eta_s == 0
    assert figures["troubled"].eta_s == pytest.approx((2000 - 1234) * 0.455, rel=0.05)


def test_steps_done_again_are_counted_once(figures):
    steps = [row["step"] for row in figures["torn"].data.rows]
    assert steps == list(range(10, 450, 10))
    notes = " ".join(figures["torn"].data.notes)
    assert "metrics.jsonl has 1 line that is torn" in notes and "events.jsonl has 2 lines" in notes
    page = run_html(figures["torn"])
    assert "<b>begins</b>" not in page and "&lt;b&gt;begins&lt;/b&gt;" in page and "plan.json cannot be read" in page


def test_any_cut_of_the_files_gives_a_page(tmp_path):
    path = troubled(tmp_path / "run")
    rng = random.Random(0)
    for name in ("events.jsonl", "metrics.jsonl", "plan.json", "config.yaml"):
        whole = (path / name).read_bytes()
        for cut in (0, 1, *(rng.randrange(len(whole)) for _ in range(3))):
            (path / name).write_bytes(whole[:cut])
            write_report(path)
        (path / name).unlink()
        if name != "config.yaml":
            write_report(path)


@pytest.mark.parametrize(
    "line",
    [
        {"step": 5},
        {"step": "5", "loss": 1.0},
        {"step": 5, "loss": "high", "step_s": None, "tokens_per_s": [1]},
        {"step": 5, "loss": 1e300, "validation_loss": 2.0, "validation_loss_by_position": [{"first": 0}, 3, None]},
        {"step": 5, "loss": 2.0, "validation_loss": 2.0, "recall_by_distance": {"distance": 4}},
        {"step": 5, "loss": 0.0, "grad_norm": 0.0, "mfu": 0.0, "hbm_peak_bytes": 0, "step_s": 0},
        {"step": True, "loss": 1.0},
        {
            "step": 5,
            "loss": 2.0,
            "validation_loss": 1.0,
            "validation_loss_by_position": [
                {"first": 0, "last": 0, "num_targets": 0, "loss": 1.0},
                {"first": 1, "last": 40, "num_targets": 0, "loss": 1.0},
            ],
        },
    ],
)
def test_lines_of_other_makers_do_no_harm(tmp_path, line):
    path = two_steps(tmp_path / "run")
    with (path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    write_report(path)


def test_smoothing_ignores_a_spike_and_thinning_keeps_it():
    points = [Point(step=step, value=100.0 if step == 700 else 1.0 + step / 1e4) for step in range(2000)]
    assert max(point.value for point in smooth(points)) < 1.3 and len(smooth(points)) == 160
    assert smooth(points[:20]) == []
    few = thin(points, 100)
    assert len(few) <= 100 and Point(step=700, value=100.0) in few
    assert [p.step for p in few] == sorted(p.step for p in few)
    assert thin(points[:50]) == points[:50]
    assert series([{"step": 1, "a": True}, {"step": 2, "a": float("nan")}, {"step": 3, "a": 2}], "a") == [
        Point(step=3, value=2.0)
    ]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0125, "12 ms"),
        (48.2, "48.2 s"),
        (600, "10 min"),
        (3599, "1 h 0 min"),
        (12000, "3 h 20 min"),
        (446400, "5 d 4 h"),
    ],
)
def test_durations(value, text):
    assert duration(value) == text


def test_what_is_no_run_is_refused_in_a_line(tmp_path):
    file = tmp_path / "file"
    file.touch()
    for path, words in ((tmp_path / "gone", "nothing there"), (file, "a file"), (tmp_path, "with none of them")):
        with pytest.raises(ValueError, match=words) as error:
            write_report(path)
        assert "\n" not in str(error.value)
    run = torn(tmp_path / "run")
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").mkdir()
    with pytest.raises(ValueError, match="the files of a run must be readable, got .*metrics.jsonl"):
        write_report(run)


def test_a_report_that_cannot_be_written_leaves_the_old_one_and_no_rest(tmp_path, monkeypatch):
    run = healthy(tmp_path / "run")
    (run / "report.html").write_text("old")

    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", refuse)
    with pytest.raises(ValueError, match="file of a report must be writable.*No space left"):
        write_report(run)
    assert (run / "report.html").read_text() == "old" and not list(run.glob(".report*"))


def test_a_very_long_run_is_sampled_and_keeps_its_news(tmp_path):
    rng = random.Random(5)
    line = metrics(1, rng)
    lines = [line | {"step": step, "spike": step == 7001} for step in range(1, 20_001)]
    lines[12_345] |= {"validation_loss": 2.0}
    data = read_run_dir(write_run(tmp_path / "run", lines, []))
    steps = {row["step"] for row in data.rows}
    assert len(steps) < 6100 and {1, 7001, 12_346, 20_000} <= steps and "one in 4 is shown" in data.notes[0]
    run = figures_of_run(data)
    assert run.trained_s == pytest.approx(20_000 * line["step_s"], rel=1e-3) and run.step == 20_000


@pytest.mark.parametrize("losses", [[9.0, 8.0, 7.0], [9.0] * 30 + [2.5], [9.0, 8.0, None], [4.25]])
def test_the_card_of_the_loss_is_the_last_loss_and_says_of_which_step(tmp_path, losses):
    rng = random.Random(0)
    lines = [metrics(step, rng) | {"loss": loss} for step, loss in enumerate(losses, 1)]
    run = figures_of_run(read_run_dir(write_run(tmp_path / "run", lines, [])))
    step, last = [(step, loss) for step, loss in enumerate(losses, 1) if loss is not None][-1]
    assert (f"{last:.4f}", f"loss of step {step}, nats per token", "") in head_cards(run)
    assert f"{losses[0]:.4f} at step 1, {last:.4f} at step {step}" in summary(run)


@pytest.mark.parametrize("between", [[], ["save"], ["save", "spike", "resume"]])
def test_warnings_of_one_text_are_one_row(tmp_path, between):
    events = []
    for step in range(1, 18):
        events.append(event(step, "warning", "the tracker does not answer"))
        events += [event(step, kind, f"{kind} at {step}") for kind in between]
    events += [event(18, "warning", "step 18 took 99 s"), event(19, "warning", "step 19 took 12 s")]
    events += [event(20, "warning", "the disk is full")]
    run = figures_of_run(read_run_dir(write_run(tmp_path / "run", [metrics(20, random.Random(0))], events)))
    rows = [row for row in event_rows(run) if row[2] == "warning"]
    assert [(row[0], row[3]) for row in rows] == [
        ("20", "the disk is full"),
        ("18-19", "2 of them; the last: step 19 took 12 s"),
        ("1-17", "17 times: the tracker does not answer"),
    ]
    assert "3 warnings" in summary(run)
