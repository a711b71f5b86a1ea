"""Waves: tables in which k sequences run as one, which the executor can run and which differ in nothing but labels."""

import pytest
from schedule_cases import runs, wave_tables

from sppo_jax.schedule.check import check
from sppo_jax.schedule.generators import make_table
from sppo_jax.schedule.slots import head_slots, sequence_slots
from sppo_jax.schedule.table import Unit


def joined(table):
    """Returns the table whose sequences are the waves."""
    lengths = [length for length in table.chunk_lengths for _ in range(table.wave)]
    sequences = table.num_sequences // table.wave
    return make_table(table.name, table.num_stages, sequences, lengths, table.num_groups)


def test_every_table_of_waves_passes_the_checker():
    for table in wave_tables():
        check(table)
    assert {table.name for table in wave_tables()} == {
        "gpipe",
        "sppo",
        "breadth-first",
        "seq1f1b",
        "interleaved-seq1f1b",
    }


def test_a_machine_with_one_register_runs_tables_of_waves():
    assert all(runs(table) for table in wave_tables() if table.num_chunks <= 2 and table.num_sequences <= 6)


def test_a_wave_is_a_sequence_with_other_labels():
    for table in wave_tables()[::3]:
        other, k = joined(table), table.wave
        for tick, of_wave in zip(table.ticks, other.ticks, strict=True):
            for unit, label in zip(tick.units, of_wave.units, strict=True):
                assert (unit is None) == (label is None)
                if unit is not None:
                    wave, place = divmod(unit.sequence, k)
                    assert label == Unit(unit.op, wave, unit.chunk * k + place, unit.virtual_stage)


def test_diagonals_of_a_wave_are_those_of_one_sequence():
    for table in wave_tables()[::3]:
        other = joined(table)
        assert table.diagonal_bundles == other.diagonal_bundles
        assert table.overlaps_copies == other.overlaps_copies and table.tick_tokens == other.tick_tokens
    table = make_table("sppo", 4, 8, (8,) * 6, 1, 4)
    assert table.diagonal_bundles == tuple(range(4 * 6 + 3)) and sum(table.overlaps_copies) == 26
    # Counted from the first tick of each sequence, diagonals that are k apart would run together.
    assert table.unit_diagonals[1, 0, 0] == table.unit_diagonals[5, 0, 0] == 1


def test_a_wave_keeps_the_prefixes_of_its_sequences_open():
    for table in wave_tables():
        count, slots = sequence_slots(table)
        assert count == table.kv_peak and set(slots.values()) == set(range(count))
        if table.name in ("sppo", "breadth-first"):
            assert count == table.wave
        elif table.name == "gpipe":
            assert count == table.num_sequences
        else:
            assert table.wave <= count <= table.num_sequences
        assert head_slots(table)[0] == table.head_peak == joined(table).head_peak


def test_interleaved_waves_may_have_fewer_chunks_than_stages():
    table = make_table("sppo", 4, 4, (8, 8), 2, 2)
    assert table.num_chunks == 2 and sum(tick.op == "F" for tick in table.ticks) == 2 * (2 * 4 + 3)
    with pytest.raises(ValueError, match="multiple of the 4 stages"):
        make_table("sppo", 4, 4, (8, 8), 2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("sppo", 2, 6, (8,), 1, 4), "divide the sequences of a pipeline, got 6; use 3 or 6"),
        (("sppo", 2, 6, (8,), 1, 0), "divide the sequences of a pipeline, got 6; use 1,"),
        (("sppo", 2, 6, (8,), 1, 7), "schedule.wave=7 must divide the sequences of a pipeline, got 6; use 6,"),
        (("1f1b", 2, 4, (8,), 1, 2), "schedule.wave must be 1 with schedule.name=1f1b"),
        (("interleaved-1f1b", 2, 4, (8,), 2, 2), "got 2; use schedule.name=interleaved-seq1f1b"),
        (("sppo", 4, 6, (8, 8), 2, 3), "(a wave of 3 sequences has the 6 chunks of a sequence of its own)"),
        (("zigzag", 2, 4, (8,), 1, 2), "must be one of gpipe, "),
    ],
)
def test_waves_that_a_schedule_cannot_have(arguments, words):
    with pytest.raises(ValueError) as error:
        make_table(*arguments)
    assert words in str(error.value) and "\n" not in str(error.value)
