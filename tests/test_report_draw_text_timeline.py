"""Tables as CSV and as a picture in text."""

import pytest
from schedule_cases import all_tables, wave_tables

from sppo_jax.report.draw.text_timeline import text_passes, text_timeline
from sppo_jax.schedule.csv_format import from_csv, to_csv
from sppo_jax.schedule.generators import make_table


def test_csv_round_trip():
    for table in all_tables():
        assert from_csv(to_csv(table)) == table


def test_csv_text():
    assert to_csv(make_table("sppo", 2, 1, (16, 8))) == (
        "name=sppo,stages=2,groups=1,sequences=1,chunk_lengths=16 8\n"
        "F0.0.0,F0.1.0,H0.0,,H0.1,,B0.1.0,B0.0.0\n"
        ",F0.0.1,H0.0,F0.1.1,H0.1,B0.1.1,B0.0.1,\n"
    )


HEADER = "name=mine,stages=1,groups=1,sequences=1,chunk_lengths=8"


def test_csv_of_waves():
    text = to_csv(make_table("sppo", 1, 2, (8,), 1, 2))
    assert (
        text
        == "name=sppo,stages=1,groups=1,sequences=2,chunk_lengths=8,wave=2\nF0.0.0,H0.0,F1.0.0,H1.0,B1.0.0,B0.0.0\n"
    )
    for table in wave_tables()[::5]:
        assert from_csv(to_csv(table)) == table
    assert from_csv(text.replace(",wave=2", "")).wave == 1


def test_csv_allows_spaces_and_empty_lines():
    table = from_csv(f"\n{HEADER}\n\n F0.0.0 , H0.0, B0.0.0\n")
    assert [tick.op for tick in table.ticks] == ["F", "H", "B"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "got no text"),
        (HEADER.replace("=8", "=8,wave=0") + "\nF0.0.0", "wave of a schedule CSV must be a positive whole number"),
        (HEADER + ",waves=1\nF0.0.0", "chunk_lengths, and may have wave, got"),
        ("stages=1\nF0.0.0", "must have the keys name, stages, groups, sequences, chunk_lengths"),
        (
            HEADER.replace("stages=1", "stages=x") + "\nF0.0.0",
            "stages of a schedule CSV must be a positive whole number",
        ),
        (HEADER.replace("=8", "=8.5") + "\nF0.0.0", "whole numbers, got '8.5'"),
        (HEADER, "each of its 1 stages, got 0 rows"),
        (HEADER.replace("stages=1", "stages=2") + "\nF0.0.0\n,", "got rows of [1, 2] cells"),
        (HEADER + "\nF0.0", "got 'F0.0' at stage 0"),
        (HEADER + "\nF0.0.0,,B0.0.0", "got no unit in tick 1"),
        (HEADER.replace("stages=1", "stages=2") + "\nF0.0.0\nB0.0.1", "got B, F in tick 0"),
    ],
)
def test_csv_errors(text, words):
    with pytest.raises(ValueError) as error:
        from_csv(text)
    assert words in str(error.value)


def test_timeline_of_waves_says_so():
    first = text_timeline(make_table("sppo", 1, 4, (8,), 1, 2)).splitlines()[0]
    assert first == "sppo: 1 stage with 1 virtual stage each, 4 sequences of 1 chunk in waves of 2, 12 ticks"


def test_timeline_of_a_small_table():
    assert text_timeline(make_table("sppo", 2, 1, (8, 8))).splitlines() == [
        "sppo: 2 stages with 1 virtual stage each, 1 sequence of 2 chunks, 8 ticks",
        "tick     0    1    2    3    4    5    6    7",
        "stage 0  F0.0 F0.1 H0.0 .    H0.1 .    B0.1 B0.0",
        "stage 1  .    F0.0 H0.0 F0.1 H0.1 B0.1 B0.0 .",
        "F forward, B backward, H head and loss (all stages together); sequence.chunk; . idle",
    ]


def test_timeline_shows_every_unit_once_whatever_the_width():
    table = make_table("interleaved-seq1f1b", 2, 2, (8,) * 4, 2)
    for width in (1, 20, 47, 80, 1000):
        text = text_timeline(table, width=width, max_blocks=1000)
        rows = [line for line in text.splitlines() if line.startswith("stage")]
        words = [word for row in rows for word in row[9:].split() if word[0] in "FB"]
        assert len(words) == 2 * 2 * 4 * 4
        assert all(len(row) <= max(width, 15) for row in rows)


def test_long_timeline_is_abridged():
    table = make_table("seq1f1b", 2, 20, (8,) * 8)
    text = text_timeline(table, width=80, max_blocks=4)
    lines = text.splitlines()
    blocks = sum(line.startswith("tick") for line in lines)
    assert blocks == 4
    (gap,) = [line for line in lines if "left out" in line]
    shown = sum(len(line[9:].split()) for line in lines if line.startswith("tick"))
    assert shown + int(gap.split()[1]) == len(table.ticks)


def test_passes_stand_in_the_order_in_which_they_run():
    table = make_table("breadth-first", 2, 2, (8,) * 3, 3)
    lines = text_passes(table).splitlines()
    assert lines[1] == "each pass takes all 3 chunks: F0a F0b F0c B0c B0b B0a F1a F1b F1c B1c B1b B1a"
