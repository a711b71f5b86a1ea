"""A task that needs a long context: facts early in a sequence, with questions a chosen distance later.

A sequence is random values in which each of `pairs` keys stands twice. The token behind the first place of a key is the
key's answer. The second place of the key is the question, and its target is the answer. No other token has a target.

    v2 k1 v0 v3 k0 v0 v1 v3 . . . v2 k0 v1 v1 v0 k1 v2 . . .
                                     ^v0         ^v0

All values are drawn independently from the same distribution. So only the token behind the first place of a key tells
the answer, and a guess is right with probability 1 / values. Facts lie in the first `length - longest distance` tokens.
Each distance is as frequent as every other, and the place of a fact does not reveal its distance.

Vocabulary: keys 0..pairs-1, then values pairs..pairs+values-1; larger tokens do not occur.
"""

from __future__ import annotations

import numpy as np

from sppo_jax.config.data import RecallConfig
from sppo_jax.data.rows.protocol import Batch, Rows

RECALL = "recall"  # as a source
# A draw is a pure function of (seed, stream, index); the streams share no sequence.
TRAINING, VALIDATION = 0, 1
# Sequences never repeat, so the length of an epoch has no effect on the data.
_ROWS_PER_EPOCH = 1 << 20


class RecallRows:
    """Sequences of the recall task by number, each drawn when it is read."""

    def __init__(self, config: RecallConfig, *, length: int, vocab_size: int, seed: int, stream: int = TRAINING):
        """Checks that the task fits into a sequence and a vocabulary.

        Args:
            config: number of pairs and distances.
            length: tokens of a sequence.
            vocab_size: the vocabulary size of the model.
            seed: the seed of the draws.
            stream: TRAINING or VALIDATION.

        Raises:
            ValueError: the sequence is too short or the vocabulary too small.
        """
        self.config, self.length, self.vocab_size, self._seed = config, length, vocab_size, (seed, stream)
        longest, least = max(config.distances), max(config.distances) + _fact_tokens(config)
        if length < least:
            raise ValueError(
                f"sequence.length must be at least {least} for {config.pairs} pairs with answers up to {longest} "
                f"tokens back, got {length}; raise it, or lower data.recall.distances or data.recall.pairs"
            )
        if vocab_size < config.pairs + config.values:
            raise ValueError(
                f"model.vocab_size must be at least {config.pairs + config.values} for {config.pairs} keys and "
                f"{config.values} values, got {vocab_size}; raise it or lower data.recall.pairs or data.recall.values"
            )

    @property
    def chance(self) -> float:
        """The accuracy of a guess."""
        return 1 / self.config.values

    def __len__(self) -> int:
        return _ROWS_PER_EPOCH

    def __getitem__(self, index: int) -> Batch:
        """Draws sequence `index`.

        Returns:
            int32 [length] each of tokens, targets (-1 except at questions), positions and document_ids (0).
        """
        rng, fact_P, question_P, _ = self._places(index)
        pairs, values = self.config.pairs, self.config.values
        tokens = rng.integers(pairs, pairs + values, self.length, dtype=np.int32)
        targets = np.full(self.length, -1, np.int32)
        tokens[fact_P] = tokens[question_P] = rng.permutation(pairs)
        targets[question_P] = tokens[fact_P + 1]
        return {
            "tokens": tokens,
            "targets": targets,
            "positions": np.arange(self.length, dtype=np.int32),
            "document_ids": np.zeros(self.length, np.int32),
        }

    def distances(self, index: int) -> np.ndarray:
        """Returns the tokens from each question of sequence `index` back to its answer: int32 [length], 0 elsewhere."""
        _, _, question_P, distance_P = self._places(index)
        found = np.zeros(self.length, np.int32)
        found[question_P] = distance_P
        return found

    def decode(self, tokens: np.ndarray) -> str:
        """Writes keys as k0, k1, ..., values as v0, v1, ..."""
        pairs = self.config.pairs
        return " ".join(f"k{t}" if t < pairs else f"v{t - pairs}" for t in tokens.tolist())

    def _places(self, index: int) -> tuple[np.random.Generator, np.ndarray, np.ndarray, np.ndarray]:
        """Draws the places of the facts and questions of a sequence, and their distances."""
        config = self.config
        rng = np.random.default_rng((*self._seed, index))
        # The shares of distances are as equal as the number of pairs allows; the remainder is drawn.
        offers = rng.permutation(len(config.distances))[np.arange(config.pairs) % len(config.distances)]
        distance_P = np.array(config.distances)[offers]
        free = np.ones(self.length, bool)
        fact_P = np.zeros(config.pairs, np.int64)
        span = self.length - max(config.distances) - 1
        for pair, distance in enumerate(distance_P):
            fits = free[:span] & free[1 : span + 1] & free[distance + 1 : distance + 1 + span]
            place = rng.choice(np.flatnonzero(fits))
            free[[place, place + 1, place + 1 + distance]] = False
            fact_P[pair] = place
        return rng, fact_P, fact_P + 1 + distance_P, distance_P


class _Marked:
    def __init__(self, rows: RecallRows):
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Batch:
        return {**self._rows[index], "distances": self._rows.distances(index)}


def with_distances(rows: Rows) -> Rows:
    """Adds `distances` to each sequence of the recall task, for evaluation; returns other rows as they are."""
    return _Marked(rows) if isinstance(rows, RecallRows) else rows


def _fact_tokens(config: RecallConfig) -> int:
    """Returns a number of tokens in which all facts fit: each fact takes at most 8 places from the others."""
    return 8 * (config.pairs - 1) + 2
