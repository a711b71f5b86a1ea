"""A plan's window: its rows by pipeline, and integer costs that add up to about what the planner simulates."""

import dataclasses
from functools import lru_cache

import pytest

from sppo_jax.config import config_from_dict
from sppo_jax.flex.cells import today
from sppo_jax.flex.of_plan import plan_weights, window_shape
from sppo_jax.flex.placement import Pieces
from sppo_jax.plan.parts import SchedulePlan
from sppo_jax.predict.seconds.simulate import simulate
from sppo_jax.schedule.csv_format import to_csv
from sppo_jax.search.make import costs_of, make_plan

LENGTH = 2**17


@lru_cache(maxsize=8)
def planned(cluster="h100:1x8", ulysses=4, seq=4, pipe=2, data=1, schedule="auto"):
    """Plans four sequences a pipeline of a model of seven billion parameters."""
    model = {"vocab_size": 32000, "hidden_size": 4096, "num_layers": 32, "num_heads": 32, "num_kv_heads": 8}
    config = config_from_dict(
        {
            "model": {**model, "mlp_size": 11008},
            "data": {"source": "recall"},
            "mesh": {"data": data, "pipe": pipe, "seq": seq},
            "sequence": {"length": LENGTH, "chunks": 4, "per_pipeline": 4, "ulysses": ulysses},
            "schedule": {"name": schedule},
            "hardware": {"cluster": cluster},
            "train": {"steps": 1},
        }
    )
    plan = make_plan(config)
    return plan, costs_of(plan, config)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("cluster", "ulysses", "seq", "pipe", "schedule"),
    [
        ("h100:1x8", 4, 4, 2, "seq1f1b"),
        ("h100:1x8", 1, 4, 2, "seq1f1b"),
        ("h100:1x8", 2, 4, 2, "interleaved-seq1f1b"),
        ("h100:1x8", 4, 4, 2, "breadth-first"),
        ("h100:1x8", 8, 8, 1, "breadth-first"),
        ("v5p:2x2x2", 1, 4, 2, "seq1f1b"),
    ],
)
def test_whole_documents_take_what_the_planner_simulates(cluster, ulysses, seq, pipe, schedule):
    plan, costs = planned(cluster, ulysses, seq, pipe, schedule=schedule)
    shape = window_shape(plan, costs)
    cost = today(Pieces.packed([[LENGTH]] * plan.num_sequences), shape).cost
    simulated = simulate(plan.table(), costs.of_chunks(plan.chunk_lengths)).step_s
    # The rate of long prefixes is charged for every pair: kernels' tails and unfilled waves are left out.
    assert 0.95 <= cost * shape.weights.unit_s / simulated <= 1.01


@pytest.mark.filterwarnings("ignore")
def test_what_teams_exchange_is_charged_by_bytes_and_link():
    plan, costs = planned("a100-80g:2x8", 1, 16, 1)
    weights = plan_weights(plan, costs)
    # Keys and values of 8 heads of 128 in bfloat16, over all layers; half as many bytes as their float32 gradients.
    # The plan keeps attention, so backward passes keys and values once.
    assert not costs.recompute.attention
    received = 2 * 8 * 128 * costs.layers * 2
    link = costs.cluster.link_bytes_s(2)
    assert weights.forward.sent[0] == 0
    for level, others in enumerate((0, 1, 3, 7)):
        assert weights.forward.sent[level] * weights.unit_s == pytest.approx(others * received / link, abs=1e-12)
        assert weights.backward.sent[level] == pytest.approx(3 * weights.forward.sent[level], abs=3)
    assert len(weights.forward.sent) == 4 and all(cost > 0 for cost in weights.forward.stream)
    again = plan_weights(plan, dataclasses.replace(costs, recompute=costs.recompute._replace(attention=True)))
    of_forward, of_backward = (each[-1] * again.unit_s for each in (again.forward.sent, again.backward.sent))
    assert of_backward == pytest.approx(4 * of_forward, rel=1e-6)


@pytest.mark.filterwarnings("ignore")
def test_a_window_is_a_step_or_whole_pipelines_or_a_part_of_one():
    plan, costs = planned(seq=4, pipe=1, data=2, schedule="sppo")
    assert [(window_shape(plan, costs, rows).data, rows) for rows in (None, 8, 4, 2, 1)] == [
        (2, None),
        (2, 8),
        (1, 4),
        (1, 2),
        (1, 1),
    ]
    assert window_shape(plan, costs, 2).table.num_sequences == 2
    for rows in (0, 3, 6, 16):
        with pytest.raises(ValueError, match=f"rows of a step, 8.*got {rows}; change the window"):
            window_shape(plan, costs, rows)
    by_hand = dataclasses.replace(plan, schedule=SchedulePlan(name="mine", csv=to_csv(plan.table())))
    assert window_shape(by_hand, costs).rows == 8
    with pytest.raises(ValueError, match="schedule has a name, got 2"):
        window_shape(by_hand, costs, 2)
