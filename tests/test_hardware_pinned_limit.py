"""The smallest limit of XLA's pool with which a run gets what it asks for."""

import pytest

from sppo_jax.hardware.pinned_limit import Requests, fill_requests, holds, regions, smallest_limit
from sppo_jax.hardware.pinned_pool import REFUSED_BYTES, PinnedPool

GIB = 2**30
EDGE = 15099494 * 2**15  # of 512 GiB, times 0.9 in float32
# Parameters and two moments of Llama-3-8B in float32.
PARAMS = (2101346304, 2101346304, 7516192768, 7516192768, 536870912, 2147483648, 2147483648, 7516192768, 536870912)
STATE = PARAMS * 3


def test_a_pool_below_512_gib_is_one_region():
    assert regions(221, REFUSED_BYTES) == (221 * GIB,) and regions(511, REFUSED_BYTES) == (511 * GIB,)
    assert regions(700, REFUSED_BYTES) == (EDGE, 700 * GIB - EDGE)
    assert regions(1000, REFUSED_BYTES) == (EDGE, EDGE, 1000 * GIB - 2 * EDGE)
    assert regions(1801, None) == (1801 * GIB,)


@pytest.mark.parametrize("limit_gib", [1, 64, 221, 512, 640, 1000, 1434, 1789, 1863])
@pytest.mark.parametrize("refused", [REFUSED_BYTES, None])
def test_the_requests_of_a_run_make_these_regions(limit_gib, refused):
    pool = PinnedPool(limit_gib * GIB, refused)
    assert all(pool.allocate(size) for size in fill_requests(limit_gib, refused))
    assert tuple(pool.regions) == regions(limit_gib, refused)
    # All of the limit, but what float32 cuts off.
    assert limit_gib * GIB - 2**20 < pool.pinned_bytes <= limit_gib * GIB


def test_one_temporary_pins_its_own_bytes():
    assert smallest_limit(Requests(temporaries=(int(220.3 * GIB),)), 300, REFUSED_BYTES) == 221
    assert smallest_limit(Requests(temporaries=(int(220.3 * GIB),)), 220, REFUSED_BYTES) is None
    assert smallest_limit(Requests(), 10, REFUSED_BYTES) == 1


def test_the_state_and_the_stash_of_one_h100_need_two_pieces():
    """1M tokens: 89.7 GiB of state and 548.7 of temporaries, which no region holds in one piece."""
    temporaries = int(548.74 * GIB)
    assert smallest_limit(Requests(state=STATE, temporaries=(temporaries,)), 1863, REFUSED_BYTES) is None
    assert smallest_limit(Requests(state=STATE, temporaries=(temporaries,)), 1863, None) == 639
    first = int(460.7 * GIB)
    cut = Requests(state=STATE, stash=(first, temporaries - first))
    assert smallest_limit(cut, 1863, REFUSED_BYTES) == 639
    halves = Requests(state=STATE, stash=(temporaries // 2,) * 2)
    assert smallest_limit(halves, 700, REFUSED_BYTES) is None  # 460.8 holds no two of them, nor 239 one and the state


def test_no_smaller_limit_would_do():
    """Brute force over all limits: the first that holds is the one, and it pins least."""
    requests = Requests(state=STATE, temporaries=(460 * GIB, 460 * GIB, 415 * GIB))
    pinned = {limit: holds(requests, limit, REFUSED_BYTES) for limit in range(1400, 1700)}
    enough = {limit: size for limit, size in pinned.items() if size}
    best = smallest_limit(requests, 1863, REFUSED_BYTES)
    assert best == min(enough) and pinned[best] == min(enough.values()) <= best * GIB
    assert 0 in pinned.values()


def test_a_save_beside_a_step_has_its_own_room():
    save = tuple(size // 8 for size in STATE)  # 11.2 GiB
    alone = Requests(temporaries=(int(97.25 * GIB),))
    beside = Requests(temporaries=(int(97.25 * GIB),), save=save)
    assert smallest_limit(alone, 200, REFUSED_BYTES) == 98
    assert smallest_limit(beside, 200, REFUSED_BYTES) == 109  # 97.25 + 11.22
    # The copy would take the stash's place where the pool has no more, and the next step would fail.
    assert not holds(beside, 108, REFUSED_BYTES)


def test_a_blocking_save_has_room_for_one_array():
    """Between two steps: in the place of the temporaries, or in its own where the stash stays in pieces."""
    passing = 30 * GIB
    assert smallest_limit(Requests(temporaries=(100 * GIB,), passing=passing), 300, REFUSED_BYTES) == 100
    assert smallest_limit(Requests(stash=(100 * GIB,), passing=passing), 300, REFUSED_BYTES) == 130
    assert (
        smallest_limit(Requests(stash=(80 * GIB,), temporaries=(20 * GIB,), passing=passing), 300, REFUSED_BYTES) == 110
    )


def test_a_state_that_is_restored_in_another_order_has_its_place():
    for state in (STATE, STATE[::-1], tuple(sorted(STATE)), STATE[5:] + STATE[:5]):
        assert holds(Requests(state=state, temporaries=(460 * GIB, 88 * GIB)), 639, REFUSED_BYTES) == 639 * GIB


def test_the_regions_of_another_driver_or_limit_are_replayed_too():
    requests = Requests(temporaries=(460 * GIB, 88 * GIB))
    given = fill_requests(549, REFUSED_BYTES)
    assert holds(requests, 549, REFUSED_BYTES, given) == 549 * GIB
    assert not holds(requests, 549, None, given)  # the first request makes a region of 512 GiB there
    assert holds(requests, 1000, REFUSED_BYTES, given) > 549 * GIB  # a larger limit cuts no region
