"""Runs of equally long chunks that get as far along a sequence as a limit of each chunk's cost allows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

# The most tokens of each of `counts` equal chunks from tokens `starts` on, broadcast against each other.
MostTokens = Callable[[np.ndarray, np.ndarray], np.ndarray]


@dataclass(frozen=True, kw_only=True)
class _Level:
    """The farthest ends with at most so many runs, one entry for each number of chunks that was reached.

    An entry that needs no run more than a level before has `count` 0.

    Args:
        done: chunks so far.
        end: tokens so far.
        tokens: tokens of a chunk of the last run.
        count: chunks of the last run.
        parent: the entry of the level before.
    """

    done: np.ndarray
    end: np.ndarray
    tokens: np.ndarray
    count: np.ndarray
    parent: np.ndarray


def longest_runs(
    num_chunks: int, counts: Sequence[int], most_tokens: MostTokens, max_runs: int
) -> list[list[tuple[int, int]]]:
    """Returns (chunks, tokens of each) of the runs that get farthest, with up to `max_runs` runs and with one fewer.

    Chunks of later runs are no longer. Found by dynamic programming over the number of chunks.

    Args:
        num_chunks: chunks in all.
        counts: numbers of chunks that a run may have, rising; the last run has what is left.
        most_tokens: how long chunks may be.
        max_runs: the most runs, at least 2.

    Returns:
        The runs with up to `max_runs`, then those with one fewer; [] where none get far.
    """
    tried = np.array(counts, dtype=np.int64)
    one, zero = np.ones(1, np.int64), np.zeros(1, np.int64)
    # The first run is as long as it may be.
    levels = [_Level(done=zero, end=zero, tokens=one * np.iinfo(np.int64).max, count=zero, parent=zero)]
    found = []
    for runs in range(1, max_runs + 1):
        if runs >= max_runs - 1:
            found.append(_finished(levels, num_chunks, most_tokens))
        if runs < max_runs:
            levels.append(_grown(levels[-1], num_chunks, tried, most_tokens))
    return found[::-1]


def _grown(level: _Level, num_chunks: int, counts: np.ndarray, most_tokens: MostTokens) -> _Level:
    """Returns the farthest ends with a run more; of runs that get equally far, the first counts."""
    tokens = np.minimum(most_tokens(level.end[:, None], counts), level.tokens[:, None])
    done = level.done[:, None] + counts
    grown = np.flatnonzero((done < num_chunks) & (tokens > 0))
    parents, which = np.divmod(grown, max(1, len(counts)))
    tokens, done, count = tokens.ravel()[grown], done.ravel()[grown], counts[which]
    ends = level.end[parents] + count * tokens
    before = np.full(num_chunks, -1, np.int64)
    before[level.done] = level.end
    best = before.copy()
    np.maximum.at(best, done, ends)
    farther = np.flatnonzero((ends == best[done]) & (ends > before[done]))[::-1]
    chosen = np.full(num_chunks, -1, np.int64)
    # Of equal indices the last assignment counts: the first of the farthest.
    chosen[done[farther]] = farther
    reached, first = np.unique(done[before[done] < 0], return_index=True)
    old = len(level.done)
    all_done = np.concatenate([level.done, reached[np.argsort(first)]])
    stays = chosen[all_done] < 0
    choice = np.where(stays, 0, chosen[all_done])
    entry = np.arange(len(all_done))

    def pick(new: np.ndarray, kept: np.ndarray) -> np.ndarray:
        found = new[choice] if len(new) else np.zeros(len(all_done), np.int64)
        found[:old] = np.where(stays[:old], kept, found[:old])
        return found

    return _Level(
        done=all_done,
        end=pick(ends, level.end),
        tokens=pick(tokens, level.tokens),
        count=pick(count, np.zeros(old, np.int64)),
        parent=pick(parents, entry[:old]),
    )


def _finished(levels: list[_Level], num_chunks: int, most_tokens: MostTokens) -> list[tuple[int, int]]:
    """Returns the runs that get farthest if one with all chunks that are left comes last."""
    level = levels[-1]
    count = num_chunks - level.done
    tokens = np.minimum(most_tokens(level.end, count), level.tokens)
    ends = np.where(tokens > 0, level.end + count * tokens, 0)
    entry = int(np.argmax(ends))
    if ends[entry] <= 0:
        return []
    runs = [(int(count[entry]), int(tokens[entry]))]
    for one in reversed(levels):
        if one.count[entry]:
            runs.append((int(one.count[entry]), int(one.tokens[entry])))
        entry = int(one.parent[entry])
    return runs[::-1]
