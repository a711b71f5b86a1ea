"""How a run is cut for the gated delta rule, and its FLOPs."""

from sppo_jax.mixers.delta_work import Cut, cut_of, delta_flops, longest_stretch


def test_a_run_is_cut_by_its_length_and_heads_alone():
    assert cut_of(1, 512) == Cut(1, 1, 64)
    assert cut_of(2000, 512) == Cut(1, 8, 2048)
    assert cut_of(262144, 4 * 128) == Cut(8, 8, 32768)
    assert cut_of(262144, 32 * 128) == Cut(64, 8, 4096)
    for length in (1, 63, 65, 1000, 5000, 99999):
        for elements in (1, 512, 6144, 10**9):
            cut = cut_of(length, elements)
            assert cut.stretches * cut.tokens >= length and cut.tokens % (64 * cut.spans) == 0
            assert cut.stretches == 1 or (cut.tokens - 64 * cut.spans) * elements < 2**24


def test_no_run_of_at_most_a_length_has_a_longer_stretch():
    for elements in (512, 6144, 10**9):
        for length in (1, 2000, 2049, 40_000, 99_999):
            most = longest_stretch(length, elements)
            assert most >= max(cut_of(shorter, elements).tokens for shorter in range(1, length + 1, 61))
    assert longest_stretch(99_999, 512) == 32768 > cut_of(34_000, 512).tokens


def test_flops_are_those_of_the_recurrence():
    """A state decays, is read twice and written once; each channel has a product for each tap."""
    assert delta_flops(2, 4, 6, 5, 4) == 7 * 4 * 6 * 5 + 2 * 4 * (2 * 2 * 6 + 4 * 5)
