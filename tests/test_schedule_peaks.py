"""The peaks of several stages are those of each alone."""

import numpy as np
import pytest

from sppo_jax.schedule.peaks import Repeat, peak, peaks


@pytest.mark.parametrize("seed", range(60))
def test_the_peaks_of_stages_are_those_of_each_alone(seed):
    rng = np.random.default_rng(seed)
    num_ticks, num_stages = rng.integers(1, 30), rng.integers(1, 5)
    changes_TS = rng.choice([-2, -1, 0, 0, 1, 3], (num_ticks + 1, num_stages))
    changes_TS[-1] = 0
    edges = np.sort(rng.choice(num_ticks + 1, 2 * rng.integers(0, 3)))  # some repeats are empty, or meet
    repeats = tuple(Repeat(int(a), int(b), int(rng.integers(1, 5)), 1) for a, b in edges.reshape(-1, 2))
    of_stages = [[(tick, int(change)) for tick, change in enumerate(of_stage)] for of_stage in changes_TS.T]
    want = [max(0, peak(changes, repeats)) for changes in of_stages]
    assert peaks(np.arange(num_ticks + 1), changes_TS, repeats).tolist() == want
    # Ticks in which nothing comes or goes may be left out, but for the edges of repeats.
    some = np.union1d(np.flatnonzero(changes_TS.any(axis=1)), edges).astype(int)
    assert peaks(some, changes_TS[some], repeats).tolist() == want
