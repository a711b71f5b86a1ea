"""Host copies and what goes to other hosts on one link: bytes by hand, and ticks that last as long as both."""

import math
from dataclasses import replace

import pytest

from sppo_jax.config import ModelConfig
from sppo_jax.hardware import DEVICES, Cluster
from sppo_jax.plan.parts import MeshShape, SchedulePlan
from sppo_jax.plan.plan import schedule_table
from sppo_jax.predict.seconds.costs import cost_model
from sppo_jax.predict.seconds.shared_link import network_bytes, with_sends
from sppo_jax.predict.seconds.stage_shape import Recompute, StageShape
from sppo_jax.schedule.table import TickShape

MODEL = ModelConfig(vocab_size=1000, hidden_size=1024, num_layers=4, num_heads=16, num_kv_heads=16, mlp_size=2048)


def costs(pipe, seq, *, ring=1, hosts=2, **given):
    device = replace(DEVICES["h100"], **given)
    return cost_model(
        MODEL,
        Cluster(device=device, num_hosts=hosts, devices_per_host=8, host_bytes=2**40),
        StageShape(
            mesh=MeshShape(data=1, pipe=pipe, seq=seq),
            ulysses=seq // ring,
            ring=ring,
            layers=2,
            compute_bytes=2,
            kernel="cudnn",
            length=2**14,
            ring_pass="kv",
        ),
        Recompute(),
    )


def test_hops_between_stages_and_rings_cross_and_the_rest_stays_in_the_host():
    tick = TickShape(4096, 8192, False)
    # Stages of eight devices: the hop of a device's tokens crosses, the all-to-all does not.
    assert network_bytes(costs(2, 8))("F", 4096, 4096, tick) == pytest.approx(4096 / 8 * 1024 * 2)
    # A ring of two hosts: keys and values of a member's prefix, of 2 of 16 heads, in one hop of each layer.
    assert network_bytes(costs(1, 16, ring=2))("F", 4096, 4096, tick) == pytest.approx(2 * 4096 * 2 * 2 * 64 * 2)
    # All devices of a pipeline in one host, and a link of NVLink-C2C.
    assert network_bytes(costs(2, 4))("F", 4096, 4096, tick) == 0
    assert network_bytes(costs(2, 8, slot_bytes_s=math.inf))("F", 4096, 4096, tick) == 0


def table():
    return schedule_table(SchedulePlan(name="gpipe", interleave=1), 1, 1, (8192, 8192))


def test_copies_and_sends_together_take_the_rate_of_the_link():
    one = costs(1, 16, ring=2)
    assert one.cluster.slot_bytes_s == 50e9
    ticks = table()
    seconds = [1e-4, 0.0, 0.02, *[0.01] * (len(ticks.ticks) - 3)]
    found = with_sends(ticks, tuple(seconds), one)
    sent = network_bytes(one)
    link = one.cluster.host_link_bytes_s
    assert link == 33 * 2**30
    for copy_s, longer_s, tick, shape in zip(seconds, found, ticks.ticks, ticks.tick_shapes, strict=True):
        both = copy_s * link + sent(tick.op, shape.reach - shape.tokens, shape.tokens, shape)
        assert longer_s == (max(copy_s, both / 50e9) if copy_s else 0.0)
    assert found[0] > 1.5e-4 > seconds[0] and found[1:3] == (0.0, 0.02)


@pytest.mark.parametrize("given", [dict(seq=8, hosts=1), dict(seq=16, ring=2, slot_bytes_s=math.inf)], ids=str)
def test_links_that_are_not_shared_change_nothing(given):
    one, seconds = costs(1, **given), (0.01,) * len(table().ticks)
    assert one.cluster.slot_bytes_s == math.inf and with_sends(table(), seconds, one) is seconds


def test_a_link_is_never_slower_than_what_goes_over_it_alone():
    fast = costs(1, 16, ring=2, network_bytes_s=100e9).cluster
    assert fast.slot_bytes_s == 100e9
