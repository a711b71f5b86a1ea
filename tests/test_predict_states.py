"""What layers with a state work on, by hand."""

from dataclasses import replace

import pytest

from sppo_jax.config import DeltaConfig, ModelConfig
from sppo_jax.hardware import DEVICES, make_cluster
from sppo_jax.plan.parts import MeshShape, StashPlan
from sppo_jax.predict import holders, states
from sppo_jax.predict.memory import predict_memory
from sppo_jax.predict.seconds.costs import cost_model
from sppo_jax.predict.seconds.stage_shape import Recompute, StageShape
from sppo_jax.predict.shape import MemoryShape
from sppo_jax.predict.states import state_work, stretch_bytes
from sppo_jax.schedule.generators import make_table

MIB = 2**20
# Of a stretch of the most keys: 2^24 elements in float32.
WHOLE = 64 * MIB
MODEL = ModelConfig(
    vocab_size=1000,
    hidden_size=256,
    num_layers=4,
    num_heads=16,
    mlp_size=512,
    mixer="delta",
    delta=DeltaConfig(value_heads=32, key_heads=16, key_size=128, value_size=128),
)


def test_a_stretch_by_hand():
    forward, backward = stretch_bytes(MODEL, 4096, 4, 4)
    # 16,384 tokens of 8 heads of 128 are one stretch; twice the tokens are two of them, one after another.
    assert (forward, backward) == (8 * WHOLE, 28 * WHOLE) == stretch_bytes(MODEL, 8192, 4, 4)
    assert stretch_bytes(MODEL, 2048, 4, 4) == (4 * WHOLE, 14 * WHOLE)
    # On 64 devices each of the 32 heads is held twice.
    assert stretch_bytes(MODEL, 512, 64, 4)[0] == 8 * 512 * 64 * 128 * 4
    assert stretch_bytes(replace(MODEL, delta=replace(MODEL.delta, value_size=256)), 2048, 4, 4)[1] == 28 * WHOLE


@pytest.mark.parametrize("mixer", ["delta", "attention"])
def test_a_stretch_is_charged_where_a_mixer_runs(monkeypatch, mixer):
    table = make_table("sppo", num_stages=2, num_sequences=1, chunk_lengths=[16384] * 4)
    shape = MemoryShape(model=replace(MODEL, mixer=mixer), layers=2, seq=4, ulysses=4, compute_bytes=2)
    stash = StashPlan(inputs="keep", attention="keep", rest="recompute", alpha=(0.0,) * len(table.diagonal_bundles))

    def work():
        holders._work.cache_clear()  # what follows was counted with other numbers
        return {moment: of["work"] for moment, of in predict_memory(table, shape, stash).moments.items()}

    before = work()
    monkeypatch.setattr(states, "_FORWARD_ARRAYS", 0)
    monkeypatch.setattr(states, "_BACKWARD_ARRAYS", 0)
    more = {moment: size - work()[moment] for moment, size in before.items()}
    stretch = {"forward": 8 * WHOLE, **dict.fromkeys(("turn", "attention", "rebuild"), 28 * WHOLE)}
    assert {moment: size for moment, size in more.items() if size} == (stretch if mixer == "delta" else {})


def test_a_period_runs_mixers_again_and_a_rebuild_once_more():
    mesh, device = MeshShape(data=1, pipe=1, seq=2), replace(DEVICES["h100"], overhead_s=0.0, overhead_tokens=0)
    stage = StageShape(mesh=mesh, ulysses=2, ring=1, layers=2, compute_bytes=2, kernel="cudnn", length=2**14)

    def seconds(**again):
        costs = cost_model(MODEL, make_cluster(device, 2), stage, Recompute(2, **again))
        return costs.compute_s("B", 0, 8192), costs.token_transfer_s["B", False, False]

    work, cluster = state_work(MODEL, 2), make_cluster(device, 2)
    computed, sent = seconds()
    again, sent_again = seconds(whole=True)
    assert again - computed == pytest.approx(2 * 4096 * work.token_s("F", 2, device.linear_flops_s(2)))
    assert sent_again - sent == pytest.approx(2 * work.sent_bytes("F", 2, 2, 4) / cluster.link_bytes_s(2))
    # Half of the backwards make keys and values again, for which a quarter of the layers run once more.
    assert seconds(whole=True, rewrite_kv=0.5, layers=0.25)[1] - sent_again == pytest.approx((sent_again - sent) / 8)
