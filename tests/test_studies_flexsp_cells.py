"""Systems of FlexSP's paper: packing of the baselines, and the published gains."""

import numpy as np
import pytest

from sppo_jax.flex.flexsp.costs import MODELS, flexsp_costs
from sppo_jax.flex.flexsp.systems import batch_ns, one_degree_ns
from studies.flexsp_cells import PUBLISHED, part_of_cluster, released_batches, sample_batches, simulate_cell

COSTS = flexsp_costs(MODELS["7b"])


def test_published_cells():
    judged = [cell for cell in PUBLISHED if cell.judged]
    assert len(PUBLISHED) == 18 and [cell.corpus for cell in judged] == ["wikipedia"] * 6
    assert [cell.over_deepspeed for cell in judged] == [1.72, 1.59, 1.64, 1.46, 1.43, 1.53]
    assert {cell.static_degree for cell in judged} == {64}
    assert sorted({cell.static_degree for cell in PUBLISHED if not cell.judged and cell.max_kilotokens == 192}) == [32]


def test_one_group_of_all_devices_takes_the_sum():
    lengths = np.array([100_000, 50_000, 128])
    expected = COSTS.fixed_ns + int(COSTS.times_KD(lengths)[:, -1].sum())
    assert one_degree_ns(lengths, COSTS, 64) == expected
    assert batch_ns("static", lengths, COSTS, static_degree=64) == expected


def test_groups_are_filled_to_90_percent_of_their_tokens():
    part = part_of_cluster(COSTS, 2)
    for share, num_microbatches in ((0.48, 2), (0.44, 1)):
        lengths = np.full(2, int(part.cluster_tokens * share))
        work = int(part.times_KD(lengths)[:, 0].sum())
        assert one_degree_ns(lengths, part, 2) == num_microbatches * part.fixed_ns + work


def test_documents_of_the_last_microbatch_are_dealt_over_its_teams():
    lengths = np.full(4, 4096)
    part = part_of_cluster(COSTS, 8)
    assert one_degree_ns(lengths, part, 2) == part.fixed_ns + int(part.times_KD(lengths)[0, 0])


def test_a_degree_that_cannot_hold_the_longest_document():
    lengths = np.array([30_000, 128])
    assert one_degree_ns(lengths, COSTS, 4) is None
    assert batch_ns("batch", lengths, COSTS, static_degree=4) > 0
    with pytest.raises(ValueError, match="a team must hold the longest document, got 30000 tokens for teams of 25796"):
        batch_ns("static", lengths, COSTS, static_degree=4)


def test_flexsp_beats_the_best_degree_which_beats_the_static_one():
    for corpus in ("wikipedia", "github-assumed"):
        for lengths in sample_batches(corpus, 192, 3):
            static, batch, flexsp = (
                batch_ns(name, lengths, COSTS, static_degree=64) for name in ("static", "batch", "flexsp")
            )
            assert flexsp < batch <= static
            assert batch_ns("own", lengths, COSTS, static_degree=64) <= 1.01 * flexsp


def test_batches_hold_the_rare_longest_documents():
    longest = max(lengths.max() for lengths in sample_batches("wikipedia", 384, 40))
    assert 131_000 < longest <= 384_000 - 128


def test_released_batches_hold_the_released_documents_in_their_order():
    short, long = released_batches(192), released_batches(384)
    assert {len(short), len(long)} == {40} and {len(lengths) for lengths in short + long} == {512}
    # The ninth batch of the list has the only document of these batches that is longer than 192,000.
    assert [lengths.max() for lengths in (long[5], max(short, key=np.max))] == [256_000, 179_072]
    assert np.array_equal(np.concatenate(long)[: 5 * 512], np.concatenate(short)[: 5 * 512])
    rest = np.delete(np.concatenate(long), np.concatenate(long).argmax())
    assert np.array_equal(rest, np.concatenate(short)[: len(rest)])


@pytest.mark.parametrize(
    "model, longest, mean_ms, first_ms",
    [
        ("7b", 384, 6997.5595, 5934.8692),
        ("7b", 192, 6791.3555, 5934.8692),
        ("13b", 384, 11545.1149, 9774.5191),
        ("30b", 192, 24439.6788, 21620.8984),
    ],
)
def test_deepspeed_takes_as_long_as_the_released_program_says(model, longest, mean_ms, first_ms):
    """The milliseconds are those that the authors' solver prints for its static baseline, run on the same batches."""
    costs = flexsp_costs(MODELS[model], max_kilotokens=longest)
    times = [batch_ns("static", lengths, costs, static_degree=64) / 1e6 for lengths in released_batches(longest)]
    assert times[0] == pytest.approx(first_ms, abs=1e-3) and np.mean(times) == pytest.approx(mean_ms, abs=1e-3)


@pytest.mark.parametrize("batch, released_ms", [(3, 3339), (20, 2954)])
def test_flexsp_is_about_as_fast_as_the_released_program_says(batch, released_ms):
    """The authors' solver, run with SCIP and 10 seconds of CPU for each microbatch; 7B, 384K.

    Batch 3 was solved for 2 to 6 microbatches, batch 20 for 2 to 4; 2 was the fastest by a fifth in both.
    """
    (lengths,) = released_batches(384, first=batch, count=1)
    fast_ms = batch_ns("unbounded", lengths, flexsp_costs(MODELS["7b"], max_kilotokens=384), static_degree=64) / 1e6
    assert 0.98 * released_ms <= fast_ms <= 1.005 * released_ms


@pytest.mark.slow
def test_gains_of_the_published_cells():
    """Nothing is fitted. The worst cell is 7B at 384K."""
    errors = []
    for cell in PUBLISHED:
        if cell.judged:
            seconds = simulate_cell(cell, released_batches(cell.max_kilotokens), ("static", "flexsp"))
            errors.append(seconds["static"] / seconds["flexsp"] / cell.over_deepspeed - 1)
    assert np.mean(np.abs(errors)) <= 0.10 and np.max(np.abs(errors)) <= 0.20
