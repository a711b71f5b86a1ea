"""Measures of what a long context helps: validation loss, overall and by position in a document; recall by distance."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from sppo_jax.attention.validate import KEYS
from sppo_jax.data.held_out import OnePass
from sppo_jax.data.positions import Bucket, ContextGain
from sppo_jax.data.rows.protocol import Batch, Rows
from sppo_jax.evaluation.context import Gains
from sppo_jax.evaluation.placement import gather, local_rows, place_batch
from sppo_jax.files.format_bytes import format_figure
from sppo_jax.pipeline.api import TokenScores
from sppo_jax.plan.plan import Plan
from sppo_jax.processes.same_program import check_lowered

Scores = Callable[[nnx.State, Mapping[str, jax.Array]], TokenScores]


class Interrupted(Exception):
    """A validation was told to stop: the message says how far it was; what it measured is dropped."""


@dataclass(frozen=True, kw_only=True)
class Recall:
    """Share of the answers `distance` tokens back that the model has right."""

    distance: int
    num_targets: int
    accuracy: float


@dataclass(frozen=True, kw_only=True)
class Validation:
    """Mean loss in nats a target, overall and by position; recall by distance if the data ask for recall.

    Buckets without targets are left out. The seconds are those of the validation without compiling.

    Args:
        num_sequences: sequences that were measured, each once.
        num_held_out: sequences that are held out; None if they are drawn without end.
        gains: what context beyond a number of tokens is worth, where it was asked for.
    """

    loss: float
    num_targets: int
    num_sequences: int
    num_held_out: int | None = None
    buckets: tuple[Bucket, ...]
    recall: tuple[Recall, ...] = ()
    gains: tuple[ContextGain, ...] = ()
    seconds: float = 0.0
    compile_s: float = 0.0

    @property
    def is_finite(self) -> bool:
        """Whether the loss is a finite number."""
        return math.isfinite(self.loss)

    @property
    def extent(self) -> str:
        """What was measured, in words: "139 tokens in 2 of 2 sequences"."""
        of = "" if self.num_held_out is None else f" of {self.num_held_out:,}"
        return f"{self.num_targets:,} tokens in {self.num_sequences:,}{of} sequences"

    def metrics(self) -> dict:
        """Returns the fields of metrics.jsonl for a validation."""
        found: dict = {
            "validation_loss": self.loss,
            "validation_loss_by_position": [dataclasses.asdict(bucket) for bucket in self.buckets],
            "validation_num_sequences": self.num_sequences,
            "validation_num_held_out": self.num_held_out,
            "validation_s": self.seconds,
            "validation_compile_s": self.compile_s,
        }
        if self.recall:
            found["recall_by_distance"] = [dataclasses.asdict(recall) for recall in self.recall]
        if self.gains:
            found["gain_by_context"] = [gain.to_dict() for gain in self.gains]
        return found

    def describe(self) -> str:
        """Returns a short table."""
        lines = [f"validation loss {format_figure(self.loss, '.4f')} nats per token over {self.extent}, by position:"]
        for bucket in self.buckets:
            span = f"{bucket.first}..{bucket.last}"
            lines.append(f"  {span:>16}  {format_figure(bucket.loss, '.4f')}  ({bucket.num_targets} tokens)")
        lines += [f"  {gain.text}" for gain in self.gains]
        if self.recall:
            lines.append("recall by distance:")
        lines += [
            f"  {r.distance:>16}  {format_figure(r.accuracy, '.1%')}  ({r.num_targets} answers)" for r in self.recall
        ]
        return "\n".join(lines)


def position_edges(sequence_length: int) -> list[int]:
    """Returns the lower ends of the position buckets: 0, then powers of two of the sequence, and S as the end.

    They begin at S/16, or earlier where that leaves buckets of 32 positions or more, but not before S/2048.
    """
    shares = [2**power for power in range(12) if power <= 4 or sequence_length >> power >= 32]
    return sorted({0, *(sequence_length // share for share in shares)})


def validate(
    token_scores: Scores,
    params: nnx.State,
    rows: Rows,
    plan: Plan,
    mesh: Mesh,
    *,
    num_wanted: int,
    contexts: Sequence[int] = (),
    told: Callable[[], bool] = lambda: False,
) -> Validation | None:
    """Measures the loss of the first held-out sequences, each once and the same on every mesh.

    Every process reads whole batches.

    Args:
        token_scores: `f(params, batch)`, from `pipeline.api.evaluate`.
        params: the parameters.
        rows: the sequences held out.
        plan: says how many sequences a batch has.
        mesh: the plan's.
        num_wanted: most sequences to measure.
        contexts: tokens beyond which the gain by context is measured, by a plan from `context.plan_for_cuts`.
        told: returns whether all processes agree to stop; called before each batch, and before each pass over cut ones.

    Returns:
        The losses; None if no token has a target.

    Raises:
        Interrupted: the processes agreed to stop.
    """
    num_sequences = plan.num_sequences
    own = local_rows(mesh, num_sequences)

    def place(batch: Batch) -> dict[str, jax.Array]:
        return place_batch({key: value[own] for key, value in batch.items()}, plan, mesh)

    chosen = OnePass(rows, num_wanted=num_wanted)
    with closing(chosen.batches(num_sequences)) as batches:
        found = evaluate(token_scores, params, _until_told(batches, told, chosen), place, contexts, told)
    counts = {"num_sequences": len(chosen), "num_held_out": chosen.num_held_out}
    return dataclasses.replace(found, **counts) if found else None


def evaluate(
    token_scores: Scores,
    params: nnx.State,
    batches: Iterable[Batch],
    place: Callable[[Batch], Mapping[str, jax.Array]],
    contexts: Sequence[int] = (),
    beat: Callable[[], object] = lambda: None,
) -> Validation | None:
    """Measures the loss of held-out sequences.

    Args:
        token_scores: `f(params, batch)`, from `pipeline.api.evaluate`.
        params: the parameters.
        batches: int32 [num_sequences, sequence_length] each of tokens, targets, positions, document_ids, and where the
            data ask for recall `distances` (0 where there is no answer).
        place: puts a batch on the devices.
        contexts: as for `validate`.
        beat: called before each pass over a batch with cut documents.

    Returns:
        The losses; None if no token has a target.
    """
    hits_by_distance: dict[int, list[int]] = {}  # answers, hits
    begin_s, compile_s = time.perf_counter(), 0.0
    sums, counts, edges, num_sequences = np.zeros(12), np.zeros(12, np.int64), [0], 0
    gains = Gains(contexts)

    def score(batch: Batch) -> np.ndarray:
        beat()
        return gather(token_scores(params, place({key: batch[key] for key in KEYS})).losses_BS).astype(np.float64)

    for number, batch in enumerate(batches):
        placed = place({key: batch[key] for key in KEYS if key in batch})
        compile_s += 0.0 if number else prepare_scores(token_scores, params, placed)
        num_sequences += len(batch["targets"])
        scores = token_scores(params, placed)
        losses = gather(scores.losses_BS).astype(np.float64)
        gains.add(batch, losses, score)
        edges = position_edges(losses.shape[1])
        wanted = batch["targets"] >= 0
        bucket = np.searchsorted(edges, batch["positions"][wanted], side="right") - 1
        sums += np.bincount(bucket, weights=losses[wanted], minlength=len(sums))
        counts += np.bincount(bucket, minlength=len(counts))
        if "distances" in batch:
            _count_hits(hits_by_distance, batch["distances"], gather(scores.hits_BS))
    if not counts.sum():
        return None
    buckets = tuple(
        Bucket(first=edges[i], last=edges[i + 1] - 1, num_targets=int(counts[i]), loss=float(sums[i] / counts[i]))
        for i in np.flatnonzero(counts)
    )
    recall = tuple(
        Recall(distance=distance, num_targets=answers, accuracy=hits / answers)
        for distance, (answers, hits) in sorted(hits_by_distance.items())
    )
    loss = float(sums.sum() / counts.sum())
    return Validation(
        loss=loss,
        num_targets=int(counts.sum()),
        num_sequences=num_sequences,
        buckets=buckets,
        recall=recall,
        gains=gains.found(),
        seconds=time.perf_counter() - begin_s - compile_s,
        compile_s=compile_s,
    )


def _until_told(batches: Iterable[Batch], told: Callable[[], bool], chosen: OnePass) -> Iterator[Batch]:
    """Yields batches until all processes agree to stop."""
    num_done = 0
    for batch in batches:
        if told():
            raise Interrupted(f"stopped after {min(num_done, len(chosen)):,} of {len(chosen):,} sequences")
        yield batch
        num_done += len(batch["targets"])


def prepare_scores(token_scores: Scores, params: nnx.State, placed: Mapping[str, jax.Array]) -> float:
    """Compiles the scores for a batch, if they are not compiled yet; returns the seconds that this took."""
    begin_s = time.perf_counter()
    prepare = getattr(token_scores, "prepare", None)  # scores of another making compile as they are called
    if prepare is not None:
        device = jax.local_devices()[0]
        prepare(params, placed, lambda lowered: check_lowered("evaluation", lowered, device))
    return time.perf_counter() - begin_s


def _count_hits(totals: dict[int, list[int]], distances_BS: np.ndarray, hits_BS: np.ndarray) -> None:
    """Adds a batch's answers and hits to those of each distance."""
    for distance in np.unique(distances_BS[distances_BS > 0]).tolist():
        here = distances_BS == distance
        answers, hits = totals.setdefault(distance, [0, 0])
        totals[distance] = [answers + int(here.sum()), hits + int(hits_BS[here].sum())]
