"""Layers of several kinds in the pipeline: exact in every plan."""

import pytest
from combinations import draw_kinds
from programs import compare

DRAWN_SLOWLY = range(30_000, 30_040)


@pytest.mark.slow
@pytest.mark.parametrize("seed", DRAWN_SLOWLY)
def test_more_drawn_kinds_have_the_dense_loss_and_gradients(seed, request):
    compare(draw_kinds(seed), seed, count=2, request=request)
