"""The replay of XLA's pool of pinned host memory, against cases worked out by hand from its rules."""

import pytest

from sppo_jax.hardware.pinned_pool import REFUSED_BYTES, PinnedPool, next_try, rounded

KIB, MIB, GIB = 2**10, 2**20, 2**30
# 512 GiB times 0.9 in float32, whose 0.9 is 15099494 / 2**24.
FIRST_TRY_BELOW_512_GIB = 15099494 * 2**15


def regions_after(requests, limit_bytes, refused_bytes=REFUSED_BYTES):
    """Returns the regions after requests that are all held; None from the first one that fails."""
    pool = PinnedPool(limit_bytes, refused_bytes)
    got = [pool.allocate(size) for size in requests]
    return pool.regions, [chunk is not None for chunk in got]


def test_a_region_is_the_next_power_of_two_and_doubles_where_it_did_not_grow():
    # 1 MiB: the first region has 2 MiB, the next would have 4. 2 MiB: not in the free 1 MiB, so a region of 4.
    # 3 MiB: 2 MiB are free, so a region of 8. 100 MiB: 8 grows to 128, which the next region has again.
    regions, got = regions_after([MIB, 2 * MIB, 3 * MIB, 100 * MIB, 128 * MIB], 10 * GIB)
    assert all(got) and regions == [2 * MIB, 4 * MIB, 8 * MIB, 128 * MIB, 128 * MIB]


def test_the_limit_cuts_the_last_region_and_fails_what_it_does_not_hold():
    # 220 GiB: 256, cut to 221. One of 1 GiB more fits in, another does not.
    assert regions_after([220 * GIB], 1863 * GIB) == ([256 * GIB], [True])
    assert regions_after([220 * GIB, GIB, GIB], 221 * GIB) == ([221 * GIB], [True, True, False])
    assert regions_after([222 * GIB], 221 * GIB) == ([], [False])


def test_a_limit_that_is_no_multiple_of_the_unit_is_rounded_down():
    assert regions_after([1], 1000) == ([768], [True])  # the first region is rounded up to 1024, and cut to 3 x 256


def test_the_driver_refuses_512_gib_and_the_pool_tries_nine_tenths():
    assert next_try(REFUSED_BYTES) == FIRST_TRY_BELOW_512_GIB == pytest.approx(460.8 * GIB, rel=1e-6)
    assert next_try(513 * GIB) == 495746580480  # float32's 0.9 gives 32 KiB less than 0.9 would
    assert next_try(2560) == 2304 and next_try(512) == 256  # 460.8 is rounded up to 512, and must be smaller
    fits = [FIRST_TRY_BELOW_512_GIB]
    assert regions_after(fits, 2000 * GIB) == ([FIRST_TRY_BELOW_512_GIB], [True])
    assert regions_after([FIRST_TRY_BELOW_512_GIB + 1], 2000 * GIB) == ([], [False])
    assert regions_after([511 * GIB], 511 * GIB) == ([511 * GIB], [True])  # cut by the limit, and not refused
    assert regions_after([512 * GIB], 2000 * GIB) == ([], [False])
    assert regions_after([700 * GIB], 700 * GIB, None) == ([700 * GIB], [True])  # a driver that refuses nothing
    assert regions_after([300 * GIB], 2000 * GIB, None) == ([512 * GIB], [True])


def test_tries_go_on_from_whatever_the_limit_leaves():
    # Behind two regions that did not grow the next has 1024 GiB, cut to the 753 that are left: 678, 610, 549, 494.
    edge = FIRST_TRY_BELOW_512_GIB
    regions, got = regions_after([edge, edge, edge], 2 * edge + 753 * GIB)
    assert all(got) and regions[2] == pytest.approx(753 * GIB * 0.9**4, rel=1e-6)


def test_a_request_takes_the_smallest_free_chunk_that_holds_it():
    pool = PinnedPool(100 * GIB)
    a, b, c = pool.allocate(2 * GIB), pool.allocate(5 * GIB), pool.allocate(8 * GIB)  # regions of 2, 8 and 8 GiB
    assert pool.regions == [2 * GIB, 8 * GIB, 8 * GIB]
    assert b.place == (1, 0) and pool.free_bytes == (3 * GIB,)
    for chunk in (a, c):
        pool.free(chunk)
    assert pool.allocate(GIB + 1).place == (0, 0)  # of 2, 3 and 8 GiB
    assert pool.allocate(3 * GIB).place == (1, 5 * GIB) and pool.allocate(4 * GIB).place == (2, 0)
    assert pool.pinned_bytes == 18 * GIB  # nothing is given back to the system


def test_a_rest_stays_free_where_it_is_large():
    pool = PinnedPool(10 * GIB)
    pool.allocate(GIB - 128 * MIB)  # a region of 1 GiB; the rest has 128 MiB
    assert pool.free_bytes == (128 * MIB,)
    pool = PinnedPool(10 * GIB)
    pool.allocate(GIB - 127 * MIB)  # the rest goes along
    assert pool.free_bytes == ()
    pool.allocate(KIB)  # so this needs a region of its own; a rest as large as the request stays, whatever its size
    assert pool.regions == [GIB, GIB] and pool.free_bytes == (GIB - KIB,)


@pytest.mark.parametrize("order", ["bac", "cab", "abc"])
def test_freed_neighbours_join_within_a_region_and_not_beyond(order):
    pool = PinnedPool(100 * GIB)
    chunks = {name: pool.allocate(size * GIB) for name, size in (("a", 4), ("b", 2), ("c", 2))}
    assert pool.regions == [4 * GIB, 4 * GIB] and chunks["b"].place[0] == chunks["c"].place[0] == 1
    for name in order:
        pool.free(chunks[name])
    assert pool.free_bytes == (4 * GIB, 4 * GIB)
    # The next region had 8 GiB, as the second did not grow.
    assert pool.allocate(5 * GIB).place == (2, 0) and pool.regions[2] == 8 * GIB


def test_sizes_are_rounded_to_256_bytes():
    assert [rounded(size) for size in (1, 256, 257)] == [256, 256, 512]
    pool = PinnedPool(100 * GIB)
    assert (pool.allocate(1).num_bytes, pool.allocate(257).place) == (256, (0, 256))


def test_the_largest_region_is_one_that_a_request_makes():
    for limit_gib, largest in [(221, 221 * GIB), (1000, FIRST_TRY_BELOW_512_GIB)]:
        pool = PinnedPool(limit_gib * GIB)
        assert pool.largest_region_bytes() == largest
        pool.allocate(largest)
        assert pool.regions == [largest]
    assert PinnedPool(1000 * GIB, None).largest_region_bytes() == 1000 * GIB
    full = PinnedPool(GIB)
    full.allocate(GIB)
    assert full.largest_region_bytes() == 0
