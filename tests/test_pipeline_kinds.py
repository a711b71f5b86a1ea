"""Layers of several kinds in the pipeline: exact in every plan."""

import pytest
from combinations import draw_kinds
from programs import compare

# Four in each order of chunks: other heads, rotations, MLPs, experts, windows and sinks; resident and gathered.
DRAWN_IN_CI = (10, 22, 26, 42, 9, 19, 33, 45)
DRAWN_SLOWLY = range(30_000, 30_040)
KINDS = {"local": dict(num_heads=6, num_kv_heads=2, head_dim=4, mlp_size=9, sliding_window=6, sinks=True)}


@pytest.mark.parametrize("seed", DRAWN_IN_CI)
def test_drawn_kinds_have_the_dense_loss_and_gradients(seed, request):
    compare(draw_kinds(seed), seed, count=2, request=request)


@pytest.mark.slow
@pytest.mark.parametrize("seed", DRAWN_SLOWLY)
def test_more_drawn_kinds_have_the_dense_loss_and_gradients(seed, request):
    compare(draw_kinds(seed), seed, count=2, request=request)
