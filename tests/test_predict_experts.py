"""Work and memory of experts by hand, and the rows of tiles against those that the products have."""

import math
from dataclasses import replace

import jax.numpy as jnp
import pytest

from sppo_jax.config import ExpertsConfig, ModelConfig
from sppo_jax.hardware import DEVICES, make_cluster
from sppo_jax.models.counts import layer_costs
from sppo_jax.models.moe.grouped import find_tiles
from sppo_jax.plan.parts import MeshShape, StashPlan
from sppo_jax.predict.experts import ExpertWork, expert_work
from sppo_jax.predict.memory import predict_memory
from sppo_jax.predict.seconds.costs import cost_model
from sppo_jax.predict.seconds.stage_shape import Recompute, StageShape
from sppo_jax.predict.shape import MemoryShape
from sppo_jax.predict.stage_params import largest_matrix
from sppo_jax.schedule.generators import make_table

MODEL = ModelConfig(
    vocab_size=100,
    hidden_size=8,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    experts=ExpertsConfig(count=6, chosen=2, size=16),
)
LAYER = layer_costs(MODEL)
ONE_EXPERT = 3 * 8 * 16
PLAIN = replace(
    DEVICES["cpu"], matmul_flops_s=1.0, overhead_s=0.0, overhead_tokens=0, link_bytes_s=math.inf, hbm_bytes_s=math.inf
)


def costs(device=PLAIN, *, linear=0, seq=1):
    stage = StageShape(
        mesh=MeshShape(data=1, pipe=1, seq=seq),
        ulysses=seq,
        ring=1,
        layers=2,
        compute_bytes=4,
        kernel="blockwise",
        length=2**14,
    )
    return cost_model(MODEL, make_cluster(device, seq), stage, Recompute(linear, attention=False))


@pytest.mark.parametrize("pairs", [2, 12, 100, 6 * 512, 40000])
def test_rows_are_those_of_the_tiles_that_are_multiplied(pairs):
    work = expert_work(MODEL, "gpu")
    for sizes in ([pairs, 0, 0, 0, 0, 0], [pairs // 2, 0, pairs - pairs // 2, 0, 0, 0]):
        assert work.rows(pairs // 2) == find_tiles(jnp.array(sizes), pairs).rows_LNB.size >= pairs
    assert expert_work(MODEL, "tpu").rows(pairs // 2) == pairs
    assert expert_work(replace(MODEL, mlp_size=8, experts=ExpertsConfig()), "gpu") is None


@pytest.mark.parametrize("linear", [0, 1, 2])
def test_a_backward_computes_experts_again_whatever_is_stashed(linear):
    model, tokens = costs(linear=linear), 1000
    no_token = (model.experts.rows(tokens) - 2 * tokens) * 2 * ONE_EXPERT
    forward = model.seconds("F", 0, tokens) - 2 * LAYER.pair_flops * tokens**2 / 2
    assert forward == pytest.approx(2 * (LAYER.linear_flops * tokens + no_token))
    backward = model.seconds("B", 0, tokens) - 2 * 2.5 * LAYER.pair_flops * tokens**2 / 2
    dense, again = LAYER.linear_flops - LAYER.expert_flops, max(1, linear) - 1 / 3  # not the last product
    in_experts = (2 + again) * (LAYER.expert_flops * tokens + no_token)
    assert backward == pytest.approx(2 * ((2 + linear) * dense * tokens + in_experts))


def test_what_experts_move_takes_time_and_devices_share_tokens_and_not_experts():
    slow = replace(PLAIN, hbm_bytes_s=10.0)
    for kind in "FB":
        for tokens, seq in ((1000, 1), (2000, 2)):
            idle = costs(seq=seq).experts_s(kind)(tokens)
            moved = costs(slow, seq=seq).experts_s(kind)(tokens) - idle
            assert moved == pytest.approx(2 * costs().experts.moved_bytes(kind, 1000, 4) / 10)
    work = expert_work(MODEL, "gpu")
    tiles, rows = 13, 13 * 333  # of 2000 pairs: tiles of 333 rows, 7 and one more for each expert, in one lot
    assert work.rows(1000) == rows
    # A product reads and writes its sides. All are followed by what adds up a token's two pairs.
    forward = [2 * 8, 8 + 2 * 16, 3 * 16, 16 + 8, 2 * 8]  # gather, gate and up, activation, down, scatter
    # Gather with dy; gate and up again; dy by down; of the activation three read, three written, three read; dx; the
    # gradients of both arrays; scatter.
    backward = [4 * 8, 8 + 2 * 16, 8 + 16, 9 * 16, 8 + 2 * 16, 8 + 2 * 16, 8 + 16, 2 * 8]
    forward, backward = (4 * (rows * sum(elements) + 3000 * 8) for elements in (forward, backward))
    assert work.moved_bytes("F", 1000, 4) == forward + (2 * tiles + 6) * ONE_EXPERT * 4
    copied = 3 + 3 + 2 + 3 + 3  # thirds of an expert: a copy, which products read; gate and up again; gradients
    of_arrays = (copied / 3 * tiles + 6) * ONE_EXPERT * 4
    assert work.moved_bytes("B", 1000, 4) == pytest.approx(backward + of_arrays + 6 * ONE_EXPERT * 16)
    ragged, pairs = expert_work(MODEL, "tpu"), 2000
    assert ragged.moved_bytes("F", 1000, 4) == 4 * (pairs * (7 * 8 + 6 * 16) + 6 * ONE_EXPERT)
    assert ragged.moved_bytes("B", 1000, 4) == 4 * (pairs * (15 * 8 + 18 * 16) + 6 * ONE_EXPERT) + 6 * ONE_EXPERT * 16


def test_work_of_experts_by_hand():
    """Qwen3-30B-A3B, 32768 tokens: 262144 pairs. Forward and backward of one layer take this, compiled for an H100."""
    work, mib = ExpertWork(128, 8, 2048, 768, is_tiled=True), 2**20
    outputs, arrays, rows = 1024, 64 * 9, 64 * 512 * 2 / mib
    assert work.forward_bytes(32768, 2) == (outputs + arrays + rows * (2048 + 768)) * mib
    assert work.backward_bytes(32768, 2) == (outputs + arrays * 2 / 3 + rows * (4 * 2048 + 3 * 768)) * mib
    assert work.sums_bytes(4) == 3 * 768 * mib


def test_experts_are_beside_their_layer_and_no_matrix():
    table = make_table("sppo", 1, 1, (512, 512))
    places = StashPlan(inputs="keep", attention="keep", rest="recompute", alpha=(0.0, 0.0))
    shape = MemoryShape(model=MODEL, layers=4, seq=1, ulysses=1, compute_bytes=2)
    work, moments = expert_work(MODEL, "gpu"), predict_memory(table, shape, places).moments
    of_experts = {moment: sizes["experts"] for moment, sizes in moments.items()}
    # Products and probabilities of the router, and the arrays of a layer's experts.
    routed, sums = 2 * 512 * 6 * 4 + 6 * ONE_EXPERT * 2, 6 * ONE_EXPERT * 4
    assert of_experts["forward"] == work.forward_bytes(512, 2) + routed
    assert of_experts["mlp"] == work.backward_bytes(512, 2) + routed + sums
    assert of_experts["attention"] == of_experts["head"] == of_experts["update"] == 0
    assert largest_matrix(MODEL) == 8 * 8


def test_tpus_have_experts_in_two_layouts():
    """One for forwards and one for backwards; of a lone stage one is gone when the other comes."""
    shape = MemoryShape(model=MODEL, layers=4, seq=1, ulysses=1, compute_bytes=2, platform="tpu")
    work, arrays = expert_work(MODEL, "tpu"), 6 * ONE_EXPERT * 2

    def moments(num_stages, platform="tpu"):
        table, alpha = make_table("sppo", num_stages, 1, (512, 512)), (0.0,) * (num_stages + 1)
        places = StashPlan(inputs="keep", attention="keep", rest="recompute", alpha=alpha)
        return predict_memory(table, replace(shape, platform=platform), places).moments

    # Gradients of a layer's experts are computed one after another; its arrays are there twice.
    routed = 2 * 512 * 6 * 4
    assert moments(1)["mlp"]["experts"] == work.backward_bytes(512, 2) + routed + 2 * arrays
    for num_stages, later in ((1, 0), (2, 4 * arrays)):
        more = {
            moment: moments(num_stages)[moment]["weights"] - moments(num_stages, "gpu")[moment]["weights"]
            for moment in ("forward", "head", "mlp", "attention")
        }
        assert more == {"forward": 4 * arrays, "head": 4 * arrays, "mlp": later, "attention": later}
