"""Every mesh spreads parameters: next to no zeros, and cuts that whole runs of members share."""

import math

import pytest

from sppo_jax.config.model import ModelConfig
from sppo_jax.models.counts import num_params
from sppo_jax.predict.stage_params import stage_params
from sppo_jax.program.spread import Cut, padded, spread

LLAMA_8B = ModelConfig(vocab_size=128256, hidden_size=4096, num_layers=32, num_heads=32, num_kv_heads=8, mlp_size=14336)


def test_what_divides_gets_one_cut_of_its_largest_dim_and_no_zeros():
    assert spread((4096, 32, 128), 2, 4) == (Cut(0, 8),)
    assert spread((16, 48), 1, 6) == (Cut(1, 6),)
    assert spread((4096,), 1, 1) == () == spread((), 2, 3)


def test_experts_lie_one_after_another_where_their_number_divides():
    assert spread((128, 2048, 768), 1, 8) == (Cut(0, 8),) == spread((128, 768, 2048), 2, 4)
    # Of 60 experts eight devices have no equal parts; a dim that divides has.
    assert spread((60, 2048, 768), 1, 8) == (Cut(1, 8),)


def test_what_does_not_divide_gets_few_zeros_or_two_cuts():
    assert padded((4096, 14336), spread((4096, 14336), 1, 6)) == (4096, 14340)
    assert spread((40, 63), 9, 8) == (Cut(1, 9), Cut(0, 8))
    assert spread((40, 63), 8, 9) == (Cut(0, 8), Cut(1, 9))


@pytest.mark.parametrize(("data", "seq"), [(6, 2), (2, 6), (3, 35), (12, 1), (1, 12), (1536, 8), (12288, 1)])
def test_cuts_are_runs_of_whole_members(data, seq):
    for dims in [(4096, 14336), (100, 7), (32, 128), (5, 5)]:
        cuts = spread(dims, data, seq)
        assert math.prod(cut.parts for cut in cuts) == data * seq
        assert len({cut.dim for cut in cuts}) == len(cuts)
        major = cuts[0].parts
        # The second cut begins at a member whose number is a multiple of what follows, on one axis or the other.
        assert len(cuts) == 1 or data % major == 0 or (major % data == 0 and data * seq % major == 0)


@pytest.mark.parametrize("pipe", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize("members", [1, 3, 5, 6, 12, 24, 48, 96, 97, 384, 768, 1000, 1536, 3072, 6144, 12288])
def test_no_device_keeps_more_than_a_tenth_above_its_share(pipe, members):
    if pipe * members > 12288:
        return
    for data in {1, members, math.gcd(members, 8), math.gcd(members, 96)}:
        own = stage_params(LLAMA_8B, 32 // pipe, pipe, data, members // data).own
        assert own <= 1.1 * num_params(LLAMA_8B) / (pipe * members)
