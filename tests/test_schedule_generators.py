"""Generated tables have the tick counts, stashes and slots that the formulas say."""

from collections import Counter
from itertools import product

import pytest
from schedule_cases import all_tables

from sppo_jax.schedule.generators import GENERATORS, chunks_in_flight, make_table
from sppo_jax.schedule.slots import color_intervals, head_slots, sequence_slots, stash_slots
from sppo_jax.schedule.table import Unit


def tick_counts(table):
    return Counter(tick.op for tick in table.ticks)


def whole_groups(table):
    return table.num_groups == 1 or table.num_chunks % table.num_stages == 0


def test_number_of_ticks():
    for table in all_tables():
        chunks, sequences, stages, groups = (
            table.num_chunks,
            table.num_sequences,
            table.num_stages,
            table.num_groups,
        )
        counts = tick_counts(table)
        assert counts["H"] == chunks * sequences
        assert counts["F"] == counts["B"]
        if table.name == "sppo":
            assert counts["F"] == sequences * (chunks * groups + stages - 1)
        elif table.name == "breadth-first":
            assert counts["F"] == sequences * (max(chunks, stages) * (groups - 1) + chunks + stages - 1)
        else:
            assert counts["F"] == chunks * sequences * groups + stages - 1


def test_chunks_in_flight_of_one_group():
    for table in all_tables():
        if table.num_groups > 1:
            continue
        chunks, total, stages = table.num_chunks, table.num_chunks * table.num_sequences, table.num_stages
        expected = {
            "gpipe": [total] * stages,
            "sppo": [chunks] * stages,
            "seq1f1b": [min(chunks + 2 * (stages - 1 - stage), total) for stage in range(stages)],
            "1f1b": [min(1 + 2 * (stages - 1 - stage), total) for stage in range(stages)],
        }[table.name]
        assert list(table.in_flight) == expected, table.name


def test_lock_step_holds_no_fewer_chunks_than_asynchronous_seq1f1b():
    for table in all_tables():
        if table.name == "seq1f1b":
            total = table.num_chunks * table.num_sequences
            for stage, count in enumerate(table.in_flight):
                assert count >= min(table.num_chunks + table.num_stages - 1 - stage, total)


def test_interleaved_chunks_in_flight_by_counting():
    for table in all_tables()[::7]:
        open_now, peak = Counter(), Counter()
        for tick in table.ticks:
            for stage, unit in enumerate(tick.units):
                if unit is not None and unit.op == "F":
                    open_now[stage] += 1
                    peak[stage] = max(peak[stage], open_now[stage])
            for stage, unit in enumerate(tick.units):
                if unit is not None and unit.op == "B":
                    open_now[stage] -= 1
        assert list(table.in_flight) == [peak[stage] for stage in range(table.num_stages)]


def test_keys_and_values_of_how_many_sequences():
    for table in all_tables():
        count, slots = sequence_slots(table)
        assert set(slots) == {(s, q) for s in range(table.num_stages) for q in range(table.num_sequences)}
        assert set(slots.values()) == set(range(count))
        if table.name in ("sppo", "breadth-first"):
            assert count == 1
        elif table.name == "gpipe":
            assert count == table.num_sequences
        elif table.name == "1f1b":
            assert count == min(2 * table.num_stages - 1, table.num_sequences)


@pytest.mark.parametrize("index", range(0, 1000, 91))
def test_no_two_stashes_share_a_slot_at_once(index):
    table = all_tables()[index]
    ticks = table.unit_ticks
    for count, slots in stash_slots(table, lambda unit: unit.chunk % 2).values():
        users = {}
        for (stage, *key), slot in slots.items():
            assert 0 <= slot < count
            span = (ticks[Unit("F", *key)], ticks[Unit("B", *key)])
            for other in users.setdefault((stage, slot), []):
                assert span[1] < other[0] or other[1] < span[0]
            users[stage, slot].append(span)


def test_no_two_sequences_share_keys_and_values_at_once():
    for table in all_tables()[::31]:
        _, slots = sequence_slots(table)
        holder = {}
        left = Counter()
        for tick in table.ticks:
            for stage, unit in enumerate(tick.units):
                if unit is None or unit.op == "H":
                    continue
                slot = slots[stage, unit.sequence]
                assert holder.setdefault((stage, slot), unit.sequence) == unit.sequence
                left[stage, unit.sequence] += 1
                if left[stage, unit.sequence] == 2 * table.num_chunks * table.num_groups:
                    del holder[stage, slot]


def test_head_gradients_wait_in_their_own_slots():
    for table in all_tables()[::31]:
        count, slots = head_slots(table)
        waiting = {}
        for tick in table.ticks:
            for unit in {unit for unit in tick.units if unit is not None}:
                key = (unit.sequence, unit.chunk)
                if unit.op == "H":
                    assert slots[key] not in waiting.values()
                    waiting[key] = slots[key]
                elif unit.op == "B" and unit.virtual_stage == table.num_virtual_stages - 1:
                    del waiting[key]
        assert not waiting and set(slots.values()) == set(range(count))


def test_colors_are_as_few_as_open_intervals():
    assert color_intervals({"a": (0, 3), "b": (1, 2), "c": (3, 4), "d": (4, 5)}) == (
        2,
        {"a": 0, "b": 1, "c": 1, "d": 0},
    )


def test_seq1f1b_alternates_after_the_first_sequence_is_through():
    table = make_table("seq1f1b", 2, 2, (8, 8))
    assert "".join(tick.op for tick in table.ticks) == "FFHFHBFHBFHBBB"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("zigzag", 2, 1, (8,)), "must be one of gpipe, "),
        (("sppo", 0, 1, (8,)), "pipeline stages of a schedule must be at least 1, got 0"),
        (("1f1b", 2, 1, (8, 8)), "one chunk a sequence, got 2 chunks"),
        (("seq1f1b", 2, 1, (8, 8), 2), "use schedule.name=interleaved-seq1f1b"),
        (("interleaved-seq1f1b", 2, 1, (8, 8), 1), "schedule.interleave of at least 2, got 1"),
        (("interleaved-seq1f1b", 4, 1, (8,) * 6, 2), "use 4 or 8 chunks, or schedule.interleave=1"),
        (("sppo", 4, 2, (8, 8), 2), "got 2 chunks with 1 sequences at once; use 4 chunks"),
        (("interleaved-1f1b", 4, 6, (8,), 2), "multiple of the 4 stages, got 6"),
    ],
)
def test_shapes_that_a_schedule_cannot_have(arguments, words):
    with pytest.raises(ValueError) as error:
        make_table(*arguments)
    assert words in str(error.value)


def test_every_generator_has_a_name_of_its_own():
    assert {table.name for table in all_tables()} == set(GENERATORS)


def test_the_most_chunks_in_flight_are_known_without_a_table():
    cases = 0
    for pipe, groups, chunks, sequences, wave in product(
        (1, 2, 3, 4), (1, 2, 3), (1, 2, 3, 5, 8), (1, 2, 4, 12), (1, 2)
    ):
        if sequences % wave:
            continue
        name = "interleaved-seq1f1b" if groups > 1 else "seq1f1b"
        try:
            table = make_table(name, pipe, sequences, (8,) * chunks, groups, wave)
        except ValueError:
            continue  # chunks that do not form whole convoys
        held = chunks_in_flight(pipe, groups, sequences // wave, wave * chunks)
        assert held == max(table.in_flight), (name, pipe, groups, chunks, sequences, wave)
        # A prefix is held as long as any of its chunks.
        assert -(-held // chunks) <= table.prefix_peaks.kept
        cases += 1
    assert cases > 100
