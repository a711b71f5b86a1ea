"""Groups that run again from their first layer's input: exact in every plan."""

import pytest
from combinations import draw_period
from programs import compare

DRAWN_IN_CI = (39,)
DRAWN_SLOWLY = range(1, 60)


@pytest.mark.parametrize("seed", DRAWN_IN_CI)
def test_drawn_periods_have_the_dense_loss_and_gradients(seed, request):
    compare(draw_period(seed), seed, count=2, request=request)


@pytest.mark.slow
@pytest.mark.parametrize("seed", DRAWN_SLOWLY)
def test_more_drawn_periods_have_the_dense_loss_and_gradients(seed, request):
    compare(draw_period(seed), seed, count=2, request=request)
