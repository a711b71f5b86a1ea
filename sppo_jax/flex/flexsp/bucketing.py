"""FlexSP's buckets: documents of similar length are one kind, as long as the longest of them.

FlexSP's paper says that its 16 buckets add at most 2.3% of tokens to a microbatch. Departure: the released code adds
buckets where 16 of them would take more than half of the room that a microbatch leaves; here there are never more.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# The most tokens that the buckets of a microbatch may add, over the tokens of its documents.
MOST_TOKEN_ERROR = 0.023


@dataclass(frozen=True, kw_only=True)
class Buckets:
    """Documents by length.

    Args:
        lengths: tokens of the longest document of each bucket, increasing.
        counts: documents of each bucket.
        token_error: tokens that the buckets add, over the tokens of the documents.
    """

    lengths: tuple[int, ...]
    counts: tuple[int, ...]
    token_error: float


def bucket(lengths: np.ndarray, num_buckets: int = 16) -> Buckets:
    """Divides documents into buckets that add the fewest tokens.

    The dynamic program is FlexSP's: err[k][q] = min over j of err[j][q - 1] + sum over i in j+1..k of (s_k - s_i),
    documents sorted by length. Documents of equal length are one entry here, since an optimum exists that keeps them
    together.

    Args:
        lengths: tokens of each document, int64 [documents], at least one.
        num_buckets: most buckets (Q), at least 1.
    """
    values, counts = np.unique(lengths.astype(np.int64), return_counts=True)
    number = np.concatenate([[0], np.cumsum(counts)])
    tokens = np.concatenate([[0], np.cumsum(values * counts)])
    # added[j, k]: tokens added if values j..k-1 are one bucket as long as value k-1; impossible unless j < k.
    size = len(values) + 1
    longest = np.concatenate([[0], values])
    added = longest[None, :] * (number[None, :] - number[:, None]) - (tokens[None, :] - tokens[:, None])
    impossible = np.iinfo(np.int64).max // 4
    added = np.where(np.arange(size)[:, None] < np.arange(size)[None, :], added, impossible)
    least, cuts = np.full(size, impossible), []
    least[0] = 0
    for _ in range(min(num_buckets, len(values))):
        total = least[:, None] + added
        cuts.append(np.argmin(total, axis=0))
        least = np.minimum(np.min(total, axis=0), impossible)
    ends = [len(values)]
    for cut in reversed(cuts):
        ends.append(int(cut[ends[-1]]))
    ends.reverse()
    return Buckets(
        lengths=tuple(int(values[end - 1]) for end in ends[1:]),
        counts=tuple(int(number[end] - number[begin]) for begin, end in zip(ends, ends[1:], strict=False)),
        token_error=float(least[-1] / tokens[-1]),
    )


def bucketed(lengths: np.ndarray, num_buckets: int = 16) -> np.ndarray:
    """Returns the length of each document's bucket, int64 [documents]."""
    upper = np.array(bucket(lengths, num_buckets).lengths, np.int64)
    return upper[np.searchsorted(upper, lengths)]
