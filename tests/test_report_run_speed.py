"""Speeds in words and pages: trained tokens, places where these are more, and lines of older versions."""

import random

import pytest
from run_cases import LENGTH, metrics, write_run

from sppo_jax.report.run.charts import speed_panel
from sppo_jax.report.run.figures import figures_of_run
from sppo_jax.report.run.run_files import read_run_dir
from sppo_jax.report.run.speed import speed_text
from sppo_jax.report.run.words import head_cards, summary
from sppo_jax.train.metrics.trackers import scalars_of

PLACES = 2 * LENGTH


@pytest.mark.parametrize(
    ("tokens", "places", "text"),
    [
        (1000.4, 1000.4, "1,000 tokens/s"),
        (995.0, 1000.0, "995 tokens/s"),
        (500.0, 1000.0, "500 tokens/s of 1,000 places/s"),
        (0.0, 1000.0, "0 tokens/s of 1,000 places/s"),
        (500.0, None, "500 tokens/s"),
        (None, 1000.0, "1,000 places/s"),
        (None, None, ""),
    ],
)
def test_places_are_said_where_they_are_more(tokens, places, text):
    assert speed_text(tokens, places) == text


def lines(trained, num_lines=40):
    """Returns lines of steps that train some of their places; None: as older versions wrote them."""
    found = [metrics(step, random.Random(step)) for step in range(1, num_lines + 1)]
    for line in found:
        line["tokens_per_s"] = (PLACES if trained is None else trained) / line["step_s"]
        if trained is None:
            del line["places_per_s"]
    return found


def said(tmp_path, rows):
    figures = figures_of_run(read_run_dir(write_run(tmp_path / "r", rows, [])))
    cards = {below: large for large, below, _ in head_cards(figures)}
    names = [line.name for line in speed_panel(figures).series]
    return figures, cards, names, summary(figures)


def test_a_run_without_padding_has_tokens_alone(tmp_path):
    figures, cards, names, text = said(tmp_path, lines(PLACES - 40))
    assert figures.tokens == 40 * (PLACES - 40) and cards["tokens trained"] == "5.241M"
    assert "places/s" not in {*cards, *names} and "places for tokens" not in cards and " places/s" not in text


def test_a_run_that_trains_half_of_its_places_says_both(tmp_path):
    figures, cards, names, text = said(tmp_path, lines(PLACES // 2))
    assert figures.tokens == 20 * PLACES and figures.places == 40 * PLACES
    assert cards["tokens trained"] != cards["places for tokens"] and {"tokens/s", "places/s"} <= set(cards)
    assert {"tokens/s", "places/s"} <= set(names)
    tokens, places = (figures.recent(key) for key in ("tokens_per_s", "places_per_s"))
    assert tokens == pytest.approx(places / 2) and f"{tokens:,.0f} tokens/s of {places:,.0f} places/s" in text
    assert {"tokens_per_s", "places_per_s"} <= set(scalars_of(lines(PLACES // 2)[0]))


def test_lines_of_older_versions_are_places(tmp_path):
    figures, cards, names, text = said(tmp_path, lines(None))
    assert figures.tokens is None and figures.recent("tokens_per_s") is None
    assert "places/s" in cards and "tokens/s" not in cards and "tokens trained" not in cards
    assert "tokens/s" not in names and " tokens/s" not in text and " places/s, " in text


def test_a_run_that_an_older_version_began_has_both(tmp_path):
    rows = lines(None, 20) + lines(PLACES // 2)[20:]
    figures, cards, names, text = said(tmp_path, rows)
    assert figures.tokens is None and "places for tokens" in cards and {"tokens/s", "places/s"} <= set(names)
    assert " tokens/s of " in text
