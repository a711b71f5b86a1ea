"""The report for a terminal: complete, aligned, plain, and not wider than the terminal."""

import re

import pytest
from report_cases import MODEL, small_figures, too_large
from test_report_plan_figures import CASES

from sppo_jax.predict.seconds.simulate import simulate
from sppo_jax.report.draw.columns import WIDTH, aligned, bar, paragraph
from sppo_jax.report.plan.text import brief_text, moments_text, plan_text, scaled_timeline
from sppo_jax.report.plan.words import (
    TOLD_ELSEWHERE,
    chunks_of,
    duration,
    host_share_of,
    runs_of,
    schedule_of,
    seconds,
)
from sppo_jax.schedule.generators import make_table

FIGURES = {name: lambda groups=groups: small_figures(**groups) for name, groups in CASES.items()}
FIGURES["does not fit"] = too_large
FIGURES["searched"] = lambda: small_figures(mesh={"pipe": "auto"}, sequence={"chunks": "auto"}, stash={"alpha": "auto"})


@pytest.mark.parametrize("make", FIGURES.values(), ids=FIGURES)
def test_the_report_is_plain_and_fits_a_terminal(make):
    text = plan_text(make())
    assert text.isascii() and "\t" not in text
    assert max(map(len, text.splitlines())) <= WIDTH
    assert not any(line.endswith(" ") for line in text.splitlines())


def test_the_report_says_what_one_asks():
    figures = small_figures(mesh={"pipe": "auto"}, sequence={"chunks": "auto"})
    text = plan_text(figures)
    plan = figures.plan
    assert "(simulated), causal MFU" in text and "tokens/s" in text and "bubble" in text
    assert f"data {plan.mesh.data} x pipe {plan.mesh.pipe} x seq {plan.mesh.seq}" in text
    words = " ".join(re.sub("- (because |and )?", "", text).replace(";", "").split())
    for key, reason in plan.reasons.items():
        assert key in TOLD_ELSEWHERE or " ".join(reason.replace("- ", "").replace(";", "").split()) in words, key
    assert figures.found.rejected and len(figures.found.rejected) <= 5
    for item in figures.found.rejected:
        assert " ".join(item.why.split()[:2]) in words
    for word in ("attention", "HBM total", "host memory", "dK/dV", "peak HBM", "idle s", "stage 0", "F0.0"):
        assert word in text


def test_a_window_within_a_sequence_is_named_and_its_rate_is_called_a_guess():
    def rows(window):
        text = brief_text(small_figures(model={**MODEL, "sliding_window": window}))
        return [line for line in text.splitlines() if line.startswith("  window ")]

    assert "128 tokens; attention is charged at 50% of the rate of kernel cudnn, which is" in rows(128)[0]
    assert not rows(0) and not rows(10**7)


def test_the_rate_of_layers_with_a_state_is_called_a_guess():
    def rows(**model):
        text = " ".join(brief_text(small_figures(model=MODEL | model)).split())
        return (
            "layers with a state are charged at 10% of the rate of matmuls and 20 us per 512 tokens, which are" in text
        )

    assert rows(layers="8x(delta,full)") and not rows()


def test_a_model_with_experts_says_how_many_parameters_and_where_experts_are():
    model = {**MODEL, "experts": {"count": 8, "chosen": 2, "size": 2048}}
    lines = brief_text(small_figures(model=model)).splitlines()
    assert "  parameters      0.421 billion, 0.119 billion of them active for a token" in lines
    assert any(
        line.startswith("  experts         all 8 of a layer are held by each device of a stage;") for line in lines
    )
    gathered = small_figures(
        model=model, mesh={"pipe": 1, "weights": "gathered"}, schedule={"name": "breadth-first", "interleave": 4}
    )
    assert "are gathered with their group of layers" in plan_text(gathered)
    assert "experts at work" in moments_text(gathered)
    assert "parameters " not in brief_text(small_figures()).replace("parameters and", "")


def test_what_does_not_fit_is_said_first():
    lines = plan_text(too_large()).splitlines()
    assert lines[1].split()[:4] == ["verdict", "DOES", "NOT", "FIT;"]


@pytest.mark.parametrize("make", FIGURES.values(), ids=FIGURES)
def test_the_brief_answer_is_plain_and_says_the_same(make):
    figures = make()
    text, whole = brief_text(figures), plan_text(figures)
    assert text.isascii() and max(map(len, text.splitlines())) <= WIDTH and "diagonals 0-" not in text
    assert text.split("\n\n")[0] == whole.split("\n\n")[0] and len(text) < len(whole)


@pytest.mark.parametrize(
    ("value", "text"),
    [(1.234, "1.23 seconds"), (121, "2.0 minutes"), (7200, "2.0 hours"), (927_900, "10.7 days")],
)
def test_durations_are_in_the_unit_one_thinks_in(value, text):
    assert duration(value) == text


@pytest.mark.parametrize(
    ("alpha", "text"),
    [
        ((1.0, 1.0, 1.0), "all of every forward tick"),
        ((0.93, 0.93, 0.0), "93% of every forward tick but the last tick, whose stash stays on the device"),
        ((1.0, 0.0, 0.0), "all of every forward tick but the last 2 ticks, whose stash stays on the device"),
        ((0.0, 1.0, 1.0, 0.5), "nothing of forward ticks 0, all of forward ticks 1-2, 50% of forward ticks 3"),
    ],
)
def test_the_host_share_is_in_words(alpha, text):
    assert host_share_of(alpha) == text


def test_equal_stages_are_one_row_and_unequal_ones_are_not():
    stages = plan_text(small_figures()).split("Stages:")[1].split("\n\n")[0].splitlines()
    assert any(line.split()[0] == "0-3" for line in stages[2:3])
    # In a stream of sequences the first stage holds more chunks than the last.
    stages = plan_text(small_figures(sequence={"per_pipeline": 3})).split("Stages:")[1].split("\n\n")[0].splitlines()
    assert [line.split()[0] for line in stages[2:6]] == ["0", "1", "2", "3"]


def test_columns_are_aligned_and_nothing_is_cut():
    text = aligned(("n", "why"), [("1", "short"), ("1000", "a reason that goes on " * 12)], left=(1,), wrap=1)
    lines = text.splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert lines[1] == "     1  short" and lines[2].startswith("  1000  a reason")
    assert " ".join(line[8:] for line in lines[2:]).split() == ("a reason that goes on " * 12).split()
    assert " ".join(paragraph("label", "word " * 60).split()) == " ".join(["label", *["word"] * 60])
    assert (bar(0), bar(0.5, 10), bar(2.0, 10)) == ("", "#####", "#########>")


@pytest.mark.parametrize(
    ("value", "largest", "text"),
    [
        (904.01, 0, "904.0"),
        (0.4241, 904.0, "0.4"),
        (23.456, 0, "23.46"),
        (1.23456, 0, "1.235"),
        (1.5e-4, 0, "0.000150"),
    ],
)
def test_seconds_have_the_decimals_of_the_largest(value, largest, text):
    assert seconds(value, largest) == text


def test_runs_lose_nothing():
    values = (4, 4, 4, 2, 4, 1, 1)
    assert [value for first, last, value in runs_of(values) for _ in range(first, last + 1)] == list(values)
    assert runs_of(()) == []
    assert chunks_of(small_figures(**CASES["unequal chunks"]).plan) == "6: 2 x 16,384, 4 x 8,192 tokens"


def test_the_scaled_timeline_shows_each_kind_for_its_share():
    table = make_table("sppo", 2, 1, (1,) * 8, 1)
    tick_s = simulate(table, lambda unit, tokens: {"F": 1.0, "B": 3.0, "H": 1e-6}[unit.op]).tick_s
    rows = [line.split()[-1] for line in scaled_timeline(table, tick_s, width=110).splitlines()]
    assert len({len(row) for row in rows}) == 1 and len(rows) == 2
    for row in rows:
        assert row.count("B") / row.count("F") == pytest.approx(3, rel=0.1)
        assert 0.03 < row.count(".") / len(row) < 0.2
    assert rows[0].startswith("F") and rows[0].endswith("B") and rows[1].startswith(".")


def test_the_scaled_timeline_shows_ticks_narrower_than_a_column():
    table = make_table("seq1f1b", 2, 4, (1,) * 64, 1)
    tick_s = simulate(table, lambda unit, tokens: {"F": 1.0, "B": 2.0, "H": 0.5}[unit.op]).tick_s
    for row in (line.split()[-1] for line in scaled_timeline(table, tick_s).splitlines()):
        assert [row.count(kind) / len(row) for kind in "FBH"] == pytest.approx([2 / 7, 4 / 7, 1 / 7], abs=0.03)


def test_waves_are_named():
    figures = small_figures(schedule={"wave": 2}, sequence={"per_pipeline": 4})
    words = " ".join(plan_text(figures).split())
    assert figures.plan.schedule.wave == 2 and "seq1f1b, waves of 2 sequences, K/V of" in words
    assert "2 sequences run as one, so the cost of chunks rises only once for 2 sequences" in words
    assert schedule_of(figures.plan) == "seq1f1b k=2"
