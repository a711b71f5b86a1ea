"""Lengths of the chunks of a sequence: equal, of equal work, or as given (of equal seconds: `equal_cost`)."""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from sppo_jax.rules import Facts, check

MENU_SIZE = 4  # distinct lengths that a plan chooses by itself; each one costs segments to compile
_MANY = 48  # chunks that are cut one by one, for lack of a faster way
_BISECTIONS = 8  # halvings of the range in which the slowest chunk's cost lies
# The most tokens of each of `counts` equal chunks from tokens `starts` on, broadcast against each other.
MostTokens = Callable[[np.ndarray, np.ndarray], np.ndarray]


def equal_lengths(length: int, num_chunks: int, multiple: int) -> tuple[int, ...]:
    """Cuts a sequence into chunks of equal length; what is left over lengthens the first ones by one multiple.

    Args:
        length: tokens of the sequence.
        num_chunks: number of chunks.
        multiple: tokens that each length is a multiple of.

    Raises:
        ValueError: the length is no multiple, or there are more chunks than multiples.
    """
    check_count(length, num_chunks, multiple)
    short, longer = divmod(length // multiple, num_chunks)
    return ((short + 1) * multiple,) * longer + (short * multiple,) * (num_chunks - longer)


@lru_cache(maxsize=256)
def flops_balanced_lengths(
    length: int, num_chunks: int, multiple: int, *, pair_flops: float, token_flops: float
) -> tuple[int, ...]:
    """Cuts a sequence into chunks of about equal work, with at most MENU_SIZE distinct, not increasing lengths.

    A chunk of x tokens after p others costs `pair_flops (x p + x^2 / 2) + token_flops x`.

    Args:
        length: tokens of the sequence.
        num_chunks: number of chunks.
        multiple: tokens that each length is a multiple of.
        pair_flops: cost of a query and a key it attends to.
        token_flops: cost of a token apart from attention.

    Raises:
        ValueError: the length is no multiple, or there are more chunks than multiples.
    """
    check_count(length, num_chunks, multiple)
    cost = _ChunkCost(pair_flops, token_flops)
    parts = next((p for p in (8, 4, 2) if num_chunks % p == 0 and num_chunks // p >= _MANY), 1)
    if parts > 1 and length % (multiple * parts) == 0:
        # Many chunks: fewer, each cut into equal parts, which are about as expensive as each other.
        few = _balanced(length, num_chunks // parts, multiple * parts, cost)
        return tuple(tokens // parts for tokens in few for _ in range(parts))
    return _balanced(length, num_chunks, multiple, cost)


def _balanced(length: int, num_chunks: int, multiple: int, cost: "_ChunkCost") -> tuple[int, ...]:
    exact = _tail_backward(length, num_chunks, multiple, cost)
    candidates = [equal_lengths(length, num_chunks, multiple), _menu_lengths(length, num_chunks, multiple, cost)]
    if is_menu(exact):
        candidates.append(exact)
    return min(candidates, key=lambda lengths: (cost.greatest(lengths), len(set(lengths))))


def given_lengths(length: int, lengths: Sequence[int], seq: int, *, warn: bool = True) -> tuple[int, ...]:
    """Takes lengths as given; warns if they cost more compiled shapes than a plan would choose.

    Args:
        length: tokens of the sequence.
        lengths: tokens of each chunk.
        seq: devices of a stage, which share each chunk evenly.
        warn: whether to warn.

    Raises:
        ValueError: a length is not a positive multiple of `seq`, or they do not sum to the sequence.
    """
    check(Facts(length=length, chunks=tuple(lengths), seq=seq))
    if warn and not is_menu(lengths):
        segments = 1 + sum(left != right for left, right in pairwise(lengths))
        warnings.warn(
            f"sequence.chunks should have at most {MENU_SIZE} lengths, none longer than the one before, got "
            f"{len(set(lengths))} distinct chunk lengths in {segments} runs, which need as many shapes and at "
            "least as many compiled segments; use fewer lengths to compile faster",
            stacklevel=2,
        )
    return tuple(lengths)


def is_menu(lengths: Sequence[int]) -> bool:
    """Returns whether lengths are few and do not increase along the sequence."""
    return len(set(lengths)) <= MENU_SIZE and all(left >= right for left, right in pairwise(lengths))


class _ChunkCost:
    """Cost of a chunk, and the lengths that have a given cost, in closed form."""

    def __init__(self, pair_flops: float, token_flops: float) -> None:
        self.pair, self.token = pair_flops, token_flops

    def of(self, start: float, tokens: float) -> float:
        return self.pair * (tokens * start + tokens * tokens / 2) + self.token * tokens

    def greatest(self, lengths: Sequence[int]) -> float:
        start, costs = 0, []
        for tokens in lengths:
            costs.append(self.of(start, tokens))
            start += tokens
        return max(costs)

    def tokens_before(self, end: float, cost: float) -> float:
        """Returns the length of the chunk that ends at token `end` and has this cost (at most `end`).

        With a = pair / 2 and b = pair end + token the cost of x tokens is b x - a x^2, so x is the smaller root.
        """
        b = self.pair * end + self.token
        # This form of the root does not cancel and holds for pair = 0 too.
        return 2 * cost / (b + math.sqrt(max(0.0, b * b - 2 * self.pair * cost)))

    def run_tokens(self, start: np.ndarray, count: np.ndarray, cost: float) -> np.ndarray:
        """Returns the length of `count` equal chunks from `start` on of which the last, the slowest, has this cost.

        The last one costs pair ((count - 1/2) x^2 + start x) + token x.
        """
        a, b = self.pair * (count - 0.5), self.pair * start + self.token
        return 2 * cost / (b + np.sqrt(b * b + 4 * a * cost))


def _tail_backward(length: int, num_chunks: int, multiple: int, cost: _ChunkCost) -> tuple[int, ...]:
    """Cuts chunks of equal work from the end backward and rounds each cut to a multiple."""
    share = cost.of(0, length) / num_chunks
    cuts = [length]
    end = float(length)
    for chunk in reversed(range(1, num_chunks)):
        end -= cost.tokens_before(end, share)
        # Every chunk needs at least one multiple, before and after the cut.
        cut = min(round(end / multiple) * multiple, cuts[-1] - multiple)
        cuts.append(max(cut, chunk * multiple))
    cuts.append(0)
    return tuple(right - left for left, right in pairwise(reversed(cuts)))


def _menu_lengths(length: int, num_chunks: int, multiple: int, cost: _ChunkCost) -> tuple[int, ...]:
    """Cuts runs of equal chunks so that the slowest chunk is as cheap as a few distinct lengths allow."""
    best = equal_lengths(length, num_chunks, multiple)
    low, high = cost.of(0, length) / num_chunks, cost.greatest(best)
    for _ in range(_BISECTIONS):
        bound = (low + high) / 2

        def most_tokens(starts: np.ndarray, counts: np.ndarray, bound: float = bound) -> np.ndarray:
            return cost.run_tokens(starts, counts, bound).astype(np.int64) // multiple * multiple

        # One run fewer leaves a length free to make the sum come out.
        for runs in longest_runs(num_chunks, growing_counts(num_chunks - 1), most_tokens, MENU_SIZE):
            found = _trim(runs, length, multiple)
            if found is not None and is_menu(found) and cost.greatest(found) < cost.greatest(best):
                best = found
        if sum(count * tokens for count, tokens in runs) < length:
            low = bound
        else:
            high = bound
    return best


@lru_cache(maxsize=1024)
def growing_counts(limit: int) -> tuple[int, ...]:
    """Returns the numbers up to a limit to try: all small ones, then about every fourth part more."""
    counts = []
    count = 1
    while count <= limit:
        counts.append(count)
        count += max(1, count // 4)
    return tuple(counts)


def _trim(runs: list[tuple[int, int]], length: int, multiple: int) -> tuple[int, ...] | None:
    """Shortens one run so that the lengths sum to `length`; None where they do not reach it or no run can give."""
    excess = sum(count * tokens for count, tokens in runs) - length
    if not runs or excess < 0:
        return None
    least_tokens = [tokens for _, tokens in runs[1:]] + [multiple]
    for index, ((count, tokens), least) in enumerate(zip(runs, least_tokens, strict=True)):
        shorter = tokens - excess // count
        if excess % (count * multiple) == 0 and shorter >= least:
            runs = [*runs[:index], (count, shorter), *runs[index + 1 :]]
            return tuple(tokens for count, tokens in runs for _ in range(count))
    # No run can give evenly: the last one falls into two lengths.
    count, tokens = runs[-1]
    short, longer = divmod((count * tokens - excess) // multiple, count)
    if short < 1:
        return None
    head = [tokens for count, tokens in runs[:-1] for _ in range(count)]
    return (*head, *[(short + 1) * multiple] * longer, *[short * multiple] * (count - longer))


def check_count(length: int, num_chunks: int, multiple: int) -> None:
    """Checks that a sequence can be cut into so many chunks of whole multiples.

    Raises:
        ValueError: it cannot; names the nearest lengths, or the most chunks.
    """
    check(Facts(length=length, chunks=num_chunks, seq=1, tile=multiple))


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
