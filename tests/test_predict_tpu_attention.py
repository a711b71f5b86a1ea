"""The kernel for TPUs as the planner charges it: bundles as compiled, blocks as the kernel visits them, hidden hops."""

import json
from dataclasses import replace

import numpy as np
import pytest

from bench.tpu_kernel import RESULTS
from sppo_jax.config import config_from_dict
from sppo_jax.hardware import DEVICES, parse_cluster
from sppo_jax.hardware.tpu_chips import BLOCK_KEYS, REACHED, SCORES, STEP_S, TPU_CHIPS, Bundles, block_queries
from sppo_jax.models.counts import chunk_pairs
from sppo_jax.plan.parts import MeshShape
from sppo_jax.predict.seconds.costs import cost_model
from sppo_jax.predict.seconds.stage_shape import Recompute, StageShape
from sppo_jax.predict.seconds.tpu_attention import TpuCall, tpu_pairs

V5P = DEVICES["v5p"]
CALL = TpuCall(head_dim=128, num_kv_heads=2, num_groups=4, window=0, members=1, compute_bytes=2)


def test_bundles_are_those_that_were_compiled():
    compiled = {}
    for row in json.loads(RESULTS.read_text()):
        if row["heads"][:2] == [1, 4] and row["tokens"] == [8192, 65536]:
            wide, times = {"bfloat16": (2, 1), "float32": (4, 4)}[row["dtype"]]
            key = row["chip"], row["heads"][2], wide, row["kernel"]
            compiled[key] = times * row["bundles"], times * row["edge_bundles"]
    for name, chip in TPU_CHIPS.items():
        if name != "cpu":
            assert set(chip.bundles) == {(128, 2), (256, 2), (128, 4), (256, 4)} and chip.clock_hz
        for key, bundles in chip.bundles.items():
            both = compiled[name, *key, "forward"], compiled[name, *key, "backward"]
            assert bundles == Bundles(*both[0], *both[1])
        if name != "cpu":  # heads of 64 take what those of 128 take
            one = chip.bundles_of(64, 2)
            for kernel, planned in (("forward", one.forward), ("backward", one.backward)):
                assert compiled[name, 64, 2, kernel][0] == pytest.approx(planned, rel=0.08)


def test_a_score_takes_its_bundles_or_the_peak():
    # v6e: the compiled kernel is slower than the peak. v5p: its backward would be faster.
    v6e = DEVICES["v6e"].score_s(2, 128)
    assert v6e == pytest.approx([x / SCORES / 1.75e9 / REACHED for x in (2741, 5249)])
    float32 = DEVICES["v6e"].score_s(4, 128)
    assert float32 == pytest.approx([4 * x / SCORES / 1.75e9 / REACHED for x in (1074, 2155)])
    assert DEVICES["v6e"].score_s(2, 64) == v6e and DEVICES["v6e"].score_s(2, 96) == v6e
    forward, backward = V5P.score_s(2, 128)
    assert forward == pytest.approx(4364 / SCORES / 3.5e9 / REACHED)
    assert backward == pytest.approx(10 * 128 / 459e12 / REACHED)
    assert V5P.attention_flops_s(2, "pallas", 128) == pytest.approx(4 * 128 / forward)
    assert replace(V5P, has_bundles=False).attention_flops_s(2, "pallas", 128) == 459e12 / 2


def visited(start: int, tokens: int, call: TpuCall) -> tuple[float, float]:
    """Counts the pairs of blocks at an edge, and of all blocks, that a chunk of a lone member meets."""
    queries = block_queries(tokens, call.num_groups, call.compute_bytes)
    at_edge = whole = 0
    for first in range(start, start + tokens, queries):
        rows = np.arange(first, first + queries)
        for key in range(0, first + queries, BLOCK_KEYS):
            keys = np.arange(key, key + BLOCK_KEYS)
            seen = keys <= rows[:, None]
            if call.window:
                seen &= keys > rows[:, None] - call.window
            if seen.all():
                whole += seen.size
            elif seen.any():
                at_edge += seen.size
    return at_edge, whole


@pytest.mark.parametrize(
    "start,tokens,groups,window,most",
    [(8192, 4096, 4, 0, 1e-9), (0, 8192, 8, 0, 1e-9), (4096, 2048, 1, 0, 1e-9), (8192, 2048, 4, 4096, 0.03)],
)
def test_pairs_are_those_of_the_blocks_that_a_kernel_visits(start, tokens, groups, window, most):
    call = CALL._replace(num_groups=groups, window=window)
    at_edge, whole = visited(start, tokens, call)
    bundles = TPU_CHIPS["v5p"].bundles_of(128, 2)
    queries = block_queries(tokens, groups, 2)
    got = tpu_pairs(V5P, call)(start, tokens)
    dearer = bundles.forward_edge / bundles.forward, bundles.backward_edge / bundles.backward
    for pairs, more, score_s in zip(got, dearer, V5P.score_s(2, 128), strict=True):
        steps = (at_edge + whole) / (queries * BLOCK_KEYS) * STEP_S / (groups * 2 * score_s)
        assert pairs == pytest.approx(whole + more * at_edge + steps, rel=most)


def test_each_pair_of_ring_members_has_a_diagonal_and_a_bound_has_none():
    chunk = 8192, 8192
    alone, ring = (tpu_pairs(V5P, CALL._replace(members=members))(*chunk)[0] for members in (1, 4))
    # Blocks of 1024 queries; four diagonals of a quarter of the chunk, on each of four members.
    bundles = TPU_CHIPS["v5p"].bundles_of(128, 2)
    step = STEP_S / (4 * 2 * V5P.score_s(2, 128)[0]) / (1024 * BLOCK_KEYS)
    more = 3 * 8192 * 1024
    assert ring - alone == pytest.approx(more * (bundles.forward_edge / bundles.forward - 0.5 + step / 2))
    bound = tpu_pairs(replace(V5P, attention_rows=0), CALL)(*chunk)
    assert bound == (chunk_pairs(*chunk),) * 2 and bound[0] < alone


def test_one_core_waits_where_blocks_and_heads_are_too_few():
    chunk = 8192, 1024
    two, one = (tpu_pairs(V5P, CALL._replace(num_kv_heads=count))(*chunk) for count in (2, 1))
    assert one == (2 * two[0], two[1])
    assert tpu_pairs(V5P, CALL._replace(num_kv_heads=1))(8192, 2048) == tpu_pairs(V5P, CALL)(8192, 2048)
    assert tpu_pairs(DEVICES["v6e"], CALL._replace(num_kv_heads=1))(*chunk) == tpu_pairs(DEVICES["v6e"], CALL)(*chunk)


def costs(kernel: str, **changes):
    model = config_from_dict({"model": {"preset": "llama3-8b"}, "sequence": {"length": 2**20}, "train": {"steps": 1}})
    cluster = parse_cluster("v5p:4x4x4")
    cluster = replace(cluster, device=replace(cluster.device, **changes))
    mesh = MeshShape(data=1, pipe=1, seq=64)
    stage = StageShape(
        mesh=mesh, ulysses=8, ring=8, layers=32, compute_bytes=2, kernel=kernel, length=2**20, ring_pass="kv"
    )
    return cost_model(model.model, cluster, stage, Recompute(linear=1))


@pytest.mark.parametrize("kind", "FB")
def test_hops_of_a_ring_hide_behind_the_kernel(kind):
    hidden, waits = costs("pallas"), costs("blockwise")
    chunk = 2**19, 2**18
    without = replace(hidden, ring=replace(hidden.ring, members=1))
    assert hidden.transfer_s(kind, *chunk) == pytest.approx(without.transfer_s(kind, *chunk))
    assert waits.transfer_s(kind, *chunk) > 1.2 * hidden.transfer_s(kind, *chunk)
    # Slow links: what takes longer than attention is waited for.
    slow = costs("pallas", link_bytes_s=1e9, network_bytes_s=1e9)
    ring_s = 32 * slow.ring_bytes(kind, 2**12, sum(chunk)) / 1e9
    (one,) = slow.attention
    times = 1 if kind == "F" else slow.backward_times(one)
    pairs = tpu_pairs(V5P, CALL._replace(num_kv_heads=1, members=8))(*chunk)["FB".index(kind)]
    attention_s = times * pairs * slow.pair_s_of(one)
    exchange_s = slow.transfer_s(kind, *chunk) - max(0.0, ring_s - attention_s)
    assert ring_s > attention_s
    assert exchange_s == pytest.approx(replace(slow, ring=replace(slow.ring, members=1)).transfer_s(kind, *chunk))


def test_measured_figures_are_used_in_the_place_of_bundles():
    measured = costs("pallas", has_bundles=False, attention_rows=0, attention_efficiency=0.3, attention_backward=3.0)
    (one,) = measured.attention
    assert measured.backward_times(one) == 3.0 and not measured.has_bundles
    assert measured.pair_s_of(one) == pytest.approx(32 * 4 * 32 * 128 / (0.3 * 459e12) / 64)
