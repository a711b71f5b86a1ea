"""An outline holds what its table does: the same ticks once the rounds are written out, the same figures as it is."""

from functools import lru_cache
from itertools import chain, product

import pytest

from sppo_jax.predict.seconds.simulate import simulate
from sppo_jax.schedule.generators import GENERATORS, make_table
from sppo_jax.schedule.outline import all_rounds, make_outline
from sppo_jax.schedule.slots import head_slots, prefix_slots, sequence_slots, stash_slots
from sppo_jax.schedule.table import MIN_HOST_GAP, Tick
from sppo_jax.schedule.waiting import waiting_slots


@lru_cache(maxsize=1)
def pairs():
    """Returns tables of up to 4 stages, 6 chunks and 12 sequences with their outlines, some of them in waves."""
    found = []
    alone = product(GENERATORS, range(1, 5), (1, 2, 3, 4, 6), (1, 2, 5, 8, 9, 12), range(1, 4), (1,))
    waves = product(GENERATORS, (1, 2, 4), (1, 3, 4), (2, 8, 9, 12), (1, 2), (2, 3, 4))
    for name, stages, chunks, sequences, groups, wave in chain(alone, waves):
        asked = name, stages, sequences, tuple(range(chunks + 8, 8, -1)), groups, wave
        try:
            table = make_table(*asked)
        except ValueError as error:
            with pytest.raises(ValueError) as raised:
                make_outline(*asked)
            assert str(raised.value) == str(error)
            continue
        found.append((table, make_outline(*asked)))
    assert {outline.name for _, outline in found if outline.repeats} == set(GENERATORS)
    in_waves = {outline.name for _, outline in found if outline.repeats and outline.wave > 1}
    assert in_waves == {"gpipe", "sppo", "breadth-first", "seq1f1b", "interleaved-seq1f1b"}
    return found


def written_out(outline):
    """Returns all ticks of an outline; of each op the sequences go on where a round is over."""
    ticks, on, place = [], dict.fromkeys("FBH", 0), 0

    def write(start, stop):
        for tick in outline.ticks[start:stop]:
            units = [unit and unit._replace(sequence=unit.sequence + on[tick.op]) for unit in tick.units]
            ticks.append(Tick(tick.op, tuple(units)))

    for start, stop, rounds, sequences in outline.repeats:
        write(place, start)
        for number in range(rounds):
            if number:
                for op in {tick.op for tick in outline.ticks[start:stop]}:
                    on[op] += sequences
            write(start, stop)
        place = stop
    write(place, len(outline.ticks))
    return tuple(ticks)


def test_the_rounds_of_an_outline_are_the_ticks_of_the_table():
    for table, outline in pairs():
        assert written_out(outline) == table.ticks
        assert (outline.num_sequences, outline.name) == (table.num_sequences, table.name)


def test_an_outline_has_the_diagonals_and_the_shapes_of_its_table():
    for table, outline in pairs():
        assert outline.diagonal_bundles == table.diagonal_bundles
        assert outline.bundle_tokens == table.bundle_tokens
        assert tuple(all_rounds(outline.tick_tokens, outline.repeats)) == table.tick_tokens
        gaps, of_table = outline.bundle_gaps, table.bundle_gaps
        assert [gap >= MIN_HOST_GAP for gap in gaps] == [gap >= MIN_HOST_GAP for gap in of_table]
        if table.name != "gpipe":
            assert gaps == of_table


def test_an_outline_holds_as_much_at_once_as_its_table_has_slots():
    for table, outline in pairs():
        bundles = table.diagonal_bundles
        of_unit = {key: bundles[diagonal] % 2 for key, diagonal in table.unit_diagonals.items()}
        slots = stash_slots(table, lambda unit, of=of_unit: of[unit[1:]])
        counts = outline.stash_peaks([bundle % 2 for bundle in range(max(bundles) + 1)])
        assert dict(enumerate(counts)) == {name: count for name, (count, _) in slots.items()}
        assert outline.kv_peak == table.kv_peak == sequence_slots(table)[0]
        again = "rebuild" if table.num_chunks > 1 else "recompute"
        slots = {kv: prefix_slots(table, kv) for kv in ("keep", again)}
        counts = slots["keep"].num_kv, slots[again].num_kv, slots["keep"].num_grads
        if table.passes_groups_in_turn:
            assert outline.prefix_peaks == table.prefix_peaks == counts
        assert (outline.prefix_peaks.kept, outline.prefix_peaks.grads) == (counts[0], counts[2])
        assert outline.waiting_peak == table.waiting_peak == waiting_slots(table)[0]
        assert outline.head_peak == table.head_peak == head_slots(table)[0]
        assert outline.in_flight == table.in_flight
        assert max(table.in_flight) == stash_slots(table, lambda unit: None)[None][0]


def test_an_outline_takes_the_time_of_its_table_to_the_last_bit():
    def costs(unit, tick):
        return {"F": 0.1, "B": 0.27, "H": 0.03}[unit.op] * (1 + unit.chunk**1.5) + 0.001 * tick.tokens

    for table, outline in pairs():
        least_s = [0.3 * (tokens % 3) for tokens in outline.tick_tokens]
        short = simulate(outline, costs, least_s)
        long = simulate(table, costs, tuple(all_rounds(least_s, outline.repeats)))
        assert (short.step_s, short.peak_in_flight) == (long.step_s, long.peak_in_flight)
        assert short.busy_s == pytest.approx(long.busy_s, rel=1e-12)
        assert short.bubble_fraction == pytest.approx(long.bubble_fraction, rel=1e-12, abs=1e-12)
        assert tuple(all_rounds(short.tick_s, outline.repeats)) == long.tick_s


@pytest.mark.parametrize("name", ["sppo", "seq1f1b", "gpipe", "interleaved-seq1f1b"])
def test_an_outline_does_not_grow_with_the_sequences(name):
    groups = 2 if name.startswith("interleaved") else 1
    for wave in (1, 4):
        short, long = (make_outline(name, 4, sequences, (8,) * 8, groups, wave) for sequences in (32, 4096))
        assert len(short.ticks) == len(long.ticks) and long.num_sequences == 4096
