"""Layers with a window or sinks in the pipeline: exact in every plan, for windows of every length."""

import pytest
from combinations import draw_window, with_window
from programs import Case, compare
from team_cases import batches, case

from sppo_jax.config.layer_types import parse_layers

DRAWN_IN_CI = (123,)
HYBRID = Case(
    dict(chunks=(24, 8), mesh=(1, 1, 4), kind="hybrid", ulysses=2, ring_pass="kv"),
    dict(num_layers=2, sliding_window=10, sinks=True),
)
DRAWN_SLOWLY = (4, 152, 284, *range(30_000, 30_040))


@pytest.mark.parametrize("seed", DRAWN_IN_CI)
def test_drawn_windows_have_the_dense_loss_and_gradients(seed, request):
    compare(draw_window(seed), seed, count=2, request=request)


def test_a_window_and_sinks_over_heads_and_a_ring_have_the_dense_loss_and_gradients(request):
    compare(HYBRID, seed=0, count=3, request=request)


@pytest.mark.slow
@pytest.mark.parametrize("seed", DRAWN_SLOWLY)
def test_more_drawn_windows_have_the_dense_loss_and_gradients(seed, request):
    compare(draw_window(seed), seed, count=2, request=request)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kv", "places", "layers", "mesh"),
    [
        ("rebuild", ("host", "recompute", "recompute"), "2x(local,full)", (1, 1, 1)),
        ("host", ("host", "host", "host"), "2x(local,full)", (1, 1, 2)),
        ("rebuild", ("keep", "keep", "keep"), "4x(2xlocal,full)", (1, 2, 2)),
        ("rebuild", ("host", "host", "recompute"), "full,2xlocal,full,local,full", (1, 1, 1)),
        ("rebuild", ("host", "host", "recompute"), "6xlocal", (2, 1, 1)),
    ],
)
def test_layers_with_a_window_have_a_tail_where_keys_and_values_come_again(kv, places, layers, mesh, request):
    """Groups of several layers whose windows are longer and shorter than a chunk; the last two have unlike groups."""
    plan = dict(chunks=(12, 6, 12), schedule="breadth-first", interleave=2, places=places, kv=kv, mesh=mesh)
    plan |= dict(alpha=1.0 if "host" in places else 0.0)
    model = dict(num_layers=len(parse_layers(layers)), layers=layers, layer_types={"local": {"sliding_window": 8}})
    compare(Case(plan, model), 9, count=2, request=request)


@pytest.mark.slow
@pytest.mark.parametrize("seed", (130, 81, 188, 199, 215))
def test_documents_with_members_of_their_own_have_the_dense_gradients(seed, request):
    compare(with_window(case(seed), seed), seed, count=3, batches=batches, request=request)
