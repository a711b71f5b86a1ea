"""Documents in sequences, made up for benches and tests: their lengths are drawn, so that no data have to be read."""

from collections.abc import Sequence

import numpy as np

from sppo_jax.config import ModelConfig
from sppo_jax.predict.seconds.documents import Documents, Packed, documents_of

# Tokens of a document in the mean: 17,000 is that of the standard library's files, as bytes; chats are short.
KINDS = {"whole": 0, "stdlib": 17_000, "chats": 1_500}


def packed(rows: Sequence[Sequence[int] | np.ndarray], weight: float = 1.0) -> Packed:
    """Returns the sequences of a source from the tokens of the pieces of each."""
    counts = [len(row) for row in rows]
    return Packed(weight, np.concatenate(rows).astype(np.int32), np.concatenate([[0], np.cumsum(counts)]))


def drawn(model: ModelConfig, length: int, mean: int, num_rows: int = 64, seed: int = 0) -> Documents:
    """Returns documents of lognormal sizes, end to end and cut where a sequence ends.

    Args:
        model: the model shape.
        length: tokens of a sequence.
        mean: tokens of a document, in the mean; 0: each is as long as a sequence.
        num_rows: sequences.
        seed: of the draws.
    """
    if not mean:
        return alike(model, length, length)
    rng, rows = np.random.default_rng(seed), []
    for _ in range(num_rows):
        sizes = np.maximum(1, rng.lognormal(np.log(mean) - 0.5, 1.0, 4 + 4 * length // mean).astype(int))
        ends = np.minimum(np.cumsum(sizes), length)
        rows.append(np.diff(np.concatenate([[0], np.unique(ends)])))
    return documents_of([packed(rows)], model, length)


def alike(model: ModelConfig, length: int, size: int) -> Documents:
    """Returns documents of one size, in sequences that are all alike."""
    whole, left = divmod(length, size)
    return documents_of([packed([[size] * whole + [left] * bool(left)])], model, length)
