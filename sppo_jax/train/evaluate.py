"""Validation loss, overall and by position within a document: what a long context is good for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import jax
import numpy as np
from flax import nnx

from sppo_jax.data.packing import Batch
from sppo_jax.pipeline.api import TokenScores

Scores = Callable[[nnx.State, Mapping[str, jax.Array]], TokenScores]


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Mean loss of the targets whose token stands at positions first..last of its document."""

    first: int
    last: int
    num_targets: int
    loss: float


@dataclass(frozen=True, kw_only=True)
class Validation:
    """Mean loss in nats a target, overall and by position; buckets without targets are left out."""

    loss: float
    num_targets: int
    buckets: tuple[Bucket, ...]

    def metrics(self) -> dict:
        """Return what metrics.jsonl says of a validation."""
        by_position = [
            {"first": bucket.first, "last": bucket.last, "num_targets": bucket.num_targets, "loss": bucket.loss}
            for bucket in self.buckets
        ]
        return {"validation_loss": self.loss, "validation_loss_by_position": by_position}

    def describe(self) -> str:
        """Return a short table."""
        lines = [f"validation loss {self.loss:.4f} nats a token over {self.num_targets} tokens, by position:"]
        for bucket in self.buckets:
            span = f"{bucket.first}..{bucket.last}"
            lines.append(f"  {span:>16}  {bucket.loss:.4f}  ({bucket.num_targets} tokens)")
        early, late = self.buckets[0], self.buckets[-1]
        if late is not early:
            gain, word = early.loss - late.loss, "lower" if late.loss < early.loss else "HIGHER"
            lines.append(
                f"  late positions ({late.first}..{late.last}) are {abs(gain):.4f} nats {word} than early ones"
            )
        return "\n".join(lines)


def position_edges(sequence_length: int) -> list[int]:
    """Return the lower ends of the position buckets: 0, then S/16, S/8, S/4 and S/2, and S as the end of the last."""
    return sorted({0, *(sequence_length // share for share in (16, 8, 4, 2, 1))})


def evaluate(
    token_scores: Scores,
    params: nnx.State,
    batches: Iterable[Batch],
    place: Callable[[Batch], Mapping[str, jax.Array]],
) -> Validation | None:
    """Measure the loss of held-out sequences.

    Args:
        token_scores: `f(params, batch)`, from `pipeline.api.evaluate`.
        params: the parameters.
        batches: int32 [num_sequences, sequence_length] each of tokens, targets, positions, document_ids.
        place: puts a batch on the devices.

    Returns:
        The losses; None if no token has a target.
    """
    sums, counts, edges = np.zeros(5), np.zeros(5, np.int64), [0]
    for batch in batches:
        losses = np.asarray(token_scores(params, place(batch)).losses_BS, np.float64)
        edges = position_edges(losses.shape[1])
        wanted = batch["targets"] >= 0
        bucket = np.searchsorted(edges, batch["positions"][wanted], side="right") - 1
        sums += np.bincount(bucket, weights=losses[wanted], minlength=len(sums))
        counts += np.bincount(bucket, minlength=len(counts))
    if not counts.sum():
        return None
    buckets = tuple(
        Bucket(first=edges[i], last=edges[i + 1] - 1, num_targets=int(counts[i]), loss=float(sums[i] / counts[i]))
        for i in np.flatnonzero(counts)
    )
    return Validation(loss=float(sums.sum() / counts.sum()), num_targets=int(counts.sum()), buckets=buckets)
