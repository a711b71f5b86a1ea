"""Documents in sequences, made up: their lengths are drawn, so that no data have to be read."""

import numpy as np

from sppo_jax.predict.documents import Packed, documents_of


def packed(rows, weight=1.0):
    """Returns the sequences of a source from the sizes of the pieces of each."""
    counts = [len(row) for row in rows]
    return Packed(weight, np.concatenate(rows).astype(np.int32), np.concatenate([[0], np.cumsum(counts)]))


def drawn(model, length, mean, num_rows=64, seed=0):
    """Returns documents of lognormal sizes, packed end to end and cut where a sequence ends."""
    rng, rows = np.random.default_rng(seed), []
    for _ in range(num_rows):
        sizes = np.maximum(1, rng.lognormal(np.log(mean) - 0.5, 1.0, 4 + 4 * length // mean).astype(int))
        ends = np.minimum(np.cumsum(sizes), length)
        rows.append(np.diff(np.concatenate([[0], np.unique(ends)])))
    return documents_of([packed(rows)], model, length)


def alike(model, length, size):
    """Returns documents of one size, in sequences that are all alike."""
    whole, left = divmod(length, size)
    return documents_of([packed([[size] * whole + [left] * bool(left)])], model, length)
