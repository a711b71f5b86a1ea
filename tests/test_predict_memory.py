"""Costs and memory against hand counts."""

from dataclasses import replace
from itertools import product

import pytest

from sppo_jax.config import ModelConfig
from sppo_jax.hardware import DEVICES, make_cluster, most_pinned_bytes, usable_host_bytes
from sppo_jax.models.counts import layer_costs
from sppo_jax.plan.parts import MeshShape, StashPlan
from sppo_jax.predict import holders
from sppo_jax.predict.fitted import NUMBERS, TOLD
from sppo_jax.predict.holders import ALL, BACKWARD, MOMENTS, Ways, optimizer_bytes, ring_work, sums
from sppo_jax.predict.memory import Memory, predict_memory
from sppo_jax.predict.seconds.copies import copy_seconds
from sppo_jax.predict.seconds.costs import cost_model
from sppo_jax.predict.seconds.simulate import simulate
from sppo_jax.predict.seconds.stage_shape import Recompute, StageShape
from sppo_jax.predict.shape import MemoryShape
from sppo_jax.predict.stash_bytes import fetched_bytes, stash_bytes
from sppo_jax.predict.workspace import kv_heads_per_device
from sppo_jax.program.stash import stash_classes
from sppo_jax.schedule.generators import GENERATORS, make_table
from sppo_jax.schedule.outline import all_rounds, make_outline
from sppo_jax.schedule.table import TickShape
from sppo_jax.search.space.offload import choose_alpha

GIB = 2**30

MODEL = ModelConfig(vocab_size=100, hidden_size=8, num_layers=4, num_heads=4, num_kv_heads=2, mlp_size=16)
SHAPE = MemoryShape(model=MODEL, layers=2, seq=1, ulysses=1, compute_bytes=4)


def stash(table, alpha=0.0, **places) -> StashPlan:
    fields = {"inputs": "keep", "attention": "keep", "rest": "recompute", **places}
    diagonals = table.num_chunks * table.num_groups + table.num_stages - 1
    return StashPlan(alpha=(alpha,) * diagonals, **fields)


def test_states_keys_and_values_by_hand():
    table = make_table("seq1f1b", 2, 3, (16, 8))
    memory = predict_memory(table, SHAPE, stash(table))
    layer = layer_costs(MODEL)
    whole = 2 * layer.params + 2 * 50 * 8 + 8  # two layers, half of embedding and head, the final norm
    assert memory.hbm["grads"] == 4 * whole and memory.hbm["params"] == 12 * whole
    # One device in float32 works on the parameters themselves.
    assert memory.hbm["weights"] == 0
    # Three sequences in flight, two layers, the sequence and one longest chunk.
    assert memory.hbm["kv"] == 3 * 2 * (24 + 16) * layer.kv_elements * 4
    assert memory.hbm["kv_grad"] == memory.hbm["kv"]
    half = predict_memory(table, SHAPE, stash(table, kv_grad_dtype="bfloat16"))
    assert half.hbm["kv_grad"] == memory.hbm["kv"] // 2
    small = predict_memory(table, replace(SHAPE, compute_bytes=2), stash(table))
    assert small.hbm["weights"] == 2 * whole and small.hbm["params"] == 12 * whole
    assert small.hbm["kv_grad"] == 2 * small.hbm["kv"]


def test_devices_of_a_stage_share_its_parameters_between_steps():
    table = make_table("sppo", 2, 1, (16, 16))
    alone, four = (predict_memory(table, replace(SHAPE, **size), stash(table)) for size in ({}, dict(seq=2, data=2)))
    norm = 8  # the final one stays whole
    assert four.hbm["params"] == (alone.hbm["params"] - 12 * norm) // 4 + 12 * norm
    assert four.most("grads") == alone.most("grads") == four.most("weights")


def test_the_fuller_of_backward_and_logits_counts():
    model = replace(MODEL, vocab_size=100_000)
    large = replace(SHAPE, model=model, compute_bytes=2)
    apart, mixed = (make_table(name, 2, 2, (16, 16)) for name in ("gpipe", "seq1f1b"))
    logits = 16 * 50_000 * 10
    assert predict_memory(mixed, large, stash(mixed)).hbm["work"] == logits
    before = predict_memory(apart, large, stash(apart))
    # Where all heads come first, dK and dV are not there yet.
    assert before.hbm["work"] == logits and before.hbm["kv_grad"] == 0 < before.most("kv_grad")


def test_stash_moves_from_device_to_host_with_alpha():
    table = make_table("sppo", 2, 1, (16,) * 4)
    token = 2 * (8 * 4 + 8 * 4 + 4 * 4)  # two layers: input, attention output, LSE
    # Four chunks and a spare slot.
    assert stash_bytes(table, SHAPE, stash(table))[:2] == (5 * 16 * token, 0)
    on_host = stash(table, 0.25, inputs="host", attention="host")
    device, host, copies, _, _ = stash_bytes(table, SHAPE, on_host)
    # The last chunk of a stage is read back at once and stays whole: it has a class of its own, with a spare slot.
    # Each of the four other diagonals has a row on the host.
    assert (device, host) == (5 * 16 * token * 3 // 4 + 2 * 16 * token, 4 * 16 * token // 4)
    assert copies == 16 * token // 4
    nothing = stash(table, inputs="recompute", attention="recompute")
    assert stash_bytes(table, SHAPE, nothing)[:2] == (5 * 16 * 8 * 4, 0)


def test_rest_on_the_host_stays_on_the_device_where_it_is_read_back_at_once():
    table = make_table("sppo", 1, 1, (16,) * 3)
    rest = 2 * 4 * layer_costs(MODEL).rest_elements
    token = stash_bytes(table, SHAPE, stash(table))[0] // (4 * 16)  # three chunks and a spare slot
    device, host = stash_bytes(table, SHAPE, stash(table, rest="host"))[:2]
    assert host == 2 * 16 * rest  # gaps 5, 3 and 1: two chunks
    assert device == 3 * 16 * token + 2 * 16 * (token + rest)


def test_ulysses_and_ring_share_keys_and_values():
    table = make_table("sppo", 1, 1, (16, 16))
    alone = predict_memory(table, SHAPE, stash(table)).hbm["kv"]
    ring = predict_memory(table, replace(SHAPE, seq=2), stash(table)).hbm["kv"]
    ulysses = predict_memory(table, replace(SHAPE, seq=2, ulysses=2), stash(table)).hbm["kv"]
    replicated = predict_memory(table, replace(SHAPE, seq=4, ulysses=4), stash(table)).hbm["kv"]
    assert ring == ulysses == replicated == alone // 2
    assert [kv_heads_per_device(MODEL, factor) for factor in (1, 2, 4)] == [2, 1, 1]
    uneven = replace(MODEL, num_heads=12, num_kv_heads=6, head_dim=4)
    assert [kv_heads_per_device(uneven, factor) for factor in (2, 3, 4, 12)] == [3, 2, 3, 1]


def test_more_sequences_and_longer_chunks_need_more():
    one = make_table("seq1f1b", 2, 1, (16,) * 4)
    two = make_table("seq1f1b", 2, 2, (16,) * 4)
    long = make_table("seq1f1b", 2, 1, (64,))
    sizes = [predict_memory(table, SHAPE, stash(table)).hbm_bytes for table in (one, two, long)]
    assert sizes[0] < sizes[1] and sizes[0] < sizes[2]


def test_fits_leaves_a_reserve_and_looks_at_the_host_too():
    cluster = replace(make_cluster(replace(DEVICES["cpu"], hbm_bytes=1000), 2), host_bytes=200)
    # 6% of a device's memory stay free, and 5% of its part of the host's.
    assert Memory(hbm={"a": 900, "b": 40}, host=95).fits(cluster)
    assert not Memory(hbm={"a": 941}, host=0).fits(cluster)
    assert not Memory(hbm={"a": 10}, host=96).fits(cluster)


def test_pools_of_gpus_pin_whole_gib():
    gpus = replace(make_cluster(DEVICES["h100"], 2), host_bytes=6 * GIB)  # 97% of it are 2.91 GiB a device
    assert usable_host_bytes(gpus) == 2 * GIB
    assert usable_host_bytes(replace(gpus, device=DEVICES["cpu"])) == int(3 * GIB * 0.95)
    large = replace(gpus, host_bytes=2000 * GIB)
    assert usable_host_bytes(large) == int(1000 * GIB * 0.95) and most_pinned_bytes(large) == 970 * GIB


def test_a_tpu_keeps_tiles_and_copies_on_their_way():
    table = make_table("sppo", 2, 1, (16,) * 4)
    on_host = stash(table, 1.0, inputs="host", attention="host")
    plain, tiled = (predict_memory(table, shape, on_host) for shape in (SHAPE, replace(SHAPE, platform="tpu")))
    assert tiled.hbm["kv"] == plain.hbm["kv"] * 128 // MODEL.head_dim
    assert tiled.host == plain.host and tiled.hbm["copies"] == 2 * plain.hbm["copies"]
    for moment in BACKWARD:
        assert tiled.moments[moment]["work"] == plain.moments[moment]["work"]


def test_a_norm_behind_an_mlp_makes_its_forward_early_but_on_tpus():
    table = make_table("sppo", 1, 1, (16,) * 4)

    def extra(platform):
        shapes = (
            replace(SHAPE, platform=platform, model=replace(MODEL, norms=norms)) for norms in ("behind", "before")
        )
        behind, before = (predict_memory(table, shape, stash(table)).moments["mlp"]["work"] for shape in shapes)
        return behind - before

    tokens = table.chunk_lengths[0] // SHAPE.seq
    assert extra("gpu") == 5 * tokens * MODEL.mlp_size * SHAPE.compute_bytes and extra("tpu") == 0


def test_what_a_hop_sends_is_queries_or_keys_with_their_gradients():
    ring = replace(SHAPE, seq=2, compute_bytes=2)
    # Of 8 tokens and 4 heads of 2: queries, output, its cotangent, dQ, LSE. Keys of 4 tokens are fewer bytes.
    queries, keys = 8 * 4 * (2 * (3 * 2 + 4) + 4), 2 * 4 * 2 * 2 * (2 + 4)
    assert ring_work(ring, 8, 4) == 2 * keys and ring_work(ring, 8, 4000) == 2 * queries
    assert ring_work(replace(ring, ulysses=2), 8, 4) == 0


@pytest.mark.parametrize("name", GENERATORS)
def test_an_outline_needs_what_its_table_needs_and_sends_as_much(name):
    # Logits are the fullest moment, so that it matters whether dK and dV exist by then.
    large = replace(SHAPE, model=replace(MODEL, vocab_size=100_000), seq=2, compute_bytes=2)
    slow = make_cluster(replace(DEVICES["cpu"], host_link_bytes_s=1e6), 8)
    shortened = 0
    for stages, chunks, sequences, groups in product((1, 2, 4), (1, 2, 6), (1, 4, 12), (1, 2)):
        asked = name, stages, sequences, tuple(range(2 * chunks + 8, 8, -2)), groups
        try:
            table = make_table(*asked)
        except ValueError:
            continue  # a schedule that does not take these chunks
        outline = make_outline(*asked)
        shortened += bool(outline.repeats)
        costs = cost_model(
            large.model,
            slow,
            StageShape(
                mesh=MeshShape(data=1, pipe=stages, seq=2),
                ulysses=1,
                ring=2,
                layers=2,
                compute_bytes=2,
                kernel="cudnn",
                length=sum(table.chunk_lengths),
            ),
            Recompute(linear=1),
        )
        places = StashPlan(inputs="host", attention="host", rest="host", alpha=())
        chosen, why = choose_alpha(places, "hidden", table, large, costs)
        assert choose_alpha(places, "hidden", outline, large, costs) == (chosen, why)
        assert predict_memory(outline, large, chosen) == predict_memory(table, large, chosen)
        copies = copy_seconds(outline, large, chosen, costs)
        assert tuple(all_rounds(copies, outline.repeats)) == copy_seconds(table, large, chosen, costs)
    assert shortened


def test_a_batch_is_the_devices_own_tokens_and_the_tags_of_sequences_in_flight():
    few, many = (make_table("seq1f1b", 2, sequences, (16, 16)) for sequences in (8, 64))
    for seq in (1, 4):
        shape = replace(SHAPE, seq=seq)
        taken = [predict_memory(table, shape, stash(table)).hbm["batch"] for table in (few, many)]
        # Four int32 of each token, and again with the room of a chunk.
        assert taken[1] - taken[0] == 56 * 4 * 4 * (32 + 48) // seq
        assert taken[0] == 8 * 4 * 4 * (32 + 48) // seq + 2 * 4 * few.kv_peak * 48
    assert few.kv_peak == many.kv_peak < 4


def costs_on(device, pipe, *, recompute_linear, length):
    """Returns the costs of stages of one such device."""
    return cost_model(
        MODEL,
        make_cluster(device, pipe),
        StageShape(
            mesh=MeshShape(data=1, pipe=pipe, seq=1),
            ulysses=1,
            ring=1,
            layers=1,
            compute_bytes=4,
            kernel="blockwise",
            length=length,
        ),
        Recompute(linear=recompute_linear),
    )


def test_hidden_copies_make_no_tick_longer_not_even_one_without_ends():
    table = make_table("sppo", 4, 1, (16,) * 16, 2)
    # Links so slow that a tick with ends takes more than twice as long as one without.
    device = replace(DEVICES["cpu"], host_link_bytes_s=1.5e6, link_bytes_s=1e6, overhead_s=0.0)
    costs = costs_on(device, 4, recompute_linear=1, length=256)
    assert costs.ends_s("F", 16) > costs.seconds("F", 0, 16, TickShape(16, 16, False))
    shape = replace(SHAPE, layers=1)
    chosen, _ = choose_alpha(stash(table, inputs="host", attention="host"), "hidden", table, shape, costs)
    assert 0 < max(chosen.alpha) < 1
    seconds = costs.of_chunks(table.chunk_lengths)
    copied_s = copy_seconds(table, shape, chosen, costs)
    assert simulate(table, seconds, copied_s).tick_s == simulate(table, seconds).tick_s


def test_the_whole_stash_goes_where_the_rest_goes_and_groups_take_turns():
    """Shares that differ in one pass would cut the loops of ticks."""
    device = replace(DEVICES["cpu"], host_link_bytes_s=1.5e6, overhead_s=0.0)
    shape = replace(SHAPE, layers=1)
    for schedule, want in (("breadth-first", {0.0, 1.0}), ("sppo", {0.0})):
        table = make_table(schedule, 1, 1, (16,) * 4, 2)
        costs = costs_on(device, 1, recompute_linear=0, length=64)
        places = stash(table, inputs="host", attention="host", rest="host")
        chosen, why = choose_alpha(places, "hidden", table, shape, costs)
        assert set(chosen.alpha) == want and ("offloads the whole stash" in why) == (schedule == "breadth-first")
        assert chosen.alpha.count(0.0) == (1 if schedule == "breadth-first" else len(chosen.alpha))


def test_chunks_without_attention_outputs_take_less_memory_and_copies_as_long():
    table, shape = make_table("breadth-first", 1, 1, (16,) * 4, 3), replace(SHAPE, layers=1)
    costs = costs_on(DEVICES["cpu"], 1, recompute_linear=0, length=64)
    alpha = tuple(float(bundle < 11) for bundle in table.diagonal_bundles)
    whole = replace(stash(table, inputs="host", attention="host"), alpha=alpha)
    late, none = replace(whole, attention_from=2), replace(whole, attention="recompute")
    copied_s = [copy_seconds(table, shape, places, costs) for places in (whole, late, none)]
    assert copied_s[0] == copied_s[1] and max(copied_s[2]) < max(copied_s[1])
    of_whole, of_late, of_none = (stash_bytes(table, shape, places)[1] for places in (whole, late, none))
    # Of 11 stashes on the host (the last one stays) 5 are of the last two chunks.
    assert (of_late - of_none) * 11 == (of_whole - of_none) * 5 > 0


def breadth_first(num_chunks, groups, **places):
    table = make_table("breadth-first", 1, 1, (64 // num_chunks,) * num_chunks, groups)
    return table, stash(table, 1.0, **{"inputs": "host", "attention": "host", "kv": "rebuild", **places})


def test_gathered_weights_are_those_of_a_few_groups():
    shape = replace(SHAPE, seq=2, data=2, compute_bytes=2)
    layer, table = layer_costs(MODEL).params, 50 * 8  # two tables of 100 tokens on two stages
    schedule = make_table("breadth-first", 2, 1, (16,) * 4, 4)
    places = stash(schedule, kv="rebuild", inputs="host", attention="host")
    resident, gathered = (
        predict_memory(schedule, replace(shape, weights=kind), places) for kind in ("resident", "gathered")
    )
    whole = 4 * 2 * layer + 2 * table + 8  # and the final norm
    assert (resident.most("weights"), resident.most("grads")) == (2 * whole, 4 * whole)
    # Two stages: weights of three groups of two layers, sums of two, and a fourth of all sums; the whole final norm.
    assert gathered.most("weights") == 2 * (3 * 2 * layer + 8)
    assert gathered.most("grads") == 4 * (2 * 2 * layer + (4 * 2 * layer + 2 * table) / 4 + 8)
    # A tick with ends holds one table and its gradient.
    work = gathered.moments["head"]["work"] - resident.moments["head"]["work"]
    assert work == (2 + 4) * table and gathered.moments["tables"]["work"] == 4 * table


def test_tables_are_not_beside_a_backward_behind_all_heads():
    shape = replace(SHAPE, layers=1, seq=2, compute_bytes=2)
    for chunks in (1, 4):
        table, places = breadth_first(chunks, 4)
        moments = predict_memory(table, shape, places).moments
        assert moments["head"]["weights"] - moments["attention"]["weights"] == 2 * 2 * 100 * 8
        # A lone chunk adds to the embedding's sum behind the backwards of all layers.
        late = moments["tables"]["grads"] - moments["attention"]["grads"]
        assert late == (4 * 100 * 8 if chunks == 1 else 0)
    tied = replace(shape, model=replace(MODEL, tied_embeddings=True))
    moments = predict_memory(*breadth_first(1, 4)[:1], tied, breadth_first(1, 4)[1]).moments
    assert moments["tables"]["grads"] == moments["attention"]["grads"]
    # Heads among backwards need the head, and sequences before the last the embedding.
    table = make_table("seq1f1b", 1, 2, (32, 32))
    moments = predict_memory(table, replace(shape, layers=4), stash(table)).moments
    assert len({moments[moment]["weights"] for moment in ALL - {"update"}}) == 1


def test_sums_of_the_next_groups_come_when_the_last_stash_is_gone():
    table, places = breadth_first(4, 4)
    places = replace(places, alpha=(*places.alpha[:-1], 0.0))
    shape = replace(SHAPE, layers=1)
    of = stash_bytes(table, shape, places)
    assert of.device == of.last > of.copy == of.fetched > 0
    moments = predict_memory(table, shape, places).moments
    # A fetched stash is used in the place of a slot and a spare one.
    assert (moments["turn"]["stash"], moments["attention"]["stash"]) == (of.last, of.fetched)
    others = 3 * layer_costs(MODEL).params * 4
    assert moments["attention"]["grads"] - moments["turn"]["grads"] == others
    # A loop over the layers of a group, which begins with three of them, reads the stash to its end.
    for layers, stays in ((2, False), (3, True)):
        moments = predict_memory(table, replace(shape, layers=layers), places).moments
        assert (moments["turn"]["stash"] == moments["attention"]["stash"]) == stays
    kept = predict_memory(table, shape, replace(places, inputs="keep", attention="keep")).moments
    assert kept["turn"]["stash"] == kept["attention"]["stash"]


def test_backward_of_the_mlp_stays_until_its_matrices_have_gradients():
    shape, (table, places) = replace(SHAPE, weights="gathered", compute_bytes=2), breadth_first(4, 2)
    elements, matrix = 8 + 8 + 4, 8 * 16  # layer input, attention output, keys
    assert MODEL.mlp == "swiglu"

    def work(moment, model=MODEL, **changes):
        memory = predict_memory(table, replace(shape, model=model), replace(places, **changes))
        return memory.moments[moment]["work"]

    # Gate, up, their product, a cotangent; gradients of three matrices in float32, and one as it is computed.
    arrays, matrices = 16 * NUMBERS.token_arrays * elements * 2, matrix * (3 * 4 + 2)
    assert work("mlp") == work("attention") == arrays + 16 * 4 * 16 * 2 + matrices
    # Gate and up come from the stash.
    assert work("mlp", rest="keep") == arrays + 16 * 2 * 16 * 2 + matrices
    plain = replace(MODEL, mlp="gelu")
    assert work("mlp", plain) == arrays + 16 * 3 * 16 * 2 + matrix * (2 * 4 + 2)
    assert work("rebuild") == arrays


def test_layers_outside_a_loop_wait_for_gradients_where_chunks_wait_on_the_host():
    table, places = breadth_first(4, 2, waiting="host")

    def work(layers, seq):
        shape = replace(SHAPE, weights="gathered", layers=layers, seq=seq, ulysses=seq)
        return [
            predict_memory(table, shape, replace(places, waiting=room)).moments["rebuild"]["work"]
            for room in ("keep", "host")
        ]

    for layers, outside in ((1, 1), (2, 2), (3, 1), (8, 1)):
        kept, late = work(layers, 2)
        assert late == pytest.approx(kept * (1 + NUMBERS.late_share * outside), abs=1)
        kept, alone = work(layers, 1)
        assert kept == alone


def test_matrices_on_the_host_take_their_moments_and_gradients_along():
    shape = replace(SHAPE, seq=2, data=2, compute_bytes=2, weights="gathered")
    layer = layer_costs(MODEL).params - 2 * 8  # two norms of 8
    matrices, tables, vectors = 4 * 2 * layer // 4, 2 * 50 * 8 // 4, 4 * 2 * 2 * 8 // 4 + 8
    away = replace(shape, optimizer="host")
    assert optimizer_bytes(shape, 4, 2) == (12 * (matrices + tables + vectors), 0)
    assert optimizer_bytes(away, 4, 2) == (12 * vectors, 12 * (matrices + tables) + 4 * matrices)
    table = make_table("breadth-first", 2, 1, (16,) * 4, 4)
    places = stash(table, inputs="host", attention="host", kv="rebuild")
    on_device, on_host = (predict_memory(table, one, places) for one in (shape, away))
    # A group's share comes and leaves; parts of it, one a tick, move in float32.
    part = 4 * (matrices // 4 // 4)
    assert on_host.hbm["weights"] - on_device.hbm["weights"] == 2 * matrices // 4 + part
    # Gradient sums of layers leave; of the tables' sums one at a time is at the peak.
    assert on_device.hbm["grads"] - on_host.hbm["grads"] == 4 * (matrices + tables // 2) - 4 * matrices // 4 - part


def test_the_peak_is_the_fullest_moment():
    table, places = breadth_first(4, 2)
    memory = predict_memory(table, replace(SHAPE, layers=1, seq=2), places)
    assert set(memory.moments) == set(MOMENTS)
    assert memory.hbm_bytes == max(sum(of_moment.values()) for of_moment in memory.moments.values())
    assert memory.hbm in memory.moments.values()
    assert all(holder.size_bytes >= 0 for holder in memory.holders)


def test_what_a_period_fetches_grows_with_its_windows_and_not_with_the_sequence():
    table, places = breadth_first(4, 2)
    places = replace(places, inputs="period", attention="recompute", kv="host")

    def fetched(window, length=4096, count=3):
        kinds = {"local": {"sliding_window": window}}
        model = replace(MODEL, num_layers=2 * (count + 1), layers=f"2x({count}xlocal,full)", layer_types=kinds)
        shape = replace(SHAPE, model=model, layers=count + 1, length=length)
        (of_class, *_) = stash_classes(table, places, 1)
        return fetched_bytes(of_class, shape, places)

    # Keys and values of H elements a head and K heads, of W tokens before a chunk.
    of_token = 2 * MODEL.num_kv_heads * MODEL.head_dim * SHAPE.compute_bytes
    assert fetched(32) - fetched(16) == 3 * 16 * of_token and fetched(16, count=4) - fetched(16) == 16 * of_token
    assert fetched(16, length=8192) == fetched(16)


def test_of_several_kinds_the_widest_of_a_moment_is_charged():
    kinds = {"wide": {"num_heads": 64, "num_kv_heads": 64}, "deep": {"mlp_size": 4096}}
    model = replace(MODEL, layers="2x(wide,deep)", layer_types=kinds)
    shape, ways = replace(SHAPE, model=model), Ways("keep", "recompute", "keep", "keep")

    def work(shape):
        return sums(holders._work(shape, ways, (16, 48), NUMBERS))

    of_kinds = [work(replace(shape, model=model.of_type(name))) for name in kinds]
    assert work(shape) == {moment: max(found[moment] for found in of_kinds) for moment in MOMENTS}
    # Each kind is the widest in some moment.
    assert of_kinds[0]["rebuild"] > of_kinds[1]["rebuild"] and of_kinds[0]["mlp"] < of_kinds[1]["mlp"]


def test_three_plans_at_least_tell_each_fitted_number():
    assert set(TOLD) == set(NUMBERS._fields) and len(NUMBERS) <= 6
    assert all(told.plans >= 3 for told in TOLD.values())
