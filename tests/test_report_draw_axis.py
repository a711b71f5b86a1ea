"""Axes of charts: ends, and ticks that are several, round and told apart."""

import random

import pytest

from sppo_jax.report.draw.axis import Axis, Scale, axis_ends, count_text


@pytest.mark.parametrize(
    ("axis", "ends"),
    [
        (Axis(label="x"), (-0.4, 10.4)),
        (Axis(label="x", low=0, high=20), (0, 20)),
        (Axis(label="x", low=0), (0, 10.4)),
    ],
)
def test_an_axis_ends_a_little_past_its_values_unless_it_is_set(axis, ends):
    assert axis_ends(axis, [10, 0, 4]) == pytest.approx(ends)


def test_a_logarithmic_axis_ends_past_its_values_by_a_share_of_its_decades():
    assert axis_ends(Axis(label="x", log=True), [1, 100]) == pytest.approx((10**-0.08, 10**2.08))


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (950, "950"), (9999, "9,999"), (12000, "12K"), (1.5e6, "1.5M"), (3e9, "3B")]
)
def test_counts_in_short(value, text):
    assert count_text(value) == text


def axes():
    """Yields axes of every kind with the values that they show: far apart, close together, around 0 or far from it."""
    drawn = random.Random(0)
    for _ in range(2000):
        log, whole = drawn.random() < 0.3, drawn.random() < 0.4
        low = 10 ** drawn.uniform(-4, 8) * (1 if log else drawn.choice((1, -1, 0)))
        span = (abs(low) or 1) * 10 ** drawn.uniform(-5, 3)
        low, span = (round(low), max(1, round(span))) if whole else (low, span)
        if not log or low > 0:
            yield Axis(label="", log=log, whole=whole, percent=not whole and drawn.random() < 0.3), [low, low + span]
    yield Axis(label="loss"), [9.21034, 9.21041]
    yield Axis(label="MFU", percent=True), [0.46201, 0.46209]
    yield Axis(label="step", whole=True, low=0), [1_000_000, 1_000_012]
    yield Axis(label="gradient norm", log=True), [0.70, 0.71]


def test_ticks_of_an_axis_are_several_and_differ():
    for axis, values in axes():
        labels = Scale(axis, values, 0, 100).labels()
        texts = [text for _, text in labels]
        assert 2 <= len(labels) <= 14 and len(set(texts)) == len(texts), (axis, values, texts)


def test_ticks_are_as_short_as_they_can_be():
    loss, steps = Axis(label="loss"), Axis(label="step", whole=True, low=0)
    assert [text for _, text in Scale(loss, [2, 4], 0, 1).labels()] == ["2", "2.5", "3", "3.5", "4"]
    assert [text for _, text in Scale(steps, [2000], 0, 1).labels()] == ["0", "500", "1,000", "1,500", "2,000"]
    assert "9.21036" in [text for _, text in Scale(loss, [9.21034, 9.21041], 0, 1).labels()]


@pytest.mark.parametrize(
    ("axis", "values", "want"),
    [
        (Axis(label="", log=True, whole=True), [16, 256], ["16", "32", "64", "128", "256"]),
        (Axis(label="", log=True, whole=True), [2**12, 2**14], ["4K", "8K", "16K"]),
        (Axis(label="", log=True, percent=True), [0.01, 0.1], ["1%", "2%", "5%", "10%"]),
        (Axis(label="", log=True), [300, 11_000], ["500", "1,000", "2,000", "5,000", "10K"]),
        (Axis(label="", log=True), [1e-9, 1e-4], ["1e-9", "1e-8", "1e-7", "1e-6", "1e-5", "0.0001"]),
        (Axis(label="", log=True, whole=True), [10, 1e6], ["10", "100", "1,000", "10K", "100K", "1M"]),
    ],
)
def test_ticks_of_logarithmic_axes_are_powers_of_two_for_counts_and_1_2_5_for_others(axis, values, want):
    assert [text for _, text in Scale(axis, values, 0, 1).labels()] == want
