"""A row of the stash is cut into the shares that a plan names."""

import pytest

from sppo_jax.plan.host_pieces import ONE_PIECE, cut_line


@pytest.mark.parametrize(
    ("num_elements", "pieces", "want"),
    [
        (2097152, ONE_PIECE, (2097152,)),
        (2097152, (858, 166), (1757184, 339968)),
        (2097152, (512, 256, 256), (1048576, 524288, 524288)),
        (1755584, (342, 341, 341), (586240, 584704, 584640)),  # all but the last are multiples of 256
        (2048, (858, 166), (1716, 332)),
        (64, (858, 166), (54, 10)),
        (3, (1, 1022, 1), (1, 1, 1)),
    ],
)
def test_a_line_is_cut_by_shares(num_elements, pieces, want):
    assert cut_line(num_elements, pieces) == want and sum(want) == num_elements


def test_pieces_are_within_half_a_share_of_the_plan():
    pieces = (100, 1, 400, 23, 500)
    for num_elements in (2**20, 27431 * 64, 2**14 + 40):
        for got, share in zip(cut_line(num_elements, pieces), pieces, strict=True):
            assert abs(got / num_elements - share / 1024) <= 1 / 1024  # half a share at either end


def test_a_line_of_fewer_elements_than_pieces_is_refused():
    with pytest.raises(
        ValueError, match="host_pieces of a plan must be at most 2, the elements of a line of the stash, got 3"
    ):
        cut_line(2, (1, 1, 1022))
