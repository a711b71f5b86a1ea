"""Zero-bubble and V schedules: every order can run, waits as its paper says for equal costs, and holds as much."""

from graphlib import TopologicalSorter

import pytest

from bench.blocks import read_block
from sppo_jax.models.counts import layer_costs
from sppo_jax.plan.generators import make_table
from sppo_jax.plan.simulate import simulate
from sppo_jax.plan.table import Unit
from studies import zero_bubble
from studies import zero_bubble_orders as orders_
from studies import zero_bubble_rows as rows_
from studies.zero_bubble_costs import DEVICE, Setting, shape_of, token_bytes, unit_seconds
from studies.zero_bubble_orders import Orders, compute_ticks, of_ticks, with_weight_ticks
from studies.zero_bubble_simulate import (
    free_running,
    given_ticks,
    peak,
    ticks_of_any_kind,
    ticks_of_one_kind,
    waiting_weights,
)

SHAPES = [(2, 3), (4, 2), (4, 9), (5, 12), (8, 16)]
RATIOS = [(1.0, 1.0, 1.0), (1.0, 1.39, 0.9), (1.0, 2.31, 0.06), (1.0, 1.14, 1.56)]
V_PEAKS = {"V-Min": lambda stages: (stages + 4) // 3, "V-Half": lambda stages: (stages + 2) / 2, "V-ZB": lambda p: p}


def costs_of(orders: Orders, ratio=(1.0, 1.0, 1.0)):
    """Returns costs of F, B and W of a whole stage's layers, of which a unit has its share."""
    forward, backward, weights = ratio
    whole = {"F": forward, "B": backward + (0.0 if orders.splits else weights), "W": weights}
    return lambda unit: whole[unit.kind] / orders.num_groups


def all_orders(stages: int, sequences: int) -> dict[str, Orders]:
    """Returns every order that the benchmark makes, once for each way to make it."""
    found = {"1F1B": orders_.one_f_one_b(stages, sequences), "ZB1P": orders_.zb1p(stages, sequences)}
    found["ZB1P, ticks"] = orders_.reorder_in_ticks(found["ZB1P"])
    for name in orders_.OFFSETS:
        repeated = found[name] = orders_.v_schedule(name, stages, sequences)
        found[f"{name}, ticks"] = orders_.reorder_in_ticks(repeated)
        for last in (False, True):
            found[f"{name}, {last}"] = orders_.reorder(repeated, costs_of(repeated, RATIOS[1]), last)
    for chunks, groups in ((1, 1), (4, 1), (stages, 2)):
        table = make_table("interleaved-seq1f1b" if groups > 1 else "seq1f1b", stages, sequences, (8,) * chunks, groups)
        found[f"table {chunks} {groups}"] = of_ticks(table, compute_ticks(table))
        found[f"table {chunks} {groups}, W"] = of_ticks(table, with_weight_ticks(table))
    return found


def assert_can_run(orders: Orders, sequences: int, stage_of):
    """Asserts that each unit runs once and on its stage, and that no unit waits in a circle."""
    last, kinds = orders.num_virtual - 1, "FBW" if orders.splits else "FB"
    before: dict[Unit, list[Unit]] = {}
    for kind in kinds:
        for sequence in range(sequences):
            for chunk in range(orders.num_chunks):
                for virtual in range(last + 1):
                    key = sequence, chunk
                    needed = [Unit("F", *key, virtual)] if kind == "B" else [Unit("B", *key, virtual)]
                    if kind == "F":
                        needed = [Unit("F", *key, virtual - 1)] if virtual else []
                        needed += [Unit("F", sequence, chunk - 1, virtual)] if chunk else []
                    elif kind == "B":
                        needed += [Unit("B", *key, virtual + 1)] if virtual < last else []
                        needed += [Unit("B", sequence, chunk + 1, virtual)] if chunk < orders.num_chunks - 1 else []
                    before[Unit(kind, *key, virtual)] = needed
    assert sorted(unit for order in orders.stages for unit in order) == sorted(before)
    for stage, order in enumerate(orders.stages):
        assert {stage_of(unit.virtual_stage) for unit in order} == {stage}
        for unit, following in zip(order, order[1:], strict=False):
            before[following].append(unit)
    # Raises if units wait in a circle: for one another, or for units that come later on a stage.
    TopologicalSorter(before).prepare()


@pytest.mark.parametrize(("stages", "sequences"), SHAPES)
def test_every_order_can_run(stages, sequences):
    for name, orders in all_orders(stages, sequences).items():
        v_shaped = name.startswith("V")
        assert_can_run(
            orders,
            sequences,
            lambda virtual, v_shaped=v_shaped: min(virtual, 2 * stages - 1 - virtual) if v_shaped else virtual % stages,
        )


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize(("stages", "sequences"), SHAPES)
def test_lock_step_is_no_shorter_than_free_running(stages, sequences, ratio):
    for orders in all_orders(stages, sequences).values():
        costs = costs_of(orders, ratio)
        free = free_running(orders, costs)
        busiest = max(sum(map(costs, order)) for order in orders.stages)
        assert busiest == pytest.approx(sequences * orders.num_chunks * sum(ratio))
        assert busiest <= free * (1 + 1e-9)
        for in_ticks in (ticks_of_any_kind, ticks_of_one_kind):
            assert in_ticks(orders, costs) >= free * (1 - 1e-9)


def test_ticks_are_those_that_the_project_simulates():
    table = make_table("interleaved-seq1f1b", 4, 3, (8,) * 4, 2)
    seconds = {"F": (1.0, 1.5, 2.0, 2.5), "B": (2.0, 3.5, 4.0, 4.5), "H": (0.0,) * 4}

    def costs(unit: Unit, tick=None) -> float:
        return seconds[unit.kind][unit.chunk]

    assert given_ticks(compute_ticks(table), costs) == pytest.approx(simulate(table, costs).step_s)


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize(("stages", "sequences"), [(4, 9), (8, 16)])
def test_waits_of_1f1b_and_zb1p_by_formula(stages, sequences, ratio):
    forward, backward, weights = ratio
    table = make_table("1f1b", stages, sequences, (8,))
    plain = orders_.one_f_one_b(stages, sequences)
    step = (sequences + stages - 1) * sum(ratio)
    assert free_running(plain, costs_of(plain, ratio)) == pytest.approx(step)
    assert given_ticks(compute_ticks(table), costs_of(plain, ratio)) == pytest.approx(step)
    zero = orders_.zb1p(stages, sequences)
    wait = free_running(zero, costs_of(zero, ratio)) - sequences * sum(ratio)
    if weights <= forward:
        assert wait == pytest.approx((stages - 1) * (forward + backward - weights))
    assert peak(plain, 1) == peak(zero, 1) == stages


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_ticks_of_weights_are_full_and_do_not_wait(groups):
    stages, sequences, ratio = 4, 8, (1.0, 1.4, 0.9)
    table = make_table("interleaved-1f1b" if groups > 1 else "1f1b", stages, sequences, (8,), groups)
    ticks = with_weight_ticks(table)
    orders = of_ticks(table, ticks)
    assert all(None not in tick.units for tick in ticks if tick.kind == "W")
    step = sequences * sum(ratio) + (stages - 1) * (1.0 + 1.4) / groups
    assert given_ticks(ticks, costs_of(orders, ratio)) == pytest.approx(step)
    assert waiting_weights(orders) == stages


@pytest.mark.parametrize("name", V_PEAKS)
@pytest.mark.parametrize("stages", [4, 7, 8, 12, 16])
def test_v_schedules_hold_what_the_paper_promises(name, stages):
    repeated = orders_.v_schedule(name, stages, 3 * stages)
    promised = V_PEAKS[name](stages)
    assert promised - 0.5 <= peak(repeated, 1) <= promised + 0.5
    for orders in (
        orders_.reorder(repeated, costs_of(repeated)),
        orders_.reorder(repeated, costs_of(repeated, RATIOS[2]), True),
        orders_.reorder_in_ticks(repeated),
    ):
        assert peak(orders, 1) <= peak(repeated, 1)


@pytest.mark.parametrize("stages", [4, 8])
def test_v_schedules_of_equal_costs_wait_as_the_paper_promises(stages):
    sequences = 2 * stages
    waits = {}
    for name in orders_.OFFSETS:
        repeated = orders_.v_schedule(name, stages, sequences)
        reordered = [orders_.reorder(repeated, costs_of(repeated), last) for last in (False, True)]
        waits[name] = min(free_running(orders, costs_of(orders)) for orders in reordered) - 3 * sequences
        assert waits[name] < free_running(repeated, costs_of(repeated)) - 3 * sequences + 1e-9
    # V-ZB waits only for the first forward to reach the last stage, half a unit a stage.
    assert waits["V-ZB"] == pytest.approx((stages - 1) / 2)
    assert waits["V-ZB"] < waits["V-Half"] < waits["V-Min"] < 3 * (stages - 1)


def test_a_weights_unit_that_waits_holds_what_it_needs():
    order = [Unit("F", 0, 0, 0), Unit("F", 1, 0, 0), Unit("B", 0, 0, 0), Unit("B", 1, 0, 0)]
    late = Orders(stages=((*order, Unit("W", 0, 0, 0), Unit("W", 1, 0, 0)),), num_virtual=1)
    assert peak(late, 1) == 2 and peak(late, 3) == 6 and peak(late, 0.5) == 2
    soon = Orders(stages=((*order[:3], Unit("W", 0, 0, 0), order[3], Unit("W", 1, 0, 0)),), num_virtual=1)
    assert peak(soon, 3) == 1 + 3
    assert peak(Orders(stages=(tuple(order),), num_virtual=1), 3) == 2


def test_orders_in_which_units_wait_for_ever_are_refused():
    order = Unit("B", 0, 0, 0), Unit("F", 0, 0, 0)
    for run in (free_running, ticks_of_any_kind, ticks_of_one_kind):
        with pytest.raises(ValueError, match=r"every unit must be able to start, but B\(0,0,0\) needs"):
            run(Orders(stages=(order,), num_virtual=1), lambda unit: 1.0)
    with pytest.raises(ValueError, match=r"a slot on every stage, got \(1, 2, 1, 1\)"):
        orders_.building_block(8, (1, 2, 1, 1))


def test_bytes_of_a_token_by_hand():
    kept, hidden, mlp, heads = token_bytes(), 4096, 11008, 32
    assert kept.weights == 2 * (3 * hidden + mlp + 5 * hidden + 2 * mlp) == 131_584
    assert kept.stash == 2 * 2 * hidden + 4 * heads == 16_512
    assert kept.all == kept.stash + 2 * (2 * hidden + 2 * mlp + 2 * hidden) == 93_312


def test_weights_take_the_second_product_of_the_linear_layers():
    length, stages = 2**17, 8
    whole = unit_seconds(length, 1, stages)
    layers = shape_of(length).num_layers // stages
    layer = layer_costs(shape_of(length))
    product = layers * layer.linear_flops * (length / 8 + DEVICE.overhead_tokens) / DEVICE.linear_flops_s(2)
    added = layers * layer.params * 12 / DEVICE.hbm_bytes_s
    assert whole["W", 0] == pytest.approx(product + added)
    shares = [seconds["W", 0] / seconds["F", 0] for seconds in (unit_seconds(2**at, 1, stages) for at in (12, 14, 20))]
    assert shares == sorted(shares, reverse=True) and 1 < shares[0] < 2 and shares[-1] < 0.1


def test_waves_have_the_units_of_their_sequences_and_wait_less():
    setting = Setting(length=2**17, stages=4, chunks=8, sequences=8)
    cut, wave = rows_.own_table(setting, 8, 1), rows_.own_table(setting, 8, 1, 4)
    found = [of_ticks(cut, compute_ticks(cut)), of_ticks(wave, compute_ticks(wave))]
    busy = [sum(map(setting.costs(orders), orders.stages[0])) for orders in found]
    assert busy[0] == pytest.approx(busy[1])
    assert wave.wave == 4 and sorted(found[0].stages[0]) == sorted(found[1].stages[0])
    assert [peak(orders, 1) for orders in found] == [(8 + 6) / 8, (4 * 8 + 6) / 8]
    steps = [
        given_ticks(compute_ticks(table), setting.costs(own)) for table, own in zip((cut, wave), found, strict=True)
    ]
    assert steps[1] < steps[0]


@pytest.fixture(scope="module")
def found():
    setting = Setting(length=2**14, stages=8, chunks=4, sequences=rows_.SEQUENCES)
    return {row.name: row for row in rows_.rows(setting)}


@pytest.fixture(scope="module")
def gained():
    return list(rows_.gains())


def test_rows_hold_and_wait_as_their_tables(found):
    assert found["1F1B"].one_kind == pytest.approx(found["1F1B"].free) == pytest.approx(7 / 16)
    assert found["1F1B, v = 4"].one_kind == pytest.approx(7 / 64)
    assert found["1F1B"].peak_all == 15 and found[rows_.CUT].peak_all == (4 + 14) / 4
    # Lock-step waits for every rise of the costs of chunks, free-running stages do not.
    assert found[rows_.CUT].one_kind > found[rows_.CUT].free + 0.1
    assert found["V-Min"].peak_stash > found["V-Min"].peak_all
    for row in found.values():
        assert row.one_kind >= row.free - 1e-9 and (row.any_kind is None or row.any_kind >= row.free - 1e-9)


def test_the_design_page_has_the_figures_of_today(found, gained):
    page = " ".join((zero_bubble.DOCS / "design.md").read_text().split())
    saved = {length: [gain.saved for gain in gained if gain.setting.length == length] for length in (2**17, 2**20)}
    sixteen = [gain.saved for gain in gained if (gain.setting.chunks, gain.setting.sequences) == (1, 16)]
    assert f"{min(saved[2**20]):.1%} to {max(saved[2**20]):.1%} of a step at 1M" in page
    assert f"{min(saved[2**17]):.1%} to {max(saved[2**17]):.1%} at 128K" in page
    assert f"{min(sixteen):.1%} to {max(sixteen):.1%} for 16 whole sequences of 16K" in page
    assert f"The most is {max(gain.saved for gain in gained):.1%}" in page
    assert f"up to {max(gain.waiting_bytes for gain in gained) / 2**30:.1f} GiB of a device wait" in page
    deep, plain = found["1F1B, v = 4"], found["1F1B"]
    assert f"with v = 4 saves {1 - (1 + deep.one_kind) / (1 + plain.one_kind):.1%}" in page
    half, least = found["V-Half"], found["V-Min"]
    assert f"{half.one_kind:.0%} and {least.one_kind:.0%} to a step's work in ticks of one kind" in page
    assert f"and {half.free:.0%} and {least.free:.0%} if stages run freely" in page
    assert f"our 1F1B adds {plain.one_kind:.0%}, or {deep.one_kind:.0%} with v = 4" in page
    held = f"hold {half.peak_all:.1f} and {least.peak_all:.1f} sequences, and our 1F1B {plain.peak_all:.1f} or "
    assert held + f"{deep.peak_all:.1f}" in page


def test_the_command_writes_its_block(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(zero_bubble, "DOCS", tmp_path)
    monkeypatch.setattr(zero_bubble, "block", lambda: "the block")
    assert zero_bubble.main([]) == 0 and not list(tmp_path.iterdir())
    assert zero_bubble.main(["--write"]) == 0
    assert read_block(tmp_path / "validation.md", "zero_bubble") == "the block"
    assert capsys.readouterr().out == "the block\n" * 2
