"""FlexSP's sequence blaster: a global batch as microbatches of similar lengths and balanced tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

NUM_OPTIONS = 5


def microbatch_counts(lengths: np.ndarray, cluster_tokens: int) -> range:
    """Returns FlexSP's numbers of microbatches to try: M_min .. M_min + 4, never more than the documents.

    Args:
        lengths: tokens of each document, int64 [documents], at least one.
        cluster_tokens: most tokens of a microbatch.
    """
    least = -(-int(lengths.sum()) // cluster_tokens)
    least = min(least, len(lengths))
    return range(least, min(least + NUM_OPTIONS, len(lengths) + 1))


def blast(lengths: np.ndarray, counts: Sequence[int]) -> list[list[np.ndarray]]:
    """Divides documents, longest first, into runs whose largest number of tokens is least.

    The dynamic program is FlexSP's: DP[k][i] = min over j of max(DP[j][i - 1], tokens of documents j+1..k). For equal
    maxima the first cut is taken, as in the released code.

    Args:
        lengths: tokens of each document, int64 [documents].
        counts: numbers of runs, each 1 .. documents.

    Returns:
        For each number of runs, the documents of each run: indices into `lengths`, int64, longest document first.
    """
    order = np.argsort(-lengths, kind="stable")
    tokens = np.concatenate([[0], np.cumsum(lengths[order])])
    size = len(tokens)
    # runs[k, j]: tokens of documents j..k-1; impossible unless j < k.
    runs = tokens[:, None] - tokens[None, :]
    impossible = np.iinfo(np.int64).max
    runs = np.where(np.arange(size)[None, :] < np.arange(size)[:, None], runs, impossible)
    least, cuts = np.full(size, impossible), []
    least[0] = 0
    for _ in range(max(counts)):
        worst = np.maximum(least[None, :], runs)
        cuts.append(worst.argmin(axis=1))
        least = worst[np.arange(size), cuts[-1]]
    found = []
    for count in counts:
        ends = [size - 1]
        for cut in reversed(cuts[:count]):
            ends.append(int(cut[ends[-1]]))
        ends.reverse()
        found.append([order[begin:end] for begin, end in zip(ends, ends[1:], strict=False)])
    return found
