"""Seconds of units by hand: FLOPs, padding, what is sent, what the accumulators take, and the end of a step."""

import math
from dataclasses import replace

import pytest

from sppo_jax.config import ModelConfig
from sppo_jax.hardware import DEVICES, make_cluster
from sppo_jax.hardware.attention_rates import AttentionCall, make_rates
from sppo_jax.models.counts import chunk_pairs, layer_costs, vocabulary_params
from sppo_jax.plan.parts import MeshShape
from sppo_jax.predict.seconds.costs import ALONE, CostModel, cost_model
from sppo_jax.predict.seconds.stage_shape import Recompute, StageShape
from sppo_jax.schedule.table import TickShape, Unit

MODEL = ModelConfig(vocab_size=100, hidden_size=8, num_layers=4, num_heads=4, num_kv_heads=2, mlp_size=16)
# One FLOP, one byte a second, and nothing else takes time.
PLAIN = replace(
    DEVICES["cpu"],
    matmul_flops_s=1.0,
    overhead_s=0.0,
    overhead_tokens=0,
    link_bytes_s=float("inf"),
    hbm_bytes_s=float("inf"),
)
LAYER = layer_costs(MODEL)


def costs(pipe=1, seq=1, *, data=1, ring=1, layers=2, linear=True, attention=False, size=2, **given) -> CostModel:
    reach, model = given.pop("recompute_reach", math.inf), replace(MODEL, sliding_window=given.pop("window", None))
    asked = {"kernel": "cudnn", "ring_pass": "auto"}
    asked = {name: given.pop(name, value) for name, value in asked.items()}
    return cost_model(
        model,
        make_cluster(replace(PLAIN, **given), data * pipe * seq),
        StageShape(
            mesh=MeshShape(data=data, pipe=pipe, seq=seq),
            ulysses=seq // ring,
            ring=ring,
            layers=layers,
            compute_bytes=size,
            length=2**14,
            **asked,
        ),
        Recompute(linear, attention, reach),
    )


def test_units_compute_their_flops_and_padding_in_linear_layers_alone():
    model, pairs = costs(2, 4), 8 * 16 + 32
    assert model.seconds("F", 16, 8) == 2 * (LAYER.linear_flops * 8 + LAYER.pair_flops * pairs) / 4
    backward = 2 * (3 * LAYER.linear_flops * 8 + 2.5 * LAYER.pair_flops * pairs) / 4
    assert model.seconds("B", 16, 8) == backward
    assert model.seconds("H", 16, 8) == 3 * 2 * 100 * 8 * 2 / 2
    of_table = model.of_chunks((16, 8))
    assert of_table(Unit("B", 0, 1, 0), TickShape(8, 24)) == backward
    padded = of_table(Unit("F", 0, 1, 0), TickShape(16, 24)) - model.seconds("F", 16, 8)
    assert padded == 2 * LAYER.linear_flops * 2


def test_a_window_charges_its_pairs_at_half_of_the_rate_and_its_keys_alone():
    given = dict(attention=True, hbm_bytes_s=1.0)
    whole, windowed = costs(**given), costs(**given, window=64)
    whole_s, windowed_s = (model.pair_s_of(*model.attention) for model in (whole, windowed))
    assert windowed_s == 2 * whole_s
    assert windowed.compute_s("F", 0, 64) - whole.compute_s("F", 0, 64) == whole_s * 64 * 64 / 2
    per_key, _ = whole.memory_bytes("F", again=False)
    pairs = windowed_s * 8 * 64 - whole_s * chunk_pairs(4096, 8)
    change = windowed.compute_s("F", 4096, 8) - whole.compute_s("F", 4096, 8)
    assert change == pytest.approx(pairs - per_key * (4096 - 64))


@pytest.mark.parametrize(("linear", "attention"), [(False, False), (True, False), (True, True)])
def test_backward_pays_for_what_it_computes_anew(linear, attention):
    model, bare = costs(linear=linear, attention=attention), costs(linear=False)
    extra = linear * LAYER.linear_flops * 8 + attention * LAYER.pair_flops * chunk_pairs(16, 8)
    assert model.seconds("B", 16, 8) - bare.seconds("B", 16, 8) == pytest.approx(2 * extra)


@pytest.mark.parametrize("split", [dict(), dict(seq=4), dict(seq=4, ring=4, ring_pass="kv")])
def test_backwards_of_late_ticks_have_their_attention(split):
    slow = dict(hbm_bytes_s=3e3, link_bytes_s=2e3)
    late, again, never = (
        costs(**split, **slow, attention=attention, recompute_reach=reach)
        for attention, reach in ((True, 24), (True, math.inf), (False, math.inf))
    )
    for kind in "FBH":
        for start, tokens, tick in (
            (0, 8, ALONE),
            (16, 8, ALONE),
            (16, 4, TickShape(8, 24)),
            (16, 4, TickShape(8, 28)),
        ):
            recomputes = max(start + tokens, tick.reach) <= 24
            same = again if recomputes else never
            assert late.seconds(kind, start, tokens, tick) == same.seconds(kind, start, tokens, tick)
    assert again.seconds("B", 24, 8) > late.seconds("B", 24, 8) and late.seconds("B", 16, 8) > never.seconds("B", 16, 8)


def test_every_tick_takes_its_overheads():
    slower = costs(2, 4, overhead_s=1.0, overhead_tokens=1)
    plain = costs(2, 4)
    extra = slower.seconds("F", 16, 8) - plain.seconds("F", 16, 8)
    assert extra == pytest.approx(1 + 2 * LAYER.linear_flops)
    assert slower.seconds("H", 16, 8) - plain.seconds("H", 16, 8) == pytest.approx(1 + 3 * 2 * 100 * 8 / 2)


def test_fused_attention_takes_whole_waves_and_waits_for_the_diagonal():
    # Eight devices' worth of tokens and heads: 2 ring members hold 1 of 4 heads each, so a wave is 2 * 24 tokens.
    waves, plain = (costs(seq=8, ring=2, linear=False, attention_rows=rows) for rows in (24, 0))
    unit = 2 * LAYER.pair_flops / 8
    for tokens, unfilled in ((8, 40), (48, 0), (49, 47), (96, 0)):
        extra = waves.compute_s("F", 16, tokens) - plain.compute_s("F", 16, tokens)
        assert extra == pytest.approx(unit * (unfilled * 16 + 0.75 * 48 * tokens))
        back = waves.compute_s("B", 16, tokens) - plain.compute_s("B", 16, tokens)
        assert back == pytest.approx(unit * 2.5 * (0.75 * 48 + 160) * tokens)
    again = costs(seq=8, ring=2, linear=False, attention=True, attention_rows=24)
    made_again = again.compute_s("B", 16, 8) - waves.compute_s("B", 16, 8)
    assert made_again == pytest.approx(unit * (chunk_pairs(16, 8) + 40 * 16 + 0.75 * 48 * 8))
    blockwise = costs(seq=8, ring=2, linear=False, kernel="blockwise", attention_rows=24)
    assert blockwise.compute_s("F", 16, 8) == plain.compute_s("F", 16, 8)


def test_units_move_the_prefix_and_backward_adds_to_gradients():
    model, plain = costs(seq=2, hbm_bytes_s=1.0), costs(seq=2)
    # Of 24 tokens a device has k and v of one of two heads of two elements; two bytes read and written.
    prefix = 24 * 2 * 1 * 2
    assert model.seconds("F", 16, 8) - plain.seconds("F", 16, 8) == pytest.approx(2 * prefix * 4)
    # bfloat16 written and read, float32 read and written.
    expected = 2 * (prefix * (4 + 12) + LAYER.params * 12)
    assert model.seconds("B", 16, 8) - plain.seconds("B", 16, 8) == pytest.approx(expected)
    again = costs(seq=2, attention=True, hbm_bytes_s=1.0).seconds("B", 16, 8)
    assert again - costs(seq=2, attention=True).seconds("B", 16, 8) == pytest.approx(expected + 2 * prefix * 4)
    # A ring shares the tokens instead of the heads.
    ring = costs(seq=2, ring=2, hbm_bytes_s=1.0).seconds("F", 16, 8) - costs(seq=2, ring=2).seconds("F", 16, 8)
    assert ring == pytest.approx(2 * prefix * 4)


def test_ulysses_sends_the_padding_of_a_tick_and_nothing_for_a_head():
    """What it sends without padding is compared with the program in `test_plan_contract`."""
    sent = costs(seq=4, link_bytes_s=1.0)
    assert sent.transfer_s("F", 16, 8, TickShape(16, 24)) == pytest.approx(2 * sent.transfer_s("F", 16, 8))
    assert sent.transfer_s("F", 16, 8) > 0 == sent.transfer_s("H", 16, 8)


def test_stages_send_a_hop_and_the_vocabularys_sums():
    sent, hidden = costs(4, link_bytes_s=1.0), 8 * 2
    assert sent.transfer_s("F", 16, 8) == pytest.approx(8 * (hidden + 1.5 * hidden))
    assert sent.transfer_s("B", 16, 8) == pytest.approx(8 * (hidden + 2.25 * hidden))
    assert sent.transfer_s("H", 16, 8) == pytest.approx(8 * 0.75 * (2 * hidden + 32))
    # Without ends there is the hop alone, and the head has ends in every tick.
    without = TickShape(16, 24, False)
    assert sent.transfer_s("F", 16, 8, without) == sent.transfer_s("B", 16, 8, without) == pytest.approx(16 * hidden)
    assert sent.transfer_s("H", 16, 8, without) == sent.transfer_s("H", 16, 16)
    for kind in "FBH":
        more_s = sent.transfer_s(kind, 16, 16) - sent.transfer_s(kind, 16, 8, without)
        assert sent.ends_s(kind, 16) == pytest.approx(more_s)
    assert costs(link_bytes_s=1.0).seconds("F", 16, 8) == costs().seconds("F", 16, 8)


def test_ring_passes_the_prefix_while_it_is_short_then_the_queries():
    sent = costs(seq=4, ring=4, link_bytes_s=1.0)
    # k and v of 2 heads of 2 elements, a quarter of the prefix a device, in 3 hops; lengths are power-of-two shares.
    assert sent.transfer_s("F", 0, 16) == pytest.approx(2 * 3 * 4 * 2 * 2 * 2 * 2)
    assert sent.transfer_s("F", 2, 15) == pytest.approx(2 * 3 * 8 * 2 * 2 * 2 * 2)
    # A tick whose other stages reach further sends their prefix.
    assert sent.transfer_s("F", 0, 16, TickShape(16, 32)) == pytest.approx(2 * 3 * 8 * 2 * 2 * 2 * 2)
    # q in 3 hops, out in float32 and LSE in 4; no longer dependent on the prefix.
    queries = 2 * 4 * 4 * (3 * 2 * 2 + 4 * (2 + 1) * 4)
    assert sent.transfer_s("F", 4096, 16) == sent.transfer_s("F", 8192, 16) == pytest.approx(queries)
    # Back: q, dout and out in 3 hops with LSE in float32, dq in float32 in 4.
    assert sent.transfer_s("B", 8192, 16) == pytest.approx(2 * 4 * 4 * (3 * (3 * 2 * 2 + 4) + 4 * 2 * 4))
    # The blockwise kernel asks for a float32 a row instead of the output; what is asked for travels.
    rows = costs(seq=4, ring=4, kernel="blockwise", link_bytes_s=1.0)
    assert rows.transfer_s("B", 8192, 16) == pytest.approx(2 * 4 * 4 * (3 * (2 * 2 * 2 + 2 * 4) + 4 * 2 * 4))
    pinned = costs(seq=4, ring=4, ring_pass="q", link_bytes_s=1.0)
    assert pinned.transfer_s("F", 0, 16) == pytest.approx(queries)


def test_a_network_between_hosts_is_slower():
    def cluster(per_host):
        device = replace(PLAIN, link_bytes_s=10.0, network_bytes_s=1.0)
        return replace(make_cluster(device, 8), num_hosts=8 // per_host, devices_per_host=per_host)

    near, far = (replace(costs(2, 4), cluster=cluster(per_host)) for per_host in (8, 4))
    hop = 2 * (2 + 1) * 8 * 2 / 2  # two tokens a device: the hop and the embedding's sum over two stages
    exchanged = near.transfer_s("F", 0, 8) - hop * 8 / 16 / 10 * 2
    assert far.transfer_s("F", 0, 8) - near.transfer_s("F", 0, 8) == pytest.approx(2 * 16 * 2 * (1 - 0.1))
    assert exchanged > 0


def test_the_update_of_an_optimizer_on_the_host_hides_behind_nothing():
    here = costs(2, 2, data=2, host_link_bytes_s=1.0)
    away = replace(here, host_params=(30, 7), again=(1.5, 0.0), layers=2, stage_layers=6)
    # All four arrays come, while three go; the first group's weights come and the last group's gradients leave.
    assert away.host_update_s() == 4 * (37 * 4 + 2 * 30 / 3) and here.host_update_s() == 0
    same = replace(away, host_params=(0, 0))
    assert away.step_overhead_s() - same.step_overhead_s() == pytest.approx(away.host_update_s())


def test_the_start_and_the_end_of_a_step():
    params = 2 * LAYER.params + vocabulary_params(MODEL) / 2 + 8  # the final norm
    update = costs(2, hbm_bytes_s=1.0)
    # Parameters, gradients and both moments read, three written, gradients read and zeroed once more; the cast.
    assert update.step_overhead_s() == pytest.approx(params * (9 * 4 + 6), rel=1e-3)
    shared = costs(2, 4, hbm_bytes_s=1.0)
    assert shared.step_overhead_s() == pytest.approx(params * ((8 * 4 + 6) / 4 + 4), rel=1e-3)
    # Weights gathered in two bytes, gradients summed in four.
    summed = costs(2, 2, data=2, link_bytes_s=1.0, network_bytes_s=1.0)
    assert summed.step_overhead_s() == pytest.approx(0.75 * params * (2 + 8), rel=1e-3)
    assert costs(2, link_bytes_s=1.0).step_overhead_s() == 0
    # Layers that are gathered one and a half times more, and whose sums are scattered once more.
    again = replace(summed, again=(1.5, 1.0))
    more = again.step_overhead_s() - summed.step_overhead_s()
    assert more == pytest.approx(0.75 * 2 * LAYER.params * (1.5 * 2 + 8), rel=1e-9)


def test_ticks_with_ends_gather_tables():
    plain = costs(2, 2, data=2, link_bytes_s=1.0, network_bytes_s=1.0)
    table = vocabulary_params(MODEL) // 2 // 2  # of two tables, on two stages
    gathered = replace(plain, table_params=table)
    with_ends, without = TickShape(8, 8, True), TickShape(8, 8, False)
    for kind, sent_bytes in (("F", 2), ("B", 8), ("H", 10)):
        more = gathered.transfer_s(kind, 0, 8, with_ends) - plain.transfer_s(kind, 0, 8, with_ends)
        assert more == pytest.approx(0.75 * table * sent_bytes, rel=1e-6)
    for kind in "FB":
        assert gathered.transfer_s(kind, 0, 8, without) == plain.transfer_s(kind, 0, 8, without)
    # They are no part of the start and the end of a step.
    less = plain.step_overhead_s() - gathered.step_overhead_s()
    assert less == pytest.approx(0.75 * 2 * table * (2 + 8), rel=1e-6)


def test_sums_between_hosts_use_the_adapters_of_all_members_of_a_host():
    def seconds(data, seq, per_host):
        model = costs(1, seq, data=data, link_bytes_s=100.0, network_bytes_s=1.0)
        cluster = replace(model.cluster, num_hosts=data * seq // per_host, devices_per_host=per_host)
        return replace(model, cluster=cluster).step_overhead_s()

    assert seconds(1, 4, 4) == pytest.approx(seconds(1, 4, 2) / 50)
    assert seconds(4, 1, 2) == pytest.approx(seconds(2, 2, 2) * 2)


def test_pipelines_inside_a_host_sum_over_its_links():
    rates = dict(link_bytes_s=1e9, network_bytes_s=1e3)
    near = replace(PLAIN, **rates)
    inside, across = (
        replace(costs(2, 2, data=2, **rates), cluster=replace(make_cluster(near, 8), **shape)).step_overhead_s()
        for shape in ({"num_hosts": 1, "devices_per_host": 8}, {"num_hosts": 2, "devices_per_host": 4})
    )
    assert across == pytest.approx(inside * 1e9 / 2e3)


def test_factors_must_make_up_the_axis():
    with pytest.raises(ValueError, match="ulysses \\* ring must be mesh.seq=4, got 2 \\* 1"):
        replace_seq = MeshShape(data=1, pipe=1, seq=4)
        cost_model(
            MODEL,
            make_cluster(PLAIN, 4),
            StageShape(mesh=replace_seq, ulysses=2, ring=1, layers=1, compute_bytes=2, kernel="cudnn", length=64),
            Recompute(linear=True),
        )


def test_attention_takes_the_measured_rate_of_its_call():
    call = dict(queries=64, keys=128)
    rates = make_rates(
        [
            AttentionCall(way="forward", queries=16, keys=128, flops_s=0.5),
            AttentionCall(way="forward", flops_s=1.0, **call),
            AttentionCall(way="backward", queries=16, keys=128, flops_s=1.0),
            AttentionCall(way="backward", flops_s=0.8, **call),
        ]
    )
    # A ring of two: a member has half of the queries and keys.
    measured, constant = (costs(seq=2, ring=2, linear=False, attention_rates=one) for one in (rates, None))
    no_scores = replace(constant, attention=())
    for kind, of_short, of_long in (("F", 2.0, 1.0), ("B", 1.0, 1.25)):
        for tokens, slower in ((32, of_short), (128, of_long)):
            start = 256 - tokens
            found, before = (
                one.compute_s(kind, start, tokens) - no_scores.compute_s(kind, start, tokens)
                for one in (measured, constant)
            )
            assert found == pytest.approx(slower * before)
