"""Lengths of chunks that take equally long, by the planner's seconds, so that no stage waits for a slower neighbour."""

import math
from dataclasses import dataclass, replace

from sppo_jax.models.counts import chunk_pairs
from sppo_jax.predict.seconds.costs import CostModel
from sppo_jax.search.space.chunks import check_count

# Most steps to the seconds of a chunk; some ten are enough.
_STEPS = 40
# The share that runs take of a limit, as its exponent.
_SHARE_OF_RUNS = 1 / 3
# Seconds that differ by less of their size are the same.
_CLOSE = 1e-6


@dataclass(frozen=True, kw_only=True)
class ChunkSeconds:
    """Seconds of a chunk of x tokens that ends at token e, forward and backward.

    They are `pair (e x - x^2 / 2) + token x + prefix e + fixed`. The forward's last wave of queries is computed whole:
    where it lacks u tokens, it takes `forward u (e - x)` more.

    Args:
        pair: of a query and a key it attends to.
        token: of a token, apart from attention.
        prefix: of a token of the prefix, whatever the chunk's length.
        fixed: of any chunk.
        forward: of a query and a key in the forward alone.
        wave: tokens of a whole wave of queries; 0: waves are not counted.
    """

    pair: float
    token: float
    prefix: float = 0.0
    fixed: float = 0.0
    forward: float = 0.0
    wave: float = 0.0

    def of(self, end: float, tokens: float) -> float:
        """Returns the seconds of the chunk of so many tokens that ends at token `end`."""
        unfilled = math.ceil(tokens / self.wave) * self.wave - tokens if self.wave else 0.0
        attention_s = self.pair * (end * tokens - tokens * tokens / 2) + self.forward * unfilled * (end - tokens)
        return attention_s + self.token * tokens + self.prefix * end + self.fixed

    def tokens_before(self, end: float, seconds: float) -> float:
        """Returns the most tokens of a chunk that ends at token `end` and takes so long; 0 if none does."""
        left = seconds - self.prefix * end - self.fixed
        if left <= 0:
            return 0.0
        # With b = pair end + token, x is the smaller root of b x - pair x^2 / 2 = left.
        tokens = _root(-self.pair / 2, self.pair * end + self.token, left)
        if not self.wave:
            return tokens
        filled = math.ceil(tokens / self.wave) * self.wave
        slope = self.pair * end + self.token - self.forward * (end + filled)
        begun = _root(self.forward - self.pair / 2, slope, left - self.forward * filled * end)
        # A wave more is begun only if what it takes longer is left; else the chunk ends with the wave before.
        return max(begun, filled - self.wave)

    def of_run(self, count: int) -> "ChunkSeconds":
        """Returns the seconds of a run of so many chunks by its tokens; on the mean a prefix ends within the run."""
        within = self.prefix * (count - 1) / 2
        return ChunkSeconds(
            pair=self.pair, token=self.token - within, prefix=self.prefix * count, fixed=self.fixed * count
        )


def _root(square: float, slope: float, value: float) -> float:
    """Returns the smaller root of `square x^2 + slope x = value`; 0 for a value that is not positive."""
    if value <= 0:
        return 0.0
    # This form does not cancel and holds for square = 0 too.
    return 2 * value / (slope + math.sqrt(max(0.0, slope * slope + 4 * square * value)))


def chunk_seconds(costs: CostModel, length: int, num_chunks: int) -> ChunkSeconds:
    """Returns the seconds of chunks by a cost model.

    Of what rises by steps only the waves of queries count, not the blocks of the blockwise kernel. Attention counts at
    one rate, the fastest of those that were measured. What a ring sends
    counts as if it rose evenly along the sequence.

    Args:
        costs: seconds of units.
        length: tokens of a sequence.
        num_chunks: chunks of a sequence.
    """
    device = replace(costs.cluster.device, attention_rows=0, attention_block=0, attention_rates=None)
    smooth = replace(costs, cluster=replace(costs.cluster, device=device))
    without_ring = replace(smooth, ring=replace(smooth.ring, members=1))
    tokens = max(1, length // (2 * num_chunks))
    far = max(1, length - 2 * tokens)

    def seconds(start: int, count: int) -> float:
        sent_s = sum(without_ring.transfer_s(op, start, count) for op in "FB")
        return sent_s + sum(smooth.compute_s(op, start, count) for op in "FB") + 2 * device.overhead_s

    def ring_s(start: int) -> float:
        with_s, without_s = (
            sum(one.transfer_s(op, start, 2 * tokens) for op in "FB") for one in (smooth, without_ring)
        )
        return with_s - without_s

    # Two lengths at the two ends of a sequence tell the four rates.
    first, second = seconds(0, tokens), seconds(0, 2 * tokens)
    rise, larger_rise = seconds(far, tokens) - first, seconds(far, 2 * tokens) - second
    pair = max(0.0, (larger_rise - rise) / (far * tokens))
    prefix = max(0.0, rise / far - pair * tokens)
    token = (second - first) / tokens - prefix - 1.5 * pair * tokens
    fixed = max(0.0, first - (token + prefix) * tokens - pair * tokens * tokens / 2)
    near_s = ring_s(0)
    sent = max(0.0, ring_s(far) - near_s) / far
    # Where layers are of several types, the waves are those of the type that takes longest.
    longest = max(costs.attention, key=costs.pair_s_of)
    wave, share = costs.wave_tokens(longest), 1.0
    if wave and costs.attended is not None:
        # Of the prefix a wave meets what the first document of a chunk has of it.
        share = costs.attended.pairs(far, 2 * tokens, longest.window) / chunk_pairs(far, 2 * tokens, longest.window)
    if wave:
        # Without a prefix a wave that is not full takes no longer: what is left is the kernel's tail, of every token.
        token += sum(costs.compute_s(op, 0, tokens) - smooth.compute_s(op, 0, tokens) for op in "FB") / tokens
    return ChunkSeconds(
        pair=pair,
        token=token,
        prefix=prefix + sent,
        fixed=fixed + near_s - sent * 2 * tokens,
        forward=costs.pair_s_of(longest) * share if wave else 0.0,
        wave=wave,
    )


def equal_cost_lengths(
    length: int, num_chunks: int, multiple: int, seconds: ChunkSeconds, *, longest: float, run: int = 1
) -> tuple[int, ...]:
    """Cuts a sequence into chunks of equal seconds, exactly from the tail, the first chunks no longer than a limit.

    What the limit takes from the first chunks goes to the others, which are equal again. The chunks of an interleaved
    schedule go round the stages in runs of one a stage: there the runs are cut so, and then the chunks of each run. So
    no chunk of a run waits for another. Of the limit runs take the cube root, their chunks the rest.

    Args:
        length: tokens of the sequence.
        num_chunks: number of chunks.
        multiple: tokens that each length is a multiple of.
        seconds: of a chunk.
        longest: the longest chunk, in mean chunks; at least 1.
        run: chunks that go round the stages together; 1 where they do not.

    Raises:
        ValueError: the length is no multiple, there are more chunks than multiples, or the limit is below the mean.
    """
    check_count(length, num_chunks, multiple)
    if longest < 1:
        raise ValueError(f"sequence.longest must be at least 1, the mean chunk, got {longest:g}; raise it")
    limit = _up(longest * length / num_chunks, multiple)
    if run == 1 or num_chunks <= run or num_chunks % run:
        return _cut(0, length, num_chunks, multiple, seconds, limit)
    runs, of_runs = num_chunks // run, longest**_SHARE_OF_RUNS
    found: list[int] = []
    for tokens in _cut(0, length, runs, multiple, seconds.of_run(run), _up(of_runs * length / runs, multiple), run):
        limit_of_run = min(limit, _up(longest / of_runs * tokens / run, multiple))
        found += _cut(sum(found), tokens, run, multiple, seconds, limit_of_run)
    return tuple(found)


def _up(tokens: float, multiple: int) -> int:
    return math.ceil(tokens / multiple) * multiple


def _cut(
    start: int, length: int, count: int, multiple: int, seconds: ChunkSeconds, limit: int, least: int = 1
) -> tuple[int, ...]:
    """Cuts the tokens behind `start` into pieces of the least equal seconds, none longer than `limit` if it can be.

    Args:
        start: tokens before the first piece.
        length: tokens to cut.
        count: number of pieces.
        multiple: tokens that each length is a multiple of.
        seconds: of a piece.
        limit: the most tokens of a piece.
        least: multiples that each piece has at least.
    """
    step = multiple * least

    def cut(value: float) -> tuple[list[int], int]:
        """Returns the pieces that take so long, last to first, and by how many tokens the first is too long."""
        pieces, left = [], length
        for behind in reversed(range(1, count)):
            tokens = int(min(limit, seconds.tokens_before(start + left, value))) // multiple * multiple
            pieces.append(max(step, min(tokens, left - behind * step)))
            left -= pieces[-1]
        return [*pieces, left], left - int(min(limit, seconds.tokens_before(start + left, value)))

    # Pieces of the mean length take the seconds of the first at least, and of the last at most.
    mean = length / count
    low, high = seconds.of(start + mean, mean), seconds.of(start + length, mean)
    best, excess = cut(high)
    while excess > 0:
        high *= 2
        best, excess = cut(high)
    beyond, missing = float(excess), float(max(cut(low)[1], 1))
    for _ in range(_STEPS):
        if -multiple < excess <= 0 or high - low < _CLOSE * high:
            break
        middle = (low * beyond - high * missing) / (beyond - missing)
        pieces, excess = cut(middle)
        # The end that stays counts half (Illinois), or it would stay for long.
        if excess > 0:
            low, missing, beyond = middle, excess, beyond / 2
        else:
            high, beyond, missing, best = middle, excess, missing / 2, pieces
    return tuple(reversed(best))
