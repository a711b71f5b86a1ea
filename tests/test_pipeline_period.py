"""Groups that run again from their first layer's input: exact in every plan."""

import jax.numpy as jnp
import pytest
from combinations import draw_period
from programs import Case, compare
from state_cases import packed_batches

from sppo_jax.pipeline.params.layout import arrange

# Both orders of chunks.
DRAWN_IN_CI = (39,)
# Those of the first whose programs have few bodies of ticks.
DRAWN_SLOWLY = (281, 353, 309, 167, 22, 45, 46, 55, 70, 71, 73, 82, 101, 106, 119, 125, 130, 136, 137)


@pytest.mark.parametrize("seed", DRAWN_IN_CI)
def test_drawn_periods_have_the_dense_loss_and_gradients(seed, request):
    compare(draw_period(seed), seed, count=2, request=request)


@pytest.mark.slow
@pytest.mark.parametrize("seed", DRAWN_SLOWLY)
def test_more_drawn_periods_have_the_dense_loss_and_gradients(seed, request):
    compare(draw_period(seed), seed, count=2, request=request)


@pytest.mark.slow
@pytest.mark.parametrize("places", [("period", "host", "recompute"), ("host", "recompute", "recompute")])
def test_a_last_group_that_is_a_part_of_a_period_has_the_dense_loss_and_gradients(places, request):
    """Two periods of two layers and one layer more, which is stored with a layer of zeros; chunks of two lengths."""
    plan = dict(chunks=(12, 6, 12), schedule="breadth-first", interleave=3, places=places, alpha=1.0, kv="rebuild")
    model = dict(num_layers=5, layers="2x(local,full),local", layer_types={"local": {"sliding_window": 8}})
    # In these batches documents reach a whole window back over both borders between chunks.
    compare(Case(plan, model), 9, count=2, request=request)


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["gathered", "resident"])
@pytest.mark.parametrize(
    ("num_layers", "layers"), [(8, "2x(wide,local,full),wide,local"), (7, "2x(local,wide,full),local")]
)
def test_a_last_group_may_have_layers_of_several_shapes_and_experts(num_layers, layers, weights, request):
    """The last group has fewer layers of one shape, or none."""
    plan = dict(chunks=(12, 6, 12), mesh=(1, 1, 2), schedule="breadth-first", interleave=3, weights=weights)
    plan |= dict(places=("period", "host", "recompute"), alpha=1.0, kv="rebuild")
    kinds = {"local": {"sliding_window": 8}, "wide": {"mlp_size": 9, "experts": {"count": 0}, "sliding_window": 4}}
    experts = dict(count=4, chosen=2, size=5, balance=0.3, shared_size=None)
    model = dict(num_layers=num_layers, layers=layers, layer_types=kinds, experts=experts)
    compare(Case(plan, model), 9, count=2, request=request)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kv", "attention", "kind"),
    [
        ("rebuild", "host", "ring"),
        ("host", "keep", "ulysses"),
        ("keep", "recompute", "ring"),
        ("rebuild", "keep", "ring"),
    ],
)
def test_a_lone_layer_with_a_window_stashes_its_output_and_its_tail(kv, attention, kind, request):
    plan = dict(chunks=(12, 6, 12), mesh=(1, 1, 2), kind=kind, schedule="breadth-first", interleave=4)
    # Some chunks have their outputs on the host, and some have parts of them there.
    plan |= dict(places=("period", attention, "recompute"), alpha=(0.5, 1.0, 0.0), kv=kv)
    model = dict(num_layers=4, layers="2x(local,full)", layer_types={"local": {"sliding_window": 8}})
    compare(Case(plan, model), 9, count=2, request=request)


STATES = {"value_heads": 4, "key_heads": 2, "key_size": 4, "value_size": 6, "taps": 3}


@pytest.mark.slow
def test_a_small_period_with_a_state_has_the_dense_loss_and_gradients(request):
    plan = dict(chunks=(8, 12), mesh=(1, 1, 2), schedule="breadth-first", interleave=2)
    plan |= dict(places=("period", "recompute", "recompute"), kv="rebuild")
    case = Case(plan, dict(num_layers=4, layers="2x(delta,full)", layer_types={"delta": {"delta": STATES}}))
    compare(case, 0, count=2, batches=packed_batches, request=request)


@pytest.mark.slow
@pytest.mark.parametrize(("kv", "attention"), [("rebuild", "recompute"), ("host", "host"), ("keep", "keep")])
def test_a_period_with_a_state_has_the_dense_loss_and_gradients(kv, attention, request):
    """A period of a layer with a state, one with a window and one without; two sequences in a wave; unequal chunks."""
    plan = dict(chunks=(8, 12, 4), mesh=(1, 1, 2), schedule="breadth-first", interleave=2, sequences=2, wave=2)
    plan |= dict(places=("period", attention, "recompute"), alpha=1.0, kv=kv, weights="gathered")
    kinds = {"local": {"sliding_window": 6}, "delta": {"delta": STATES}}
    case = Case(plan, dict(num_layers=6, layers="2x(delta,local,full)", layer_types=kinds))
    compare(case, 0, count=2, batches=packed_batches, request=request)


def test_layers_that_do_not_fill_the_last_group_are_stored_with_zeros_behind():
    layers = jnp.arange(1.0, 11.0).reshape(5, 2)
    stored = arrange(layers, (3, 1, 2, 2))
    assert not stored[2, 0, 1].any() and (stored != 0).sum() == 10
    assert (arrange(stored, (5, 2)) == layers).all()
